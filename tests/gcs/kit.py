"""What tests of these servers and of their clients share."""

from __future__ import annotations

import http.client
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Blob, Bucket, Client  # type: ignore[import-untyped]

__all__ = [
    "PATIENCE",
    "QUIET",
    "Blob",
    "Bucket",
    "Client",
    "ask",
    "bucket_of",
    "client_of",
    "get",
    "put",
]

PATIENCE: Final = 20.0
"""Real seconds within which anything happens that happens at all."""
QUIET: Final = "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"
"""Without it the client fetches the bucket's metadata in a thread beside other requests."""


@contextmanager
def client_of(url: str) -> Iterator[Client]:
    """Give a client of the server at ``url``; its connections are closed at the end."""
    os.environ[QUIET] = "true"
    client = Client(
        project="test",
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
        client_options=ClientOptions(api_endpoint=url),
    )
    try:
        yield client
    finally:
        client.close()


@contextmanager
def bucket_of(url: str, name: str = "bucket") -> Iterator[Bucket]:
    """Give a bucket of the server at ``url``, without a request."""
    with client_of(url) as client:
        yield client.bucket(name)


def put(bucket: Bucket, name: str, body: str, **conditions: Any) -> Blob:
    """Write an object with a fresh Blob, once, and return the Blob."""
    blob = bucket.blob(name)
    blob.upload_from_string(body, retry=None, timeout=PATIENCE, **conditions)
    return blob


def get(bucket: Bucket, name: str, **conditions: Any) -> Blob:
    """Read an object with a fresh Blob, once; what was read is its ``content``."""
    blob = bucket.blob(name)
    blob.content = blob.download_as_bytes(retry=None, timeout=PATIENCE, **conditions)
    return blob


def ask(
    url: str, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send a request that no client library has touched; return status, headers and body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    try:
        connection.request(method, target, body, dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()
