"""The log of our GCS server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from google.api_core import exceptions

from gcs.actions import Stall
from gcs.faults import Fault
from gcs.kit import PATIENCE, Bucket, ask, get, new_client, put
from gcs.log import SHOWN
from gcs.server import GCSServer


def test_the_log_tells_what_was_asked_and_what_became_of_it(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    first = put(bucket, "leases/x", "body", if_generation_match=0).generation
    get(bucket, "leases/x")
    assert gcs_server.count() == 2 and gcs_server.count("write") == 1
    assert gcs_server.count("*", "leases/*") == 2 and gcs_server.count("read", "other") == 0
    write, read = gcs_server.requests()
    assert (write.generation_match, write.generation, write.body) == (0, first, b"body")
    assert (write.method, read.method, read.generation_match) == ("POST", "GET", None)
    assert write.port == read.port and write.at <= read.at
    assert "gcloud-python" in write.headers["user-agent"]
    assert repr(write) == (
        f"<#1 write 'leases/x' ifGenerationMatch=0 -> 200 committed from :{write.port}>"
    )
    assert repr(write) in repr(gcs_server)


def test_waiting_for_what_does_not_come_shows_the_log(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    put(bucket, "x", "body")
    with pytest.raises(AssertionError, match="#1 write 'x'"):
        gcs_server.wait(lambda: gcs_server.count("read") == 1, timeout=0.01)


def test_a_request_counts_from_its_arrival_on(gcs_server: GCSServer, bucket: Bucket) -> None:
    stall = Stall()
    gcs_server.faults.add(Fault("read", stall))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(get, bucket, "x")
        assert stall.arrived.wait(PATIENCE)
        (request,) = gcs_server.requests("read")
        assert (request.outcome, request.status) == ("pending", None)
        stall.release()
        assert isinstance(answer.exception(PATIENCE), exceptions.NotFound)
    assert (request.outcome, request.status) == ("answered", 404)


def test_the_clients_hidden_request_is_counted(
    gcs_server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it comes, the client asks for the bucket beside the first operation."""
    monkeypatch.delenv("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", raising=False)
    client = new_client(gcs_server.url)
    put(client.bucket("bucket"), "x", "body")
    gcs_server.wait(lambda: gcs_server.count("bucket", when=lambda r: r.status == 200) == 1)
    client.close()
    assert gcs_server.count() == 2


def test_a_long_log_shows_its_end(gcs_server: GCSServer, bucket: Bucket) -> None:
    for number in range(SHOWN + 3):
        ask(gcs_server.url, "GET", f"/storage/v1/b/bucket/o/{number}")
    lines = str(gcs_server.log).splitlines()
    assert len(lines) == SHOWN + 1 and lines[0] == "... 3 before"
    gcs_server.forget()
    assert str(gcs_server.log) == "no requests"
