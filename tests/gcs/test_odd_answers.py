"""Answers that GCS would not give, or not quite: never taken for what they are not."""

from __future__ import annotations

import gc
import gzip
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from gcs import canned, kit
from gcs.actions import Cut, Drip, Ending, Exchange, Proceed, Reply, Stall, Status, Substitute
from gcs.answers import Answer
from gcs.faults import Fault
from gcs.hosts import KEY, NAME, GCSWorld, Work, a_world, record
from gcs.server import GCSServer
from tako_sync.abc import ABSENT, BODY_LIMIT
from tako_sync.backends.gcs import GCSLease
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    RecordUnreadableError,
)
from tako_sync.events import Lost

HTML = "<html><body>Please sign in to the network.</body></html>"


@pytest.fixture
def backend(gcs_server: GCSServer) -> Iterator[GCSLease]:
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, client=client)
        yield backend
        backend.close()


@pytest.fixture
def world() -> Iterator[GCSWorld]:
    with a_world() as world:
        yield world


@dataclass(frozen=True)
class Instead:
    """An action: carry it out, and answer something of one's own."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        proceed()
        return Reply(Answer(self.status, self.body, self.headers))


@dataclass(frozen=True)
class With:
    """An action: the true answer, with headers changed; None takes one away."""

    headers: dict[str, str | None]

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        ending = proceed()
        assert isinstance(ending, Reply)
        answer = ending.answer
        headers = {**answer.headers, **self.headers}
        kept = {key: value for key, value in headers.items() if value is not None}
        return Reply(Answer(answer.status, answer.body, kept))


def test_a_page_of_a_proxy_with_200_is_no_record(gcs_server: GCSServer, backend: GCSLease) -> None:
    gcs_server.put(NAME, record())
    page = Instead(200, HTML.encode(), {"Content-Type": "text/html"})
    gcs_server.faults.add(Fault("*", page, times=None))
    with pytest.raises(BackendUnavailableError):
        backend.read(KEY, timeout=kit.PATIENCE)
    with pytest.raises(BackendUnavailableError):
        backend.written(KEY, "1", timeout=kit.PATIENCE)
    with pytest.raises(BackendUnavailableError):
        backend.write(KEY, b"{}", expect="1", timeout=kit.PATIENCE)
    with pytest.raises(BackendUnavailableError):
        list(backend.list("", timeout=kit.PATIENCE))


@pytest.mark.parametrize(
    "body", ["", "null", "[]", "{}", '{"generation": "soon"}', '{"generation": "0"}', "7", '"ok"']
)
def test_an_answer_to_a_write_that_names_no_generation_is_none(
    gcs_server: GCSServer, backend: GCSLease, body: str
) -> None:
    """It has been applied, for all one knows: unavailable, to be settled by a look."""
    gcs_server.faults.add(Fault("write", Substitute(body)))
    with pytest.raises(BackendUnavailableError):
        backend.write(KEY, b"{}", expect=ABSENT, timeout=kit.PATIENCE)
    stored = gcs_server.object(NAME)
    assert stored is not None
    assert backend.read(KEY, timeout=kit.PATIENCE).version == str(stored.generation)


@pytest.mark.parametrize("generation", [None, "", "0", "-7", "soon"])
def test_an_answer_to_a_read_that_names_no_generation_is_none(
    gcs_server: GCSServer, backend: GCSLease, generation: str | None
) -> None:
    gcs_server.put(NAME, record())
    gcs_server.faults.add(Fault("read", With({"X-Goog-Generation": generation})))
    with pytest.raises(BackendUnavailableError):
        backend.read(KEY, timeout=kit.PATIENCE)


def test_a_body_that_is_damaged_on_its_way_is_not_believed(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    """Its checksum is another: in a look, a byte decides whose the record is."""
    gcs_server.put(NAME, record())
    damaged = record().replace(b"theirs", b"thiers").decode()
    gcs_server.faults.add(Fault("read", Substitute(damaged, corrupt=True)))
    with pytest.raises(BackendUnavailableError, match="damaged"):
        backend.read(KEY, timeout=kit.PATIENCE)
    assert backend.read(KEY, timeout=kit.PATIENCE).body == record()


def test_an_answer_cut_anywhere_is_unavailable_and_never_an_empty_record(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    """Cut amid its headers it would look like an empty object: a record that cannot be read."""
    stored = gcs_server.put(NAME, b'{"owner": "a"}')
    for size in range(0, 900, 7):
        gcs_server.faults.add(Fault("read", Cut(size)))
        try:
            found = backend.read(KEY, timeout=kit.PATIENCE)
        except BackendUnavailableError:
            continue
        assert (found.body, found.version) == (stored.body, str(stored.generation))
        assert size > 400, "so much is in the headers"
        return
    pytest.fail("it was never whole")


def test_an_answer_to_a_write_cut_anywhere_is_unavailable(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    for number, size in enumerate(range(0, 500, 25)):
        gcs_server.faults.add(Fault("write", Cut(size)))
        with pytest.raises(BackendUnavailableError):
            backend.write(f"{KEY}-{number}", b"{}", expect=ABSENT, timeout=kit.PATIENCE)
        assert gcs_server.object(f"{NAME}-{number}") is not None


def test_a_look_that_is_cut_costs_no_hold(world: GCSWorld) -> None:
    """A renewal is in doubt, and the look that settles it comes in pieces."""
    host = world.host()
    work = Work(world, 30.0)
    running = world.start(lambda: host.lock().do(work))
    host.fails("write", Status(503, after=True))
    host.fails("read", *[Cut(size) for size in (200, 260, 320, 380)])
    world.advance(30.0)
    assert running.result() == 42 and not host.told(Lost)


def test_a_look_that_is_a_page_of_a_proxy_costs_no_hold(world: GCSWorld) -> None:
    host = world.host()
    work = Work(world, 30.0)
    running = world.start(lambda: host.lock().do(work))
    host.fails("write", Status(503, after=True))
    host.fails("read", Instead(200, HTML.encode()), Instead(503, HTML.encode()))
    world.advance(30.0)
    assert running.result() == 42 and not host.told(Lost)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 503])
def test_a_refused_request_leaves_its_connection_to_the_next(
    gcs_server: GCSServer, backend: GCSLease, status: int
) -> None:
    """Of what is left unread, one more would be opened by each request, and warned of later."""
    gcs_server.put(NAME, record())
    fault = canned.UNAUTHORIZED if status == 401 else Status(status)
    gcs_server.faults.add(Fault("*", fault, times=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            try:
                backend.read(KEY, timeout=kit.PATIENCE)
            except (BackendUnavailableError, BackendDeniedError):
                pass
            with pytest.raises((BackendUnavailableError, BackendDeniedError)):
                backend.write(KEY, b"{}", expect="5", timeout=kit.PATIENCE)
        gc.collect()
    assert gcs_server.connections == 1


def test_a_gzip_encoded_object_of_another_program_is_an_unreadable_record_and_not_unpacked(
    world: GCSWorld,
) -> None:
    """A few bytes that unpack to gigabytes must not do so here."""
    packed = gzip.compress(b"\0" * 10_000_000)
    assert len(packed) < BODY_LIMIT
    world.put(packed)
    world.server.faults.add(
        Fault("read", With({"Content-Encoding": "gzip", "X-Goog-Hash": None}), times=None)
    )
    host = world.host()
    assert host.backend.read(KEY, timeout=kit.PATIENCE).body == packed
    with pytest.raises(RecordUnreadableError):
        world.run(lambda: host.lock().try_do(Work(world)))


def test_an_empty_object_costs_a_second_request_only_itself(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    """Of nothing no range can be had: asked again without one. No record of a lease is empty."""
    gcs_server.put(NAME, b"")
    assert backend.read(KEY, timeout=kit.PATIENCE).body == b""
    assert [request.status for request in gcs_server.requests()] == [416, 200]


def test_an_answer_that_drips_but_comes_is_an_answer(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    gcs_server.put(NAME, record())
    gcs_server.faults.add(Fault("read", Drip(size=100, interval=0.01)))
    assert backend.read(KEY, timeout=kit.PATIENCE).body == record()


def test_a_drip_outlasts_the_sockets_timeout_and_not_that_of_a_lease(world: GCSWorld) -> None:
    """Each drop starts a socket's timeout anew; who waits for the request does not wait on."""
    host = world.host()
    host.fails("read", Drip(interval=60))
    running = world.start(lambda: host.lock().try_do(lambda ctx: 42))
    world.advance(5.3)
    assert running.result() == (True, 42)
    assert len(host.requests()) == 4


