"""What the service itself does to leases: its rate limit, outages, policies, permissions."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from attrs import evolve

from gcs import canned, kit
from gcs.actions import Action, Ending, Exchange, Proceed, Reset, Stall, Status
from gcs.faults import Fault
from gcs.hosts import (
    ASSURED,
    KEY,
    NAME,
    POLL,
    TTL,
    WIDTHS,
    GCSHost,
    GCSWorld,
    Work,
    a_world,
    is_held,
    is_release,
    states,
)
from gcs.independent import IndependentServer
from gcs.server import GCSServer
from tako_sync.abc import ABSENT
from tako_sync.backends.gcs import GCSLease
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendDeniedError,
    LeaseLostError,
    LossReason,
    VersionConflictError,
)
from tako_sync.events import Lost, ReleaseUnconfirmed, Unreachable
from tako_sync.testing import conformance


@pytest.fixture
def world() -> Iterator[GCSWorld]:
    with a_world() as world:
        yield world


@pytest.fixture
def limited() -> Iterator[GCSWorld]:
    """One write per second of one object, as the real service has it."""
    with a_world(write_interval=1.0) as world:
        yield world


def answered_429(world: GCSWorld) -> int:
    return world.server.count("write", when=lambda request: request.status == 429)


# --- One write per second of one object ----------------------------------------------------------


def test_twenty_contenders_with_short_bodies_all_get_their_turns_only_slower(
    limited: GCSWorld, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = [limited.host(name) for name in "abcd"]
    work = Work(limited, 0.005)

    def several(host: GCSHost) -> int:
        return sum(host.lock().do(work) == 42 for _ in range(3))

    threads = [
        limited.start(lambda h=hosts[n % 4]: several(h), f"contender {n}")  # type: ignore[misc]
        for n in range(20)
    ]
    for _ in range(200):
        if all(thread.done for thread in threads):
            break
        limited.advance(2.0)
    assert [thread.result() for thread in threads] == 20 * [3]
    assert answered_429(limited), "the trial has met no limit"
    for host in hosts:
        assert not host.told(Lost) and not host.told(ReleaseUnconfirmed)
        refused = [r for r in host.writes() if r.status == 429]
        for request in refused:
            later = [r for r in host.writes() if r.at > request.at or r.number > request.number]
            assert not later or later[0].at - request.at >= 1.0, "a second at least, then again"


def test_a_release_that_is_refused_for_its_rate_frees_the_lease_a_moment_later(
    limited: GCSWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Acquired, and over within the second: the caller has the value, the rest is a thread's."""
    host, other = limited.host("a"), limited.host("b")
    with caplog.at_level(logging.WARNING):
        assert limited.run(lambda: host.lock().do(lambda ctx: 42)) == 42
        assert [r.status for r in host.writes()] == [200, 429] and b'"held"' in limited.body
        limited.advance(1.6)
    assert b'"released"' in limited.body
    assert not host.told(ReleaseUnconfirmed) and not caplog.records
    limited.advance(1.0)
    assert limited.run(lambda: other.lock().try_do(Work(limited, 1.0 * 0))).ran


def test_a_release_refused_for_ever_leaves_the_lease_to_its_age(limited: GCSWorld) -> None:
    host, other = limited.host("a"), limited.host("b")
    host.fails("write", Status(429), times=None, when=is_release)
    written = limited.now
    assert limited.run(lambda: host.lock().do(lambda ctx: 42)) == 42
    work = Work(limited, 0.0)
    waiting = limited.start(lambda: other.lock().do(work))
    limited.advance(TTL + WIDTHS + POLL)
    assert waiting.result() == 42
    assert TTL <= work.began[0] - written <= TTL + WIDTHS + POLL
    assert host.told(ReleaseUnconfirmed)
    gaps = [b.at - a.at for a, b in itertools.pairwise(host.writes()[1:])]
    assert all(gap >= 1.0 for gap in gaps)


def test_an_acquisition_right_after_a_release_waits_out_the_second(limited: GCSWorld) -> None:
    host = limited.host()
    work = Work(limited, 2.0)
    first = limited.start(lambda: host.lock().do(work))
    limited.advance(2.0)
    assert first.result() == 42
    before = len(host.requests())
    again = limited.start(lambda: host.lock().try_do(work))
    limited.advance(1.6)
    assert [r.status for r in host.requests(before)][:2] == [429, 200], "not applied, then warm"
    assert len(work.began) == 2
    limited.advance(4.0)
    assert again.result() == (True, 42)


