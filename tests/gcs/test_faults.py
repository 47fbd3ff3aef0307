"""Each fault of our GCS server: what the client sees, and whether anything was committed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError
from google.cloud.storage.exceptions import DataCorruption  # type: ignore[import-untyped]

from gcs import canned
from gcs.actions import (
    Action,
    Both,
    Cut,
    Drip,
    Drop,
    Pass,
    Reset,
    Stall,
    Status,
    Substitute,
)
from gcs.faults import Fault
from gcs.kit import PATIENCE, Bucket, bucket_of, get, put, response_of
from gcs.server import GCSServer

# The client's own exceptions, and those of requests: what a fault may look like to it.
LOST: Any = requests.exceptions.ConnectionError
BRIEF = (PATIENCE, 0.05)
"""A timeout to connect that is never met, and one to read that always is."""


@pytest.mark.parametrize(
    ("action", "error", "committed"),
    [
        (Status(503), exceptions.ServiceUnavailable, False),
        (Status(503, after=True), exceptions.ServiceUnavailable, True),
        (Status(500, after=True), exceptions.InternalServerError, True),
        (Status(408), exceptions.GoogleAPICallError, False),
        (Status(429), exceptions.TooManyRequests, False),
        (Reset(), LOST, False),
        (Reset(after=True), LOST, True),
        (Drop(), LOST, True),
        (Drop(after=False), LOST, False),
        (Cut(0), LOST, True),
        (Both(Reset(), Pass()), LOST, False),
    ],
    ids=repr,
)
def test_a_failed_write_is_committed_or_not_as_its_fault_says(
    gcs_server: GCSServer, bucket: Bucket, action: Action, error: Any, committed: bool
) -> None:
    """One request, one commit at most; the next request is as any other."""
    gcs_server.faults.add(Fault("write", action))
    with pytest.raises(error):
        put(bucket, "x", "body", if_generation_match=0)
    assert (gcs_server.object("x") is not None) is committed
    (request,) = gcs_server.requests("write")
    assert request.committed is committed and request.fault == repr(action)
    assert gcs_server.faults.left == []
    stored = gcs_server.object("x")
    put(bucket, "x", "again", if_generation_match=stored.generation if stored else 0)


@pytest.mark.parametrize("torn", [Reset(), Reset(after=True)], ids=repr)
def test_a_reset_is_a_reset(gcs_server: GCSServer, bucket: Bucket, torn: Reset) -> None:
    """RST, where a drop is a FIN: the two differ in what the operating system reports."""
    gcs_server.faults.add(Fault("write", torn), Fault("write", Drop()))
    with pytest.raises(LOST, match="reset by peer"):
        put(bucket, "x", "body")
    with pytest.raises(LOST, match="without response"):
        put(bucket, "x", "body")
    outcomes = [request.outcome for request in gcs_server.requests()]
    assert outcomes == ["reset", "dropped"]


def test_a_stall_before_the_commit_lands_later(gcs_server: GCSServer, bucket: Bucket) -> None:
    """The client has given up long before: the late write that every lease must live with."""
    stall = Stall()
    gcs_server.faults.add(Fault("write", stall))
    blob = bucket.blob("x")
    with pytest.raises((LOST, requests.exceptions.Timeout)):
        blob.upload_from_string("late", retry=None, timeout=BRIEF)
    assert stall.arrived.wait(PATIENCE) and gcs_server.object("x") is None
    stall.release()
    gcs_server.wait(lambda: gcs_server.object("x") is not None)


def test_a_late_write_keeps_its_precondition(gcs_server: GCSServer, bucket: Bucket) -> None:
    stall = Stall()
    gcs_server.faults.add(Fault("write", stall))
    with pytest.raises((LOST, requests.exceptions.Timeout)):
        bucket.blob("x").upload_from_string(
            "late", if_generation_match=0, retry=None, timeout=BRIEF
        )
    assert stall.arrived.wait(PATIENCE)
    put(bucket, "x", "first", if_generation_match=0)
    gcs_server.faults.release()
    gcs_server.wait(lambda: all(r.outcome != "pending" for r in gcs_server.requests()))
    stored = gcs_server.object("x")
    assert stored is not None and stored.body == b"first"


def test_a_stall_after_the_commit_hides_what_is_there(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    stall = Stall(after=True)
    gcs_server.faults.add(Fault("write", stall))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(put, bucket, "x", "body")
        assert stall.arrived.wait(PATIENCE)
        assert gcs_server.object("x") is not None and not answer.done()
        stall.release()
        assert answer.result(PATIENCE).generation is not None


def test_a_stall_ends_by_itself_after_its_seconds(gcs_server: GCSServer, bucket: Bucket) -> None:
    gcs_server.faults.add(Fault("read", Stall(seconds=0.01)))
    gcs_server.put("x", b"body")
    assert get(bucket, "x").content == b"body"


def test_no_stall_outlives_the_server_and_none_commits_then() -> None:
    server = GCSServer()
    stalls = [Stall(), Stall(seconds=1000)]
    server.faults.add(*(Fault("write", stall) for stall in stalls))
    with bucket_of(server.url) as bucket, ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(put, bucket, f"x{number}", "body") for number in range(2)]
        assert all(stall.arrived.wait(PATIENCE) for stall in stalls)
        server.close()
        for write in writes:
            assert isinstance(write.exception(PATIENCE), LOST)
    assert server.object("x0") is None and server.object("x1") is None


def test_a_dripping_answer_holds_its_client_whatever_the_timeout(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    """Each byte comes within the timeout; all of them do not. Released, the rest is there."""
    gcs_server.put("x", b"body")
    drip = Drip(interval=0.02)
    gcs_server.faults.add(Fault("read", drip))
    with ThreadPoolExecutor(1) as pool:
        blob = bucket.blob("x")
        answer = pool.submit(blob.download_as_bytes, retry=None, timeout=5)
        assert drip.arrived.wait(PATIENCE)
        assert not answer.done()
        drip.release()
        assert answer.result(PATIENCE) == b"body"


def test_a_substituted_body_is_believed(gcs_server: GCSServer, bucket: Bucket) -> None:
    gcs_server.put("x", b"body")
    gcs_server.faults.add(Fault("read", Substitute("garbage")))
    found = get(bucket, "x")
    stored = gcs_server.object("x")
    assert stored is not None and (found.content, stored.body) == (b"garbage", b"body")
    assert found.generation == stored.generation


def test_a_body_damaged_on_its_way_is_noticed(gcs_server: GCSServer, bucket: Bucket) -> None:
    gcs_server.put("x", b"body")
    gcs_server.faults.add(Fault("read", Substitute("garb", corrupt=True)))
    with pytest.raises(DataCorruption):
        get(bucket, "x")


def test_a_body_cut_short_is_noticed(gcs_server: GCSServer, bucket: Bucket) -> None:
    gcs_server.put("x", b"x" * 1000)
    gcs_server.faults.add(Fault("read", Cut(900)))
    with pytest.raises((LOST, requests.exceptions.ChunkedEncodingError)):
        get(bucket, "x")


def test_a_write_may_be_answered_by_something_that_is_no_storage(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    """A proxy's login page, with a 200: not one of the client's own exceptions."""
    gcs_server.faults.add(Fault("write", Substitute("<html>", content_type="text/html")))
    with pytest.raises(requests.exceptions.JSONDecodeError):
        put(bucket, "x", "body")
    assert gcs_server.object("x") is not None


@pytest.mark.parametrize(
    ("action", "error", "reason"),
    [
        (canned.UNAVAILABLE, exceptions.ServiceUnavailable, "backendError"),
        (canned.INTERNAL, exceptions.InternalServerError, "backendError"),
        (canned.TOO_MANY, exceptions.TooManyRequests, "rateLimitExceeded"),
        (canned.BUCKET_MISSING, exceptions.NotFound, "notFound"),
        (canned.forbidden(), exceptions.Forbidden, "forbidden"),
        (canned.RETENTION, exceptions.Forbidden, "retentionPolicyNotMet"),
        (canned.RETENTION_AS_REPORTED, exceptions.Forbidden, "forbidden"),
        (canned.HOLD, exceptions.Forbidden, "objectUnderActiveHold"),
        (canned.HOLD_AS_REPORTED, exceptions.Forbidden, "forbidden"),
        (canned.REQUESTER_PAYS, exceptions.BadRequest, "userProjectMissing"),
        (canned.REQUESTER_PAYS_AS_REPORTED, exceptions.BadRequest, "required"),
        (canned.KMS_DISABLED, exceptions.Forbidden, "cloudKmsDisabledKey"),
        (canned.KMS_DISABLED_AS_DOCUMENTED, exceptions.BadRequest, "cloudKmsDisabledKey"),
        (canned.KMS_DENIED, exceptions.Forbidden, "forbidden"),
    ],
    ids=repr,
)
def test_canned_errors_have_the_reasons_of_the_service(
    gcs_server: GCSServer, bucket: Bucket, action: Status, error: Any, reason: str
) -> None:
    """In the body alone: an upload's exception has no ``errors`` of its own."""
    gcs_server.faults.add(Fault("*", action, times=2))
    with pytest.raises(error) as caught:
        put(bucket, "leases/x", "body")
    answer = response_of(caught.value).json()["error"]
    assert answer["errors"][0]["reason"] == reason
    assert "{object}" not in answer["message"] and caught.value.errors == []
    assert gcs_server.object("leases/x") is None
    with pytest.raises(error, match=r"\S"):
        get(bucket, "leases/x")


