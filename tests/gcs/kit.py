"""What tests of these servers and of their clients share."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from google.api_core import exceptions
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage  # type: ignore[import-untyped]

PATIENCE: Final = 20.0
"""Real seconds within which anything happens that happens at all."""

# The client has no types, and what a checker guesses from its defaults is wrong.
Client: TypeAlias = Any
Bucket: TypeAlias = Any
Blob: TypeAlias = Any


def new_client(url: str) -> Client:
    """Make a client of the server at ``url``, as it comes."""
    return storage.Client(
        project="test",
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
        client_options=ClientOptions(api_endpoint=url),
    )


@contextmanager
def client_of(url: str) -> Iterator[Client]:
    """Give a client that sends what it is told to; its connections are closed at the end."""
    client = new_client(url)
    # It would fetch the bucket's metadata in a thread beside other requests. Not by the
    # environment variable against that: what else runs in this process must see to itself.
    client._bucket_metadata_cache = None
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


def response_of(error: exceptions.GoogleAPICallError) -> Any:
    """Return the answer that the client has made an error of."""
    assert error.response is not None
    return error.response