@pytest.mark.parametrize("refusals", [1, 5, None])
def test_429_alone_loses_nothing_before_the_deadline(world: GCSWorld, refusals: int | None) -> None:
    host = world.host()
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    granted = host.writes()[0].at
    host.fails("write", canned.TOO_MANY, times=refusals, when=is_held)
    world.advance(ASSURED - 0.001)
    assert not work.ctx.cancelled
    world.advance(TTL)
    if refusals is None:
        assert work.ended == [granted + ASSURED]
        with pytest.raises(LeaseLostError) as caught:
            running.result()
        assert caught.value.reason is LossReason.UNREACHABLE
        tries = [r.at for r in host.writes() if r.status == 429]
        assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(tries))
    else:
        assert not work.ctx.cancelled and not host.told(Lost)
        world.advance(600)
        assert running.result() == 42


def test_heartbeats_are_not_refused_for_the_writes_of_campaigners(limited: GCSWorld) -> None:
    """Who waits only looks: the one write a second is the holder's."""
    holder = limited.host("holder")
    work = Work(limited, 3 * TTL)
    running = limited.start(lambda: holder.lock().do(work))
    others = [limited.host(f"other-{n}") for n in range(5)]
    waiting = [
        limited.start(lambda h=host: h.lock().do(lambda ctx: None, timeout=2 * TTL))  # type: ignore[misc]
        for host in others
    ]
    limited.advance(2 * TTL)
    assert answered_429(limited) == 0
    assert all(set(host.kinds()) == {"read"} for host in others)
    limited.advance(TTL)
    assert running.result() == 42 and all(one.done for one in waiting)


# --- Outages -------------------------------------------------------------------------------------


OUTAGES: list[tuple[Action, float]] = [
    *((Status(503), seconds) for seconds in (10, 29, 31, 300)),
    *((Reset(), seconds) for seconds in (10, 31)),
    (Stall(), 31),
]


@pytest.mark.parametrize(("trouble", "seconds"), OUTAGES)
def test_an_outage_longer_than_the_ttl_ends_one_hold_and_begins_one(
    world: GCSWorld, trouble: Action, seconds: float
) -> None:
    """Three processes: nobody enters before the holder is cancelled, one does soon afterwards,
    and the holder changes once at most; a short outage changes nothing."""
    hosts = [world.host(name) for name in "abc"]
    stop = threading.Event()
    holders: list[tuple[str, float]] = []
    ends: list[float] = []

    def lead(host: GCSHost) -> None:
        def body(ctx: Ctx) -> None:
            with world.meter.running(ctx):
                holders.append((host.name, world.now))
                while not ctx.wait(1.0) and not stop.is_set():
                    pass
                ends.append(world.now)

        while not stop.is_set():
            try:
                host.lock().do(body)
            except LeaseLostError:
                continue

    threads = [world.start(lambda h=host: lead(h), host.name) for host in hosts]  # type: ignore[misc]
    world.advance(15.0)
    assert len(holders) == 1
    last = max(r.at for r in world.server.requests("write") if r.committed)
    fence = world.server.requests("write")[-1].document["fence"]
    began = world.now
    stall = Stall() if isinstance(trouble, Stall) else trouble
    world.server.faults.add(Fault("*", stall, times=None))
    world.advance(seconds)
    if seconds > TTL:
        assert ends == [pytest.approx(last + ASSURED, abs=0.001)] and len(holders) == 1
    world.let_go()
    world.advance(TTL + WIDTHS + POLL if seconds > 20 else 10)
    if seconds < 20:
        assert len(holders) == 1 and not ends
    else:
        assert len(holders) == 2, "one holder soon after the recovery"
        assert holders[1][1] > ends[0] and holders[1][1] - last >= TTL
        # What stood on its way until then is applied then, and counts as the last write.
        last = max(r.at for r in world.server.requests("write") if r.document["fence"] == fence)
        recovered = began + seconds
        free = recovered if isinstance(trouble, Stall) else last
        assert holders[1][1] <= max(recovered + POLL + 2.0, free + TTL + WIDTHS + POLL)
    world.advance(TTL)
    assert len(holders) <= 2, "and no flapping"
    stop.set()
    for _ in range(5):
        world.advance(5.0)
    for thread in threads:
        thread.result()