def test_a_401_is_answered_by_the_credentials(gcs_server: GCSServer, bucket: Bucket) -> None:
    """The client's session refreshes them, and those of an emulator cannot be."""
    gcs_server.faults.add(Fault("write", canned.UNAUTHORIZED))
    with pytest.raises(GoogleAuthError, match="cannot be refreshed"):
        put(bucket, "x", "body")
    assert gcs_server.object("x") is None and gcs_server.count("write") == 1


def test_retry_after_is_sent(gcs_server: GCSServer, bucket: Bucket) -> None:
    gcs_server.faults.add(Fault("write", Status(429, retry_after="7")))
    with pytest.raises(exceptions.TooManyRequests) as caught:
        put(bucket, "x", "body")
    assert response_of(caught.value).headers["Retry-After"] == "7"


# --- Which requests a fault meets --------------------------------------------------------


def test_faults_are_used_up_in_their_order(gcs_server: GCSServer, bucket: Bucket) -> None:
    gcs_server.faults.add(
        Fault("write", Pass()), Fault("write", Status(503), times=2), Fault("write", Status(500))
    )
    seen: list[int | None] = []
    for number in range(5):
        try:
            put(bucket, f"x{number}", "body")
            seen.append(200)
        except exceptions.GoogleAPICallError as error:
            seen.append(error.code)
    assert seen == [200, 503, 503, 500, 200]


