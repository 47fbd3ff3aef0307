"""What tests of these servers and of their clients share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Bucket, Client  # type: ignore[import-untyped]

QUIET = "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"
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