def test_an_outage_is_one_line_for_each_who_notices_and_not_one_per_poll(
    world: GCSWorld, caplog: pytest.LogCaptureFixture
) -> None:
    host = world.host()
    host.fails("*", Status(503), times=None)
    with caplog.at_level(logging.INFO, "tako_sync"):
        running = world.start(lambda: host.lock().do(lambda ctx: 42, timeout=300))
        world.advance(301)
    assert running.error is not None
    assert len(host.told(Unreachable)) == 1
    assert len(caplog.records) <= 2
    assert len(host.requests()) > 100


# --- What protects objects -----------------------------------------------------------------------

PROTECTED = {
    "retention policy": (canned.RETENTION, "retention policy"),
    "retention policy, as reported": (canned.RETENTION_AS_REPORTED, "retention policy"),
    "object hold": (canned.HOLD, "object hold"),
    "object hold, as reported": (canned.HOLD_AS_REPORTED, "object hold"),
    "no permission to replace": (
        canned.forbidden("storage.objects.delete"),
        "storage.objects.delete",
    ),
}


@pytest.mark.parametrize("how", PROTECTED)
def test_an_object_that_may_not_be_replaced_is_an_error_that_names_why(
    world: GCSWorld, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Creating works, the first renewal is refused: neither an endless campaign nor a holder
    more with each ttl."""
    action, words = PROTECTED[how]
    a, b = world.host("a"), world.host("b")
    world.server.faults.add(
        Fault("write", action, times=None, when=lambda r: bool(r.generation_match))
    )
    work = Work(world, listens=True)
    running = world.start(lambda: a.lock().do(work))
    granted = a.writes()[0].at
    with caplog.at_level(logging.WARNING, "tako_sync"):
        world.advance(10.5)
        (told,) = a.told(Unreachable)
        assert words in str(told.error), "said at the first renewal"
        world.advance(TTL)
    assert work.ended == [granted + ASSURED]
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.DENIED
    assert words in str(caught.value.__cause__)
    assert any(words in line.getMessage() for line in caplog.records)
    world.advance(WIDTHS)
    for host in (a, b):
        with pytest.raises(BackendDeniedError, match=words):
            world.run(lambda host=host: host.lock().do(Work(world)))  # type: ignore[misc]
    assert len(work.began) == 1


def test_a_hold_that_is_set_on_the_object_and_lifted_in_time_costs_nothing(
    world: GCSWorld,
) -> None:
    host = world.host()
    work = Work(world, TTL + 10)
    running = world.start(lambda: host.lock().do(work))
    world.server.faults.add(Fault("write", canned.HOLD, times=None))
    world.advance(20)
    assert not work.ctx.cancelled
    world.server.faults.clear()
    world.advance(TTL)
    assert running.result() == 42 and not host.told(Lost)


REFUSALS: dict[str, tuple[Action, str, str]] = {
    "requester pays": (canned.REQUESTER_PAYS, "*", "user_project"),
    "a disabled key, on writes alone": (canned.KMS_DISABLED, "write", "encryption key"),
    "a missing bucket": (canned.BUCKET_MISSING, "*", "the bucket does not exist"),
    "bad credentials": (canned.UNAUTHORIZED, "*", "wants credentials, and there are none"),
    "no permission": (canned.forbidden("storage.objects.get"), "read", "storage.objects.get"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("way", ["try_do", "do", "hold"])
def test_what_somebody_has_to_mend_ends_a_campaign_at_its_first_answer(
    world: GCSWorld, way: str, refusal: str
) -> None:
    action, on, words = REFUSALS[refusal]
    host = world.host()
    host.fails(on, action, times=None)
    calls: dict[str, Callable[[], Any]] = {
        "try_do": lambda: host.lock().try_do(Work(world)),
        "do": lambda: host.lock().do(Work(world)),
        "hold": lambda: host.lock().hold().__enter__(),
    }
    with pytest.raises(BackendDeniedError, match=words):
        world.run(calls[way])
    assert len(host.requests()) <= 2


def test_a_bucket_that_is_removed_in_mid_hold_is_a_loss_at_the_deadline_that_says_so(
    world: GCSWorld,
) -> None:
    host = world.host()
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    world.server.set(bucket_missing=True)
    world.advance(TTL)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.DENIED
    assert "the bucket does not exist" in str(caught.value.__cause__)


def test_no_object_is_ever_deleted_nor_given_permissions_of_its_own(world: GCSWorld) -> None:
    """So the permission to delete alone, uniform access and a hold on deletions are no matter."""
    host = world.host()
    for _ in range(3):
        work = Work(world, TTL)
        running = world.start(lambda work=work: host.lock().do(work))  # type: ignore[misc]
        world.advance(TTL + POLL)
        assert running.result() == 42
    assert {request.method for request in host.requests()} == {"GET", "POST"}
    for request in host.requests():
        assert not {"predefinedAcl", "projection"} & set(request.query)
    stored = world.server.object(NAME)
    assert stored is not None
    assert not {"acl", "owner"} & set(stored.properties)


# --- Copies --------------------------------------------------------------------------------------


def test_an_hour_of_holding_leaves_as_many_copies_as_the_docs_say(world: GCSWorld) -> None:
    """360 with a ttl of 30 s, where versioning or soft delete keeps them."""
    host = world.host()
    work = Work(world, 3600.0)
    running = world.start(lambda: host.lock().do(work))
    world.advance(3600.0)
    assert running.result() == 42
    assert sum(request.committed for request in host.writes()) == pytest.approx(360, abs=2)


def test_a_deleted_object_of_a_versioned_bucket_is_absent_and_made_anew(world: GCSWorld) -> None:
    """A noncurrent version is no object: 404, and a create with generation 0 succeeds."""
    host = world.host()
    fence = world.run(lambda: host.lock().do(lambda ctx: ctx.fence))
    old = world.stands[1]
    world.server.delete(NAME)
    world.advance(WIDTHS)
    other = world.host("other")
    assert world.run(lambda: other.lock().do(lambda ctx: ctx.fence)) > fence
    assert [r.status for r in other.requests()] == [404, 200, 200]
    assert other.writes()[0].generation_match == 0
    # The warm one expects what was deleted, is refused, and looks.
    before = len(host.requests())
    assert world.run(lambda: host.lock().try_do(Work(world, 0.0))) == (True, 42)
    assert host.requests()[before].generation_match == old
    assert states(host.requests(before)) == ["held", "read", "held", "released"]


# --- Servers that only seem to look at preconditions ---------------------------------------------


def create_fifty(url: str, bucket: str, folder: str) -> int:
    """Have fifty threads create one object at once; return how many succeed."""
    barrier = threading.Barrier(50)
    with kit.client_of(url) as client:
        backend = GCSLease(bucket, folder, client=client)

        def create(number: int) -> bool:
            barrier.wait(kit.PATIENCE)
            try:
                backend.write(KEY, b"%d" % number, expect=ABSENT, timeout=kit.PATIENCE)
            except VersionConflictError:
                return False
            return True

        with ThreadPoolExecutor(50) as pool:
            created = sum(pool.map(create, range(50)))
        backend.close()
    return created


def test_of_fifty_creates_at_once_one_succeeds(gcs_server: GCSServer) -> None:
    assert create_fifty(gcs_server.url, gcs_server.bucket, "fifty") == 1


def test_of_fifty_creates_at_once_one_succeeds_on_a_server_of_others(
    independent_server: IndependentServer,
) -> None:
    assert create_fifty(independent_server.url, independent_server.bucket, "fifty-creates") == 1


class Lenient:
    """An action: carry the write out whatever generation it asks for, as some emulators do."""

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        query = exchange.request.query
        assert isinstance(query, dict)
        query.pop("ifGenerationMatch", None)
        return proceed()


def test_the_conformance_suite_refuses_a_server_that_ignores_preconditions(
    gcs_server: GCSServer,
) -> None:
    """Else it would give false green on all that is above; on ours it finds nothing."""
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, client=client)

        def complaints(folder: str) -> dict[str, str]:
            def forget(key: str) -> None:
                gcs_server.delete(f"leases/{key}")

            storage = conformance._Storage(backend, backend, forget, kit.PATIENCE, "")
            return {
                probe.__name__: conformance._complaint(
                    probe, evolve(storage, key=f"{folder}-{probe.__name__.replace('_', '-')}")
                )
                for probe in conformance._PROBES
            }

        sound = complaints("sound")
        gcs_server.faults.add(Fault("write", Lenient(), times=None))
        broken = complaints("lenient")
        backend.close()
    assert not any(sound.values()), sound
    for probe in (
        conformance.a_second_create_is_refused,
        conformance.a_write_that_expects_another_version_is_refused,
        conformance.of_many_creates_at_once_one_is_applied,
        conformance.of_many_overwrites_at_once_one_is_applied,
    ):
        assert broken[probe.__name__]