def test_a_fault_meets_its_kind_its_name_and_its_body_alone(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    gcs_server.faults.add(
        Fault("read", Status(503), name="leases/*", times=None),
        Fault("write", Drop(), when=lambda request: request.document.get("state") == "held"),
    )
    put(bucket, "leases/x", '{"state": "released"}')
    put(bucket, "other", "no JSON")
    with pytest.raises(LOST):
        put(bucket, "leases/x", '{"state": "held"}')
    for _ in range(3):
        with pytest.raises(exceptions.ServiceUnavailable):
            get(bucket, "leases/x")
    assert get(bucket, "other").content == b"no JSON"
    gcs_server.faults.clear()
    assert get(bucket, "leases/x").content == b'{"state": "held"}'


def test_the_clients_own_retry_turns_a_committed_write_into_a_conflict(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    """Why the backend may not use it."""
    gcs_server.faults.add(Fault("write", Drop()))
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("x").upload_from_string("body", if_generation_match=0)
    assert [request.committed for request in gcs_server.requests("write")] == [True, False]


def test_a_release_frees_those_on_their_way_into_a_stall_too(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    """Each release meets requests anywhere between their arrival and the wait."""
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            gcs_server.faults.add(Fault("write", Stall(), times=None))
            seen = gcs_server.count("write")
            writes = [pool.submit(put, bucket, f"x{number}", "body") for number in range(4)]
            gcs_server.wait(lambda seen=seen: gcs_server.count("write") > seen)  # type: ignore[misc]
            gcs_server.faults.release()
            assert all(write.result(PATIENCE).generation for write in writes)
