"""GCSLease over real HTTP: one request each, and each fault told as what it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from typing import Any

import pytest
from google.auth import exceptions as auth
from google.auth.credentials import Credentials
from google.cloud import storage  # type: ignore[import-untyped]

from gcs import canned, kit
from gcs.actions import Action, Cut, Drip, Drop, Reset, Stall, Status, Substitute
from gcs.faults import Fault
from gcs.server import GCSServer
from tako_sync.abc import ABSENT, BODY_LIMIT
from tako_sync.backends import connect
from tako_sync.backends.gcs import GCSLease
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    ConfigurationError,
    VersionConflictError,
)
from tako_sync.lock import Lock
from tako_sync.runtime import Runtime

KEY = "run-shop-prod-reindex"
NAME = f"leases/{KEY}"
PATIENCE = kit.PATIENCE
BRIEF = 0.3
"""Seconds, for requests that are not to be answered."""


@pytest.fixture
def backend(gcs_server: GCSServer) -> Iterator[GCSLease]:
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, client=client)
        yield backend
        backend.close()


def read(backend: GCSLease, timeout: float = PATIENCE) -> Any:
    return backend.read(KEY, timeout=timeout)


def write(
    backend: GCSLease, expect: Any = ABSENT, body: bytes = b"{}", timeout: float = PATIENCE
) -> str:
    return backend.write(KEY, body, expect=expect, timeout=timeout)


def list_all(backend: GCSLease, timeout: float = PATIENCE) -> list[str]:
    return sorted(backend.list("", timeout=timeout))


# --- One request each --------------------------------------------------------------------------


def test_each_operation_is_one_request_and_nothing_is_asked_beside_it(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    version = write(backend)
    version = write(backend, version)
    assert read(backend).version == version
    assert list_all(backend) == [KEY]
    backend.read("run-shop-prod-none", timeout=PATIENCE)
    kinds = [request.kind for request in gcs_server.requests()]
    assert kinds == ["write", "write", "read", "list", "read"]


def test_a_failed_request_is_not_repeated(gcs_server: GCSServer, backend: GCSLease) -> None:
    version = write(backend)
    gcs_server.forget()
    for action in (Status(503), Reset(), Drop(), Status(429), Status(408), Status(500)):
        gcs_server.faults.add(Fault("*", action, times=None))
        for request in (
            lambda: read(backend),
            lambda: write(backend, version),
            lambda: list_all(backend),
        ):
            with pytest.raises(BackendUnavailableError):
                request()
        gcs_server.faults.clear()
    assert gcs_server.count() == 18


def test_records_are_not_cached(gcs_server: GCSServer, backend: GCSLease) -> None:
    write(backend, body=b"x")
    stored = gcs_server.object(NAME)
    assert stored is not None
    assert (stored.body, stored.cache_control) == (b"x", "no-store")


def test_nothing_is_sent_and_no_credentials_are_sought_before_the_first_request(
    gcs_server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    backend = connect("gs://bucket/folder")
    assert backend.describe() == "gs://bucket/folder"
    with pytest.raises(BackendDeniedError, match=r"(?s)no usable credentials.*/nowhere/key\.json"):
        backend.read(KEY, timeout=PATIENCE)
    assert gcs_server.count() == 0


def test_the_object_is_below_the_prefix(gcs_server: GCSServer) -> None:
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, "some/folder", client=client)
        write(backend)
        other = GCSLease(gcs_server.bucket, "some", client=client)
        assert list_all(backend) == [KEY] and list_all(other) == []
        assert gcs_server.object(f"some/folder/{NAME}") is not None
        backend.close()
        other.close()


def test_what_others_keep_below_the_prefix_is_no_lease(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    write(backend)
    for name in ("leases/", "leases/a/b", "leases/Upper", "leases/ü", "leases/x y", "other"):
        gcs_server.put(name, b"")
    assert list_all(backend) == [KEY]


def test_a_list_of_several_pages_is_whole_and_ends_in_time(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    for number in range(2005):
        gcs_server.put(f"leases/key-{number:04}", b"")
    assert list_all(backend) == [f"key-{number:04}" for number in range(2005)]
    assert gcs_server.count("list") == 3
    gcs_server.set(delay=0.2)
    with pytest.raises(BackendUnavailableError):
        list_all(backend, timeout=0.3)


# --- Versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("expect", ["", "0", "abc", "-1", "01", "1.0", " 1", "\u0661", str(2**63)])
def test_a_version_that_was_never_handed_out_is_a_conflict_without_a_request(
    gcs_server: GCSServer, backend: GCSLease, expect: str
) -> None:
    with pytest.raises(VersionConflictError):
        write(backend, expect)
    assert gcs_server.count() == 0


@pytest.mark.parametrize("random", [False, True])
def test_generations_in_no_order_are_versions_like_others(
    gcs_server: GCSServer, backend: GCSLease, random: bool
) -> None:
    gcs_server.set(random_generations=random)
    versions = [write(backend)]
    for _ in range(20):
        versions.append(write(backend, versions[-1]))
        with pytest.raises(VersionConflictError):
            write(backend, versions[-2])
    assert len(set(versions)) == 21
    assert (versions == sorted(versions, key=int)) is not random


def test_a_deleted_object_is_absent_and_no_old_version_brings_it_back(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    version = write(backend)
    gcs_server.delete(NAME)
    assert read(backend).version is ABSENT
    with pytest.raises(VersionConflictError):
        write(backend, version)


# --- Bodies ------------------------------------------------------------------------------------


def test_a_body_that_is_too_long_is_not_downloaded_whole(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    gcs_server.put(NAME, b"x" * 10_000_000)
    assert len(read(backend).body) == BODY_LIMIT + 1
    (request,) = gcs_server.requests("read")
    assert request.headers["range"] == f"bytes=0-{BODY_LIMIT}"


def test_an_empty_object_is_no_missing_one(gcs_server: GCSServer, backend: GCSLease) -> None:
    stored = gcs_server.put(NAME, b"")
    found = read(backend)
    assert (found.body, found.version) == (b"", str(stored.generation))


# --- Faults ------------------------------------------------------------------------------------

TRANSIENT: list[tuple[Action, bool]] = [
    (Status(408), False),
    (Status(409), False),
    (Status(500), False),
    (Status(502), False),
    (Status(503), False),
    (Status(504), False),
    (Status(503, after=True), True),
    (Reset(), False),
    (Reset(after=True), True),
    (Drop(after=False), False),
    (Drop(), True),
    (Cut(0), True),
    (Cut(40), True),
    (Substitute("<html>sign in</html>", content_type="text/html"), True),
    (Substitute("{}"), True),
    (Status(403, "rateLimitExceeded"), False),
    (Status(403, "userRateLimitExceeded"), False),
]


@pytest.mark.parametrize(("action", "applied"), TRANSIENT)
def test_a_write_whose_fate_is_not_known_is_unavailable(
    gcs_server: GCSServer, backend: GCSLease, action: Action, applied: bool
) -> None:
    gcs_server.faults.add(Fault("write", action))
    with pytest.raises(BackendUnavailableError) as caught:
        write(backend)
    assert f"gs://bucket/{NAME}" in str(caught.value) or "generation" in str(caught.value)
    assert (gcs_server.object(NAME) is not None) is applied
    assert gcs_server.count() == 1


@pytest.mark.parametrize(
    "action",
    [
        Status(408),
        Status(429),
        Status(500),
        Status(503),
        Reset(),
        Drop(),
        Cut(40),
        Cut(0),
        Substitute("<html>sign in</html>", status=502),
    ],
)
def test_a_read_that_fails_is_unavailable_and_never_absent(
    gcs_server: GCSServer, backend: GCSLease, action: Action
) -> None:
    write(backend)
    gcs_server.faults.add(Fault("read", action))
    with pytest.raises(BackendUnavailableError):
        read(backend)
    assert read(backend).body == b"{}"


def test_a_404_of_a_proxy_is_no_missing_object_nor_bucket(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    """A look that found nothing would end a hold as deleted."""
    version = write(backend)
    page = Substitute("<html><body>404 Not Found</body></html>", status=404)
    gcs_server.faults.add(Fault("read", page), Fault("write", page))
    with pytest.raises(BackendUnavailableError, match="not an answer of GCS"):
        read(backend)
    with pytest.raises(BackendUnavailableError, match="not an answer of GCS"):
        write(backend, version)


@pytest.mark.parametrize("action", [Stall, partial(Drip, interval=5)])
@pytest.mark.parametrize("what", ["read", "write", "list"])
def test_a_request_that_hangs_ends_at_its_timeout(
    gcs_server: GCSServer, backend: GCSLease, what: str, action: Callable[[], Action]
) -> None:
    requests: dict[str, Callable[[], object]] = {
        "read": lambda: read(backend, BRIEF),
        "write": lambda: write(backend, timeout=BRIEF),
        "list": lambda: list_all(backend, BRIEF),
    }
    gcs_server.faults.add(Fault(what, action(), times=None))
    with pytest.raises(BackendUnavailableError):
        requests[what]()
    gcs_server.faults.release()


def test_429_asks_for_a_second_at_least_and_a_minute_at_most(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    for header, expected in [("", 1), ("0", 1), ("7", 7), ("86400", 60), ("soon", 1), ("nan", 1)]:
        gcs_server.faults.add(Fault("write", Status(429, retry_after=header)))
        with pytest.raises(BackendUnavailableError, match="too many requests") as caught:
            write(backend)
        assert caught.value.retry_after == expected
    assert gcs_server.object(NAME) is None


def test_the_real_services_limit_of_a_write_a_second_is_429(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    gcs_server.set(write_interval=1000)
    version = write(backend)
    with pytest.raises(BackendUnavailableError) as caught:
        write(backend, version)
    assert caught.value.retry_after >= 1
    assert read(backend).version == version


DENIED: list[tuple[Action, str]] = [
    (canned.UNAUTHORIZED, "credentials"),
    (canned.forbidden("storage.objects.create"), "permission is missing: storage.objects.create"),
    (canned.forbidden("storage.objects.delete"), "permission is missing: storage.objects.delete"),
    (Status(403, message="Access denied."), "storage.objects.create and storage.objects.delete"),
    (canned.RETENTION, "retention policy"),
    (canned.RETENTION_AS_REPORTED, "retention policy"),
    (canned.HOLD, "object hold"),
    (canned.HOLD_AS_REPORTED, "object hold"),
    (canned.REQUESTER_PAYS, "user_project"),
    (canned.REQUESTER_PAYS_AS_REPORTED, "user_project"),
    (canned.KMS_DISABLED, "encryption key"),
    (canned.KMS_DISABLED_AS_DOCUMENTED, "encryption key"),
    (canned.KMS_DENIED, "encryption key"),
    (canned.BUCKET_MISSING, "the bucket does not exist"),
    (Status(403, "accountDisabled", "The billing account is disabled."), "billing"),
    (Status(403, "forbidden", "Request is prohibited by organization's policy."), "perimeter"),
    (Status(400, "invalid"), "refused"),
    (Status(410), "refused"),
]


@pytest.mark.parametrize(("action", "words"), DENIED)
def test_what_someone_has_to_mend_says_what_to_do(
    gcs_server: GCSServer, backend: GCSLease, action: Action, words: str
) -> None:
    gcs_server.faults.add(Fault("write", action))
    with pytest.raises(BackendDeniedError) as caught:
        write(backend)
    assert words in str(caught.value)
    assert f"gs://bucket/{NAME}" in str(caught.value)


def test_those_errors_are_told_apart() -> None:
    told = {words for action, words in DENIED}
    assert len(told) >= 11


def test_a_missing_bucket_is_no_missing_object(gcs_server: GCSServer, backend: GCSLease) -> None:
    assert read(backend).version is ABSENT
    gcs_server.set(bucket_missing=True)
    for request in (lambda: read(backend), lambda: write(backend), lambda: list_all(backend)):
        with pytest.raises(BackendDeniedError, match="the bucket does not exist: create it"):
            request()


@pytest.mark.parametrize(
    ("permission", "what"), [("storage.objects.get", "read"), ("storage.objects.list", "list")]
)
def test_a_missing_permission_is_named(
    gcs_server: GCSServer, backend: GCSLease, permission: str, what: str
) -> None:
    write(backend)
    gcs_server.set(denied=(permission,))
    request = read if what == "read" else list_all
    with pytest.raises(BackendDeniedError, match=permission):
        request(backend)


def test_without_the_permission_to_list_the_message_says_why_a_missing_object_looks_so(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    gcs_server.faults.add(Fault("read", canned.forbidden("storage.objects.list")))
    with pytest.raises(BackendDeniedError, match="GCS answers so of a missing object, too"):
        read(backend)


def of(kind: str, message: str) -> Exception:
    """Make an error of google.auth, whose classes have no types."""
    error: Exception = getattr(auth, kind)(message)
    return error


class Broken(Credentials):
    """Credentials whose token never comes."""

    def __init__(self, error: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._failure = error

    def refresh(self, request: object) -> None:
        raise self._failure


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (of("RefreshError", "the token server answered 503"), BackendUnavailableError),
        (of("TransportError", "no route to the metadata server"), BackendUnavailableError),
        (of("DefaultCredentialsError", "none were found"), BackendDeniedError),
        (of("MutualTLSChannelError", "no certificate"), BackendDeniedError),
        (ConnectionResetError("reset"), BackendUnavailableError),
    ],
)
def test_credentials_that_cannot_be_refreshed_are_trouble_and_missing_ones_a_refusal(
    gcs_server: GCSServer, error: Exception, kind: type[Exception]
) -> None:
    client = storage.Client(
        project="test",
        credentials=Broken(error),
        client_options={"api_endpoint": gcs_server.url},
    )
    backend = GCSLease(gcs_server.bucket, client=client)
    with pytest.raises(kind, match=str(error)):
        read(backend)
    backend.close()


def test_an_endpoint_that_is_no_url_is_a_refusal() -> None:
    with kit.client_of("no-url") as client:
        backend = GCSLease("bucket", client=client)
        with pytest.raises(BackendDeniedError, match="the endpoint is no URL"):
            read(backend)


# --- Time --------------------------------------------------------------------------------------


def now_of(server: GCSServer) -> float:
    return datetime.now(timezone.utc).timestamp() + server.options.clock_shift


def test_the_interval_of_now_holds_the_servers_time_and_is_three_seconds_wide(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    for shift in (0.0, -3600.0, 86_400.0 * 3650):
        gcs_server.set(clock_shift=shift)
        before = now_of(gcs_server)
        now = read(backend).now
        assert now.latest - now.earliest == 3
        assert now.earliest <= before and now_of(gcs_server) <= now.latest


def test_that_of_written_holds_the_time_of_the_write(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    before = now_of(gcs_server)
    write(backend)
    after = now_of(gcs_server)
    written = read(backend).written
    assert written.latest - written.earliest <= 1
    assert written.earliest <= after and before <= written.latest


def test_a_date_that_steps_back_makes_nothing_older_than_it_is(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    write(backend)
    gcs_server.set(date_shift=-60)
    found = read(backend)
    assert found.written.latest <= found.now.latest
    assert found.now.earliest - found.written.latest < 0


def test_without_a_date_there_is_no_clock(gcs_server: GCSServer, backend: GCSLease) -> None:
    write(backend)
    gcs_server.set(send_date=False)
    found = read(backend)
    assert found.now is None and found.written is None
    gcs_server.set(send_date=True, send_last_modified=False)
    found = read(backend)
    assert found.now is not None and found.written is None


def test_the_metadata_tell_when_a_version_was_written(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    gcs_server.set(send_last_modified=False)
    before = now_of(gcs_server)
    version = write(backend)
    after = now_of(gcs_server)
    written = backend.written(KEY, version, timeout=PATIENCE)
    assert written is not None
    assert before - 0.001 <= written.latest and written.earliest <= after
    assert written.latest - written.earliest <= 0.001
    assert backend.written(KEY, "1", timeout=PATIENCE) is None, "another one stands there"
    gcs_server.delete(NAME)
    assert backend.written(KEY, version, timeout=PATIENCE) is None
    assert [request.kind for request in gcs_server.requests()] == ["write"] + 3 * ["metadata"]


def test_each_thread_hears_its_own_answer(gcs_server: GCSServer, backend: GCSLease) -> None:
    """Their clocks would be mixed up: what is old would seem new, or worse."""
    for number in range(8):
        gcs_server.put(f"leases/k{number}", b"x")
    stand = Stall()
    gcs_server.faults.add(Fault("read", stand, name="leases/k0", times=1))
    with ThreadPoolExecutor(8) as pool:
        late = pool.submit(backend.read, "k0", timeout=PATIENCE)
        stand.arrived.wait(PATIENCE)
        gcs_server.set(clock_shift=1000)
        others = [pool.submit(backend.read, f"k{n}", timeout=PATIENCE) for n in range(1, 8)]
        ahead = [other.result().now for other in others]
        gcs_server.set(clock_shift=0)
        stand.release()
        found = late.result().now
    assert found is not None
    assert all(now is not None and now.earliest > found.latest + 900 for now in ahead)


# --- Clients -----------------------------------------------------------------------------------


def test_a_client_that_is_given_is_neither_used_nor_changed(gcs_server: GCSServer) -> None:
    client = kit.new_client(gcs_server.url)
    cache, hooks = (
        getattr(client, "_bucket_metadata_cache", None),
        list(client._http.hooks["response"]),
    )
    adapters = dict(client._http.adapters)
    backend = GCSLease(gcs_server.bucket, client=client)
    write(backend)
    backend.close()
    assert getattr(client, "_bucket_metadata_cache", None) is cache
    assert client._http.hooks["response"] == hooks
    assert dict(client._http.adapters) == adapters
    assert gcs_server.count("write") == 1


def test_the_emulators_variable_is_heeded(
    gcs_server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.url)
    backend = connect(f"gs://{gcs_server.bucket}")
    assert isinstance(backend, GCSLease)
    version = write(backend)
    assert read(backend).version == version
    backend.close()
    assert gcs_server.count("bucket") == 0


def test_the_one_who_pays_is_named(gcs_server: GCSServer) -> None:
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, client=client, user_project="payer")
        read(backend)
        backend.close()
    (request,) = gcs_server.requests()
    assert request.query["userProject"] == "payer"


def test_closed_it_can_be_used_again(gcs_server: GCSServer, backend: GCSLease) -> None:
    version = write(backend)
    backend.close()
    backend.close()
    assert read(backend).version == version


def test_a_hundred_requests_at_once_warn_of_nothing_and_keep_their_connections(
    gcs_server: GCSServer, backend: GCSLease, caplog: pytest.LogCaptureFixture
) -> None:
    barrier = threading.Barrier(100)

    def go(number: int) -> str:
        barrier.wait(PATIENCE)
        version = backend.write(f"k{number}", b"{}", expect=ABSENT, timeout=PATIENCE)
        barrier.wait(PATIENCE)
        return backend.write(f"k{number}", b"{}", expect=version, timeout=PATIENCE)

    with caplog.at_level(logging.DEBUG, "urllib3.connectionpool"), ThreadPoolExecutor(100) as pool:
        assert len(set(pool.map(go, range(100)))) == 100
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert gcs_server.connections <= 101


def test_the_program_is_named_to_the_service(gcs_server: GCSServer, backend: GCSLease) -> None:
    read(backend)
    (request,) = gcs_server.requests()
    assert "gcloud-python" in request.headers["user-agent"]


# --- Names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "gs:",
        "gs:/",
        "gs://",
        "gs:///x",
        "gs:bucket",
        "gs://Bucket",
        "gs://b",
        "gs://-bucket",
        "gs://buck et",
        "gs://bucket\n",
        "gs://buckét",
        "gs://buck%2Fet",
        "gs://bucket?x=1",
        "gs://user:secret@bucket",
        "gs://a..bucket",
        "gs://" + 64 * "b",
        "gs://bucket/../other",
        "gs://bucket/.",
        "gs://bucket//x",
        "gs://bucket/a//b",
        "gs://bucket/a/../b",
        "gs://bucket/?x",
        "gs://bucket/#x",
        "gs://bucket/%2F",
        "gs://bucket/a b",
        "gs://bucket/a\nb",
        "gs://bucket/ü",
        "gs://bucket/" + 600 * "x",
    ],
)
def test_what_is_no_bucket_or_no_folder_is_refused_where_it_is_written(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connect(url)
    assert "secret" not in str(caught.value) or "user:secret" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "described"),
    [
        ("gs://bucket", "gs://bucket"),
        ("gs://bucket/", "gs://bucket"),
        ("gs://bucket/folder/", "gs://bucket/folder"),
        ("gs://my-shop_tako.example.com/a/b.c", "gs://my-shop_tako.example.com/a/b.c"),
    ],
)
def test_others_are_taken(url: str, described: str) -> None:
    assert connect(url).describe() == described


def test_a_client_of_another_kind_is_refused() -> None:
    path: Any = "credentials.json"
    with pytest.raises(ConfigurationError, match="client is a"):
        GCSLease("bucket", client=path)
    with pytest.raises(ConfigurationError, match="user_project"):
        GCSLease("bucket", user_project=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a..", "0", "x" * 100, "con", "a.b_c-d", "a-.-", "leases"])
def test_a_name_reaches_the_url_as_one_object_below_the_prefix(
    gcs_server: GCSServer, backend: GCSLease, name: str
) -> None:
    runtime = Runtime(backend, app="shop", env="prod")
    assert Lock(name).bound_to(runtime).do(lambda ctx: 1) == 1
    assert {request.name for request in gcs_server.requests()} == {f"leases/run-shop-prod-{name}"}
    assert {request.kind for request in gcs_server.requests()} == {"read", "write"}


ODD = ["", " ", ".", "..", "a/b", "/a", "a//b", "a\nb", "a\rb", "é", "e\u0301", "#", "?", "%2F"]


@pytest.mark.parametrize("name", [*ODD, ".well-known/acme-challenge/x", "\0", "\ud800", b"a", None])
def test_an_odd_one_is_refused_before_any_backend_is_asked(
    gcs_server: GCSServer, backend: GCSLease, name: Any
) -> None:
    with pytest.raises(ConfigurationError):
        Lock(name).bound_to(Runtime(backend)).do(lambda ctx: 1)
    assert gcs_server.count() == 0
