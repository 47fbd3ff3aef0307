"""Our GCS server through the real client: what it stores, refuses and answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
from google.api_core import exceptions

from gcs.answers import Answer
from gcs.kit import PATIENCE, Bucket, ask, bucket_of, get, put, response_of
from gcs.server import GCSServer

THREADS = 16


# --- Preconditions -----------------------------------------------------------------------


def test_a_create_of_what_is_absent_is_stored_whole(gcs_server: GCSServer, bucket: Bucket) -> None:
    """The put's answer and the read's headers agree with what is stored."""
    blob = bucket.blob("leases/x")
    blob.cache_control = "no-store"
    blob.upload_from_string(b'{"a": 1}', "application/json", if_generation_match=0, retry=None)
    stored = gcs_server.object("leases/x")
    assert stored is not None and stored.body == b'{"a": 1}'
    assert (blob.generation, blob.metageneration) == (stored.generation, 1)
    assert blob.updated == blob.time_created and blob.updated is not None
    found = get(bucket, "leases/x")
    assert found.content == b'{"a": 1}' and found.generation == stored.generation
    assert (found.cache_control, found.content_type) == ("no-store", "application/json")
    assert (found.crc32c, found.md5_hash) == (blob.crc32c, blob.md5_hash)


def test_a_create_of_what_is_there_is_refused(gcs_server: GCSServer, bucket: Bucket) -> None:
    put(bucket, "x", "first", if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed) as caught:
        put(bucket, "x", "second", if_generation_match=0)
    assert response_of(caught.value).json()["error"]["errors"][0]["reason"] == "conditionNotMet"
    assert _body(gcs_server) == b"first"
    assert [request.committed for request in gcs_server.requests("write")] == [True, False]


def test_an_overwrite_needs_the_current_generation(gcs_server: GCSServer, bucket: Bucket) -> None:
    first = put(bucket, "x", "first", if_generation_match=0).generation
    second = put(bucket, "x", "second", if_generation_match=first).generation
    with pytest.raises(exceptions.PreconditionFailed):
        put(bucket, "x", "late", if_generation_match=first)
    assert second != first and _body(gcs_server) == b"second"


def test_an_overwrite_of_what_is_gone_creates_nothing(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    old = put(bucket, "x", "first").generation
    gcs_server.delete("x")
    with pytest.raises(exceptions.PreconditionFailed):
        put(bucket, "x", "late", if_generation_match=old)
    assert gcs_server.object("x") is None


def test_writes_look_at_the_other_preconditions_too(gcs_server: GCSServer, bucket: Bucket) -> None:
    current = put(bucket, "x", "first").generation
    for conditions in (
        {"if_generation_not_match": current},
        {"if_metageneration_match": 2},
        {"if_generation_match": current, "if_metageneration_match": 2},
    ):
        with pytest.raises(exceptions.PreconditionFailed):
            put(bucket, "x", "late", **conditions)
    assert _body(gcs_server) == b"first"
    put(bucket, "x", "second", if_generation_not_match=0, if_metageneration_match=1)
    assert _body(gcs_server) == b"second"


def test_a_media_upload_looks_at_the_generation(gcs_server: GCSServer) -> None:
    target = "/upload/storage/v1/b/bucket/o?uploadType=media&name=a%2Fb&ifGenerationMatch=0"
    assert ask(gcs_server.url, "POST", target, b"raw")[0] == 200
    assert ask(gcs_server.url, "POST", target, b"late")[0] == 412
    stored = gcs_server.object("a/b")
    assert stored is not None and stored.body == b"raw"


def test_a_delete_needs_the_generation_it_names(gcs_server: GCSServer, bucket: Bucket) -> None:
    first = put(bucket, "x", "first").generation
    second = put(bucket, "x", "second").generation
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("x").delete(if_generation_match=first, retry=None)
    assert _body(gcs_server) == b"second"
    bucket.blob("x").delete(if_generation_match=second, retry=None)
    assert gcs_server.object("x") is None
    with pytest.raises(exceptions.NotFound, match="No such object: bucket/x"):
        bucket.blob("x").delete(if_generation_match=second, retry=None)


def test_a_patch_raises_the_metageneration_alone(gcs_server: GCSServer, bucket: Bucket) -> None:
    blob = put(bucket, "x", "first")
    blob.metadata = {"a": "b"}
    blob.patch(if_metageneration_match=1, retry=None)
    stored = gcs_server.object("x")
    assert stored is not None and stored.properties["metadata"] == {"a": "b"}
    assert (stored.generation, stored.metageneration) == (blob.generation, 2)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.patch(if_metageneration_match=1, retry=None)


@pytest.mark.parametrize("how", ["download_as_bytes", "reload"])
def test_reads_look_at_preconditions(bucket: Bucket, how: str) -> None:
    current = put(bucket, "x", "first").generation

    def look(**conditions: Any) -> None:
        getattr(bucket.blob("x"), how)(retry=None, **conditions)

    look(if_generation_match=current, if_metageneration_match=1)
    look(if_generation_not_match=current - 1)
    for stale in ({"if_generation_match": current - 1}, {"if_metageneration_match": 2}):
        with pytest.raises(exceptions.PreconditionFailed):
            look(**stale)
    with pytest.raises(exceptions.NotModified):
        look(if_generation_not_match=current)


def test_a_replaced_generation_cannot_be_read_any_more(bucket: Bucket) -> None:
    old = put(bucket, "x", "first").generation
    put(bucket, "x", "second")
    with pytest.raises(exceptions.NotFound):
        bucket.blob("x", generation=old).download_as_bytes(retry=None)


@pytest.mark.parametrize("condition", ["ifGenerationMatch=-1", "ifMetaGenerationNotMatch=1"])
def test_a_precondition_that_is_not_understood_is_refused(
    gcs_server: GCSServer, condition: str
) -> None:
    """The second is what the client makes of ``if_metageneration_not_match`` in an upload."""
    target = "/upload/storage/v1/b/bucket/o?uploadType=media&name=x&"
    assert ask(gcs_server.url, "POST", target + condition, b"raw")[0] == 400
    assert gcs_server.object("x") is None


# --- Races -------------------------------------------------------------------------------


def test_of_fifty_creates_at_once_one_wins(gcs_server: GCSServer, bucket: Bucket) -> None:
    """Each over a connection of its own."""
    start = threading.Barrier(50, timeout=PATIENCE)
    head, tail = b"--m\r\n\r\n{}\r\n--m\r\n\r\n", b"\r\n--m--"
    target = "/upload/storage/v1/b/bucket/o?uploadType=multipart&name=x&ifGenerationMatch=0"

    def create(number: int) -> int:
        start.wait()
        kind = {"Content-Type": "multipart/related; boundary=m"}
        return ask(gcs_server.url, "POST", target, head + b"%d" % number + tail, kind)[0]

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(create, range(50)))
    assert sorted(answers) == [200] + 49 * [412]
    assert _body(gcs_server) == b"%d" % answers.index(200)
    assert gcs_server.count("write", "x", lambda request: request.committed) == 1


def test_of_racing_overwrites_one_wins_each_round(gcs_server: GCSServer, bucket: Bucket) -> None:
    """Sixteen threads read the same generation and write on it: no update is lost."""
    put(bucket, "x", "0")
    start = threading.Barrier(THREADS, timeout=PATIENCE)

    def bump(number: int) -> int:
        won = 0
        with bucket_of(gcs_server.url) as mine:
            for _ in range(8):
                found = get(mine, "x")
                start.wait()
                body = str(int(found.content) + 1)
                try:
                    put(mine, "x", body, if_generation_match=found.generation)
                    won += 1
                except exceptions.PreconditionFailed:
                    pass
                start.wait()
        return won

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(bump, range(THREADS))) == 8
    assert _body(gcs_server) == b"8"


# --- What answers carry ------------------------------------------------------------------


def test_a_download_says_why_in_text_and_metadata_say_it_in_json(gcs_server: GCSServer) -> None:
    """As the real service does: a client finds no reason in what a download is refused with."""
    status, headers, body = _download(gcs_server, "no such")
    assert (status, body) == (404, b"No such object: bucket/no such")
    assert headers["Content-Type"].startswith("text/html")
    status, _, body = ask(gcs_server.url, "GET", "/storage/v1/b/bucket/o/no%20such")
    error = json.loads(body)["error"]
    assert (status, error["code"], error["errors"][0]["reason"]) == (404, 404, "notFound")


def test_a_missing_bucket_is_told_from_a_missing_object(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    gcs_server.set(bucket_missing=True)
    looks: list[Callable[[], Any]] = [
        lambda: get(bucket, "x"),
        lambda: put(bucket, "x", "body"),
        lambda: bucket.blob("x").reload(retry=None),
        lambda: list(bucket.list_blobs(retry=None)),
        lambda: bucket.reload(retry=None),
    ]
    for look in looks:
        with pytest.raises(exceptions.NotFound, match="The specified bucket does not exist"):
            look()
    gcs_server.set(bucket_missing=False)
    with pytest.raises(exceptions.NotFound, match="No such object: bucket/x"):
        get(bucket, "x")


def test_a_part_of_a_body_can_be_asked_for(gcs_server: GCSServer, bucket: Bucket) -> None:
    gcs_server.put("x", b"0123456789")
    assert bucket.blob("x").download_as_bytes(start=2, end=4, retry=None) == b"234"
    for asked, answered in (("bytes=0-99", 10), ("bytes=7-", 3), ("bytes=-4", 4)):
        status, headers, body = _download(gcs_server, "x", Range=asked)
        assert (status, len(body)) == (206, answered)
        assert headers["Content-Range"].endswith("/10")
    assert _download(gcs_server, "x", Range="bytes=10-")[0] == 416


def test_the_dates_are_the_servers_clock(gcs_server: GCSServer, bucket: Bucket) -> None:
    with GCSServer(wall=lambda: 1_000_000_000.25, clock_shift=3600) as server:
        server.put("x", b"body")
        _, headers, _ = _download(server, "x")
        for name in ("Date", "Last-Modified"):
            assert parsedate_to_datetime(headers[name]).timestamp() == 1_000_003_600
        with bucket_of(server.url) as theirs:
            blob = put(theirs, "y", "body")
            assert blob.updated.timestamp() == blob.time_created.timestamp() == 1_000_003_600.25
        server.set(date_shift=-7200)  # Date alone steps back
        _, headers, _ = _download(server, "x")
        assert parsedate_to_datetime(headers["Date"]).timestamp() == 999_996_400
        assert parsedate_to_datetime(headers["Last-Modified"]).timestamp() == 1_000_003_600


def test_dates_can_be_dropped(gcs_server: GCSServer) -> None:
    gcs_server.put("x", b"body")
    gcs_server.set(send_date=False)
    _, headers, _ = _download(gcs_server, "x")
    assert "Date" not in headers and "Last-Modified" in headers
    gcs_server.set(send_date=True, send_last_modified=False)
    _, headers, _ = _download(gcs_server, "x")
    assert "Date" in headers and "Last-Modified" not in headers


def test_an_answer_has_the_length_of_its_body() -> None:
    head, _, body = Answer(200, b"body", {"A": "b"}).encoded("now").partition(b"\r\n\r\n")
    assert (head, body) == (b"HTTP/1.1 200 OK\r\nDate: now\r\nA: b\r\nContent-Length: 4", b"body")
    assert Answer(304, b"none").encoded(None) == b"HTTP/1.1 304 Not Modified\r\n\r\n"


# --- Connections -------------------------------------------------------------------------


def test_a_client_keeps_its_connection(gcs_server: GCSServer, bucket: Bucket) -> None:
    for number in range(10):
        put(bucket, f"x{number}", "body")
        get(bucket, f"x{number}")
        with pytest.raises(exceptions.NotFound):  # an error ends nothing
            get(bucket, "none")
    assert gcs_server.connections == 1
    assert len({request.port for request in gcs_server.requests()}) == 1


def test_closing_ends_all_threads_and_connections() -> None:
    """Idle keep-alive connections and one that is stuck in a request included."""
    server = GCSServer(delay=1000.0)
    with ThreadPoolExecutor(4) as pool, bucket_of(server.url) as bucket:
        stuck = [pool.submit(get, bucket, "x") for _ in range(4)]
        server.wait(lambda: server.count("read") == 4)
        server.close()
        for future in stuck:
            assert isinstance(future.exception(), Exception)
    assert not [t for t in threading.enumerate() if t.name.startswith(f"gcs {server.url}")]
    assert {request.outcome for request in server.requests()} == {"abandoned"}


def _body(server: GCSServer) -> bytes:
    stored = server.object("x")
    assert stored is not None
    return stored.body


def _download(server: GCSServer, name: str, **headers: str) -> tuple[int, Any, bytes]:
    name = name.replace(" ", "%20")
    target = f"/download/storage/v1/b/bucket/o/{name}?alt=media"
    return ask(server.url, "GET", target, headers=headers)
