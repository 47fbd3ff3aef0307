"""GCSLease keeps what is asked of a backend: on a server of others, on our own, on GCS itself."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

import pytest
from google.cloud import storage  # type: ignore[import-untyped]

from gcs import kit
from gcs.independent import IndependentServer
from gcs.process import GCSProcess
from tako_sync.abc import LeaseBackend
from tako_sync.backends.gcs import GCSLease
from tako_sync.testing.conformance import BackendConformance


class GCSConformance(BackendConformance):
    """What the three have in common.

    Attributes:
        client: a client of Google's for the storage under test.
        bucket: the name of the bucket.
        prefix: a folder for one test.
    """

    client: kit.Client
    bucket: str
    prefix: str

    @contextlib.contextmanager
    def of(self, client: kit.Client, bucket: str) -> Iterator[GCSLease]:
        self.client, self.bucket = client, bucket
        self.prefix = f"conformance/{uuid.uuid4().hex}"
        backend = self.reopen()
        yield backend
        backend.close()

    def reopen(self, backend: LeaseBackend | None = None) -> GCSLease:
        return GCSLease(self.bucket, self.prefix, client=self.client)

    def forget(self, backend: LeaseBackend, key: str) -> None:
        bucket = self.client.bucket(self.bucket)
        bucket.blob(f"{self.prefix}/leases/{key}").delete(retry=None, timeout=kit.PATIENCE)

    def unreachable(self, backend: LeaseBackend) -> GCSLease:
        return GCSLease(self.bucket, client=kit.new_client("http://127.0.0.1:1"))


class TestOnAServerOfOthers(GCSConformance):
    @pytest.fixture
    def backend(self, independent_server: IndependentServer) -> Iterator[GCSLease]:
        with (
            kit.client_of(independent_server.url) as client,
            self.of(client, independent_server.bucket) as backend,
        ):
            yield backend


class TestOnOurOwnServer(GCSConformance):
    @pytest.fixture(params=["increasing generations", "random generations"])
    def backend(
        self, request: pytest.FixtureRequest, gcs_process: GCSProcess
    ) -> Iterator[GCSLease]:
        gcs_process.set(random_generations=request.param == "random generations")
        with (
            kit.client_of(gcs_process.url) as client,
            self.of(client, gcs_process.bucket) as backend,
        ):
            yield backend


class TestOnGCSItself(GCSConformance):
    """``TAKO_TEST_BUCKET=my-bucket``, with application default credentials."""

    @pytest.fixture
    def backend(self) -> Iterator[GCSLease]:
        bucket = os.environ.get("TAKO_TEST_BUCKET")
        if not bucket:
            pytest.skip("no TAKO_TEST_BUCKET is named")
        with self.of(storage.Client(), bucket) as backend:
            yield backend