def test_two_threads_at_once_use_two_connections_and_get_their_own_bodies(
    gcs_server: GCSServer, backend: GCSLease
) -> None:
    for number in range(16):
        gcs_server.put(f"leases/k{number}", b"%d" % number)
    stand = Stall()
    gcs_server.faults.add(Fault("read", stand, name="leases/k0"))
    with ThreadPoolExecutor(16) as pool:
        late = pool.submit(backend.read, "k0", timeout=kit.PATIENCE)
        assert stand.arrived.wait(kit.PATIENCE)
        others = [pool.submit(backend.read, f"k{n}", timeout=kit.PATIENCE) for n in range(1, 16)]
        assert [o.result().body for o in others] == [b"%d" % n for n in range(1, 16)]
        stand.release()
        assert late.result().body == b"0"


def test_errors_name_the_object_and_stay_short(gcs_server: GCSServer, backend: GCSLease) -> None:
    """An error page of any length makes one line of a log."""
    gcs_server.faults.add(Fault("*", Instead(503, HTML.encode() * 1000), times=None))
    for request in (
        lambda: backend.read(KEY, timeout=kit.PATIENCE),
        lambda: backend.write(KEY, b"{}", expect=ABSENT, timeout=kit.PATIENCE),
    ):
        with pytest.raises(BackendUnavailableError) as caught:
            request()
        text = str(caught.value)
        assert text.startswith(f"gs://{gcs_server.bucket}/{NAME}: ")
        assert len(text) < 500 and not re.search(r"[\r\n]", text)
