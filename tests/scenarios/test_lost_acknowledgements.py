"""Our write landed, the answer did not: what is ours is recognised, at once, and only that."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit import Host, Running, World
from tako_sync.abc import ABSENT, Snapshot
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendUnavailableError,
    CampaignTimeoutError,
    LeaseLostError,
    LossReason,
    VersionConflictError,
)
from tako_sync.events import Acquired, Busy, Lost, Released, ReleaseUnconfirmed
from tako_sync.lock import TryResult
from tako_sync.record import Identity, Record, State
from tako_sync.testing.faults import (
    Call,
    Fault,
    Gate,
    Proceed,
    applied_then,
    delay,
    fail,
    hang,
    intercept,
    lands_later,
    substitute,
)

KEY = "run-shop-test-reindex"
TTL = 30.0
ASSURED = 27.0


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503 service unavailable")


def reset() -> BackendUnavailableError:
    return BackendUnavailableError("connection reset by peer")


def refused() -> VersionConflictError:
    return VersionConflictError("412 precondition failed")


LOST: dict[str, tuple[Callable[[], Fault], float]] = {
    "503": (lambda: applied_then(unavailable), 0.2),
    "reset": (lambda: applied_then(reset), 0.2),
    "no answer": (lambda: hang(after=True), 5.2),
    "late answer": (lambda: delay(after=6.0, deaf=True), 5.2),
}
"""How an acknowledgement is lost, and within how many seconds the doubt is settled then."""


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(2 * TTL)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


class Work:
    """A body that lasts some seconds, deaf to its ctx unless it is to listen; returns 42."""

    def __init__(self, world: World, seconds: float = 0.0, *, listens: bool = False) -> None:
        self.began: list[float] = []
        self.ctx: Ctx | None = None
        self._world = world
        self._seconds = seconds
        self._listens = listens

    def __call__(self, ctx: Ctx) -> int:
        with self._world.meter.running(ctx):
            self.began.append(self._world.clock.monotonic())
            self.ctx = ctx
            if self._listens:
                ctx.wait(self._seconds)
            elif self._seconds:
                ctx_free = Ctx.background(self._world.clock)
                ctx_free.wait(self._seconds)
        return 42


def stored(world: World) -> Snapshot:
    return world.store.read(KEY, timeout=1.0)


def record(owner: str = "elsewhere:7:theirs", fence: int = 7, state: State = State.HELD) -> bytes:
    return Record(
        identity=Identity("shop", "test", "reindex"),
        owner=owner,
        write=f"a write of {owner}",
        state=state,
        ttl=TTL,
        margin=3.0,
        fence=fence,
        acquired="2026-01-01T00:00:00Z",
        expires="2026-01-01T00:00:30Z",
    ).encode()


def held(call: Call) -> bool:
    return call.document.get("state") == "held"


def release(call: Call) -> bool:
    return call.document.get("state") == "released"


def nothing_there(call: Call, proceed: Proceed) -> Snapshot:
    return Snapshot(b"", ABSENT)


def leave_an_expired_record(world: World) -> None:
    world.store.write(KEY, record(), expect=ABSENT, timeout=1.0)
    world.advance(TTL + 1)


def call_by(way: str, host: Host, work: Work) -> Callable[[], Any]:
    lock = host.lock()
    return (lambda: lock.try_do(work)) if way == "try_do" else (lambda: lock.do(work))


def value_of(running: Running[Any]) -> int:
    result: object = running.result()
    if isinstance(result, TryResult):
        assert result.ran, "its own record was reported as busy"
        result = result.value
    assert isinstance(result, int)
    return result


# --- The acquiring write ---------------------------------------------------------------


@pytest.mark.parametrize("loss", LOST)
@pytest.mark.parametrize("before", ["nothing", "expired"])
@pytest.mark.parametrize("way", ["try_do", "do"])
def test_an_acquisition_whose_answer_was_lost_runs_the_body_once_and_at_once(
    world: World, way: str, before: str, loss: str
) -> None:
    """The retry is refused; the look finds our own write, and adopts it with its own deadline."""
    if before == "expired":
        leave_an_expired_record(world)
    fault, within = LOST[loss]
    host = world.host(prompt=False)
    host.storage.script("write", fault())
    work = Work(world, 1.0)
    start = world.clock.monotonic()

    running = world.start(call_by(way, host, work))
    world.advance(within)

    assert len(work.began) == 1 and work.began[0] - start <= within
    assert work.ctx is not None
    assert host.requests() == ["read", "write", "write", "read"]
    assert [call.outcome for call in host.storage.calls[2:]] == ["VersionConflictError", "ok"]
    first = host.storage.calls[1]
    assert work.ctx.remaining() == pytest.approx(first.at + ASSURED - world.clock.monotonic())
    assert work.ctx.fence == first.document["fence"]
    assert stored(world).body == first.body, "the retry must not have been applied too"

    world.advance(1.0)
    assert value_of(running) == 42
    assert len(work.began) == 1
    assert host.requests() == ["read", "write", "write", "read", "write"]
    assert b'"released"' in stored(world).body
    assert len(host.told(Acquired)) == 1 and len(host.told(Released)) == 1
    assert not host.told(Busy) and not host.told(Lost)


@pytest.mark.parametrize("landing", ["before the retry", "after the retry", "after the release"])
@pytest.mark.parametrize("before", ["nothing", "expired"])
@pytest.mark.parametrize("way", ["try_do", "do"])
def test_an_acquisition_that_lands_late_runs_the_body_once(
    world: World, way: str, before: str, landing: str
) -> None:
    """Whichever of the two writes lands, the other can do no harm when its turn comes."""
    if before == "expired":
        leave_an_expired_record(world)
    host = world.host(prompt=False)
    late = {"before the retry": 0.01, "after the retry": 1.0, "after the release": 9.0}[landing]
    host.storage.script("write", lands_later(late, unavailable))
    work = Work(world, 5.0)

    running = world.start(call_by(way, host, work))
    world.advance(2.0)

    assert len(work.began) == 1 and work.ctx is not None
    first, retry = host.storage.calls[1], host.storage.calls[2]
    adopted = first if landing == "before the retry" else retry
    assert stored(world).body == adopted.body
    assert work.ctx.remaining() == pytest.approx(adopted.at + ASSURED - world.clock.monotonic())

    world.advance(4.0)
    assert value_of(running) == 42
    free = stored(world)
    assert b'"released"' in free.body
    world.advance(10.0)
    assert stored(world) == Snapshot(free.body, free.version, free.written, stored(world).now)
    assert len(work.began) == 1 and not host.told(Lost)


def test_try_do_that_cannot_settle_its_doubt_raises_and_never_says_busy(world: World) -> None:
    """The write landed, then the storage fell silent: neither ran nor busy is known to be true."""
    host = world.host(prompt=False)
    host.storage.script("write", applied_then(unavailable))
    host.storage.always("*", fail(unavailable), when=lambda call: call.number > 2)
    work = Work(world)
    start = world.clock.monotonic()

    running = world.start(lambda: host.lock().try_do(work))
    world.advance(12.0)

    with pytest.raises(BackendUnavailableError):
        running.result()
    assert not work.began and not host.told(Busy) and not host.told(Acquired)
    assert host.storage.calls[-1].at - start <= 10.0
    sent = len(host.storage.calls)
    world.advance(15.0)
    assert len(host.storage.calls) == sent, "nothing may keep the abandoned record alive"


def test_what_an_abandoned_campaign_leaves_behind_ages_out_by_itself(world: World) -> None:
    """It landed after its caller had gone, and nobody was told: a ttl later it is free."""
    gone = world.host("gone", prompt=False)
    gone.storage.script("write", lands_later(3.0, unavailable))
    left = Work(world)
    abandoned = world.start(lambda: gone.lock().do(left, timeout=0.03))
    world.advance(1.0)
    with pytest.raises(CampaignTimeoutError):
        abandoned.result()
    world.advance(3.0)
    landed = stored(world)
    assert b'"held"' in landed.body and landed.written is not None

    other = world.host("other")
    work = Work(world)
    running = world.start(lambda: other.lock().do(work))
    world.advance(TTL + 3.0)

    assert running.result() == 42 and not left.began
    assert TTL <= work.began[0] - landed.written.latest <= TTL + 2.5
    assert gone.requests() == ["read", "write"]


def test_a_grant_whose_caller_has_gone_is_given_back_when_its_answer_comes(world: World) -> None:
    """The answer tells the request's own thread, which frees the record for the others."""
    gone = world.host("gone", prompt=False)
    gate = Gate()
    gone.storage.script("write", gate)
    left = Work(world)
    abandoned = world.start(lambda: gone.lock().do(left, timeout=1.0))
    world.advance(1.5)
    with pytest.raises(CampaignTimeoutError):
        abandoned.result()

    gate.open()
    world.advance(0)

    assert not left.began
    assert [call.document.get("state") for call in gone.storage.calls] == [None, "held", "released"]
    other = world.host("other")
    assert other.lock().try_do(Work(world)) == (True, 42)


def test_a_grant_adopted_by_the_retry_is_not_given_back_by_its_own_late_answer(
    world: World,
) -> None:
    """The first attempt's answer comes while the body runs, held by the very record it wrote."""
    host = world.host(prompt=False)
    gate = Gate(after=True)
    host.storage.script("write", gate)
    work = Work(world, 8.0)
    running = world.start(lambda: host.lock().do(work))
    world.advance(6.0)
    assert len(work.began) == 1
    before = stored(world)

    gate.open()
    world.advance(1.0)

    assert stored(world).version == before.version and b'"held"' in before.body
    world.advance(8.0)
    assert running.result() == 42 and not host.told(Lost)


# --- The heartbeat ---------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOST)
def test_heartbeats_that_land_without_an_answer_do_not_lose_the_lease(
    world: World, loss: str
) -> None:
    """Six in a row, over two ttl: each is found by its own name, and prolongs from its sending."""
    host = world.host(prompt=False)
    work = Work(world, 2 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    fault, within = LOST[loss]
    host.storage.script("write", *[step for _ in range(6) for step in (fault(), None)])

    world.advance(10.0 + within + 1.5)

    assert work.ctx is not None and not work.ctx.cancelled
    first, retry, look = host.storage.calls[2:5]
    assert (retry.outcome, look.op) == ("VersionConflictError", "read")
    assert work.ctx.remaining() == pytest.approx(first.at + ASSURED - world.clock.monotonic())

    world.advance(60.0)
    assert running.result() == 42
    # Each heartbeat: the lost one, the retry, the look.
    assert host.requests() == ["read", "write"] + 6 * ["write", "write", "read"] + ["write"]
    assert not host.told(Lost)
    assert len({call.document["write"] for call in host.storage.calls if call.op == "write"}) == 14


@pytest.mark.parametrize("late", [0.1, 4.0])
def test_a_heartbeat_that_lands_late_does_not_lose_the_lease(world: World, late: float) -> None:
    """Before its retry it is adopted; after it, the storage refuses it."""
    host = world.host(prompt=False)
    work = Work(world, 2 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    host.storage.script("write", lands_later(late, reset))

    world.advance(20.0)
    first, retry = host.storage.calls[2], host.storage.calls[3]
    assert (retry.outcome == "ok") == (late == 4.0)
    world.advance(50.0)

    assert running.result() == 42 and not host.told(Lost)
    assert first.outcome == "BackendUnavailableError"


@pytest.mark.parametrize("loss", ["503", "reset"])
def test_a_record_of_another_holder_after_a_lost_answer_is_a_loss(world: World, loss: str) -> None:
    """The contrast: between the lost answer and the retry someone else's record has come."""
    host = world.host(prompt=False)
    work = Work(world, 600.0, listens=True)
    running = world.start(lambda: host.lock().do(work))
    theirs = record("elsewhere:7:theirs", fence=99 * 10**12)
    host.storage.script("write", LOST[loss][0](), substitute(theirs))

    world.advance(12.0)

    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.TAKEN
    assert caught.value.value == 42
    assert [event.reason for event in host.told(Lost)] == [LossReason.TAKEN]
    assert stored(world).body == theirs
    assert host.requests() == ["read", "write", "write", "write", "read"]
    world.advance(TTL)
    assert len(host.storage.calls) == 5, "a lost lease is neither renewed nor released"


def test_an_own_owner_in_a_record_we_did_not_write_prolongs_nothing(world: World) -> None:
    """Names of writes are compared, never owners: the older record carries our owner as well."""
    host = world.host(prompt=False)
    work = Work(world, 600.0, listens=True)
    running = world.start(lambda: host.lock().do(work))
    granted = host.storage.calls[1]

    def same_owner(before: Snapshot) -> bytes:
        return before.body.replace(granted.document["write"].encode(), b"someone's")

    host.storage.script("write", substitute(same_owner))
    world.advance(12.0)

    with pytest.raises(LeaseLostError):
        running.result()
    assert [event.reason for event in host.told(Lost)] == [LossReason.BROKEN]
    assert stored(world).body == same_owner(Snapshot(granted.body or b"", "1"))


# --- The release -----------------------------------------------------------------------


def answered_404(host: Host, world: World) -> None:
    host.storage.script("write", applied_then(unavailable), fail(refused), when=release)
    host.storage.always("read", intercept(nothing_there))


def answered_412(host: Host, world: World) -> None:
    host.storage.script("write", applied_then(unavailable), when=release)


def answered_by_a_newer_record(host: Host, world: World) -> None:
    host.storage.script(
        "write",
        applied_then(unavailable),
        substitute(record("elsewhere:7:next", fence=99 * 10**12)),
        when=release,
    )


def not_applied(host: Host, world: World) -> None:
    host.storage.script("write", fail(unavailable), when=release)


def lands_meanwhile(host: Host, world: World) -> None:
    host.storage.script("write", lands_later(0.02, reset), when=release)


def lands_after_its_retry(host: Host, world: World) -> None:
    host.storage.script("write", lands_later(5.0, reset), when=release)


def never_answered(host: Host, world: World) -> None:
    host.storage.script("write", hang(after=True), when=release)


def deleted_before(host: Host, world: World) -> None:
    host.storage.script("write", fail(refused), when=release)
    host.storage.always("read", intercept(nothing_there))


RELEASES: dict[str, tuple[Callable[[Host, World], None], float]] = {
    "503, then 404": (answered_404, 0.2),
    "503, then 412": (answered_412, 0.2),
    "503, then 412 and a newer record": (answered_by_a_newer_record, 0.2),
    "503 and not applied": (not_applied, 0.2),
    "reset, lands before the retry": (lands_meanwhile, 0.2),
    "reset, lands after the retry": (lands_after_its_retry, 0.2),
    "no answer": (never_answered, 1.0),
    "412, then 404": (deleted_before, 0.0),
}


@pytest.mark.parametrize("answers", RELEASES)
@pytest.mark.parametrize("way", ["try_do", "do"])
def test_a_release_whose_answer_was_lost_is_no_failure(
    world: World, way: str, answers: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The body's value comes back, soon, with no error and no warning."""
    caplog.set_level(logging.DEBUG, "tako_sync")
    host = world.host(prompt=False)
    work = Work(world, 1.0)
    running = world.start(call_by(way, host, work))
    prepare, within = RELEASES[answers]
    prepare(host, world)

    world.advance(1.0 + within)

    assert running.done, "the caller is kept waiting"
    assert value_of(running) == 42 and len(work.began) == 1
    host.storage.heal()
    world.advance(2 * TTL)
    assert not host.told(ReleaseUnconfirmed) and not host.told(Lost)
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]
    final = stored(world).body
    if "newer record" in answers:
        assert final == record("elsewhere:7:next", fence=99 * 10**12)
    elif answers != "412, then 404":
        assert b'"released"' in final
        assert len(host.told(Released)) == (0 if answers == "503, then 404" else 1)


def test_a_release_settled_by_a_look_leaves_a_warm_lease(world: World) -> None:
    """The look shows the version of our own release: the next acquisition needs one request."""
    host = world.host(prompt=False)
    running = world.start(lambda: host.lock().do(Work(world, 1.0)))
    answered_412(host, world)
    world.advance(1.2)
    assert running.result() == 42
    before = len(host.storage.calls)

    again = world.start(lambda: host.lock().do(Work(world, 1.0)))

    assert host.requests()[before:] == ["write"]
    world.advance(1.0)
    assert again.result() == 42


# --- Refused, and then nobody is there ---------------------------------------------------


@pytest.mark.parametrize("way", ["try_do", "do"])
def test_a_record_that_vanishes_after_our_create_was_refused_is_free_now(
    world: World, way: str
) -> None:
    """412 at the create, 404 at the read: try again at once; no time passes, nothing is raised."""
    host = world.host(prompt=False)
    host.storage.script("write", fail(refused))
    work = Work(world, 1.0)
    start = world.clock.monotonic()

    running = world.start(call_by(way, host, work))

    assert work.began == [start]
    assert host.requests() == ["read", "write", "read", "write"]
    world.advance(1.0)
    assert value_of(running) == 42


def test_do_waits_out_a_storage_that_refuses_creates_and_shows_nobody(world: World) -> None:
    """For 20 s: no exception leaves ``do``, the storage is not hammered, and then the body runs."""
    host = world.host(prompt=False)
    host.storage.always("write", fail(refused))
    work = Work(world, 1.0)
    running = world.start(lambda: host.lock().do(work))
    world.advance(20.0)
    assert not running.done and not work.began
    assert len(host.storage.calls) <= 8 * 20

    host.storage.heal()
    world.advance(5.0)
    assert running.result() == 42 and len(work.began) == 1


def test_try_do_on_a_storage_that_refuses_creates_and_shows_nobody_is_unresolved(
    world: World,
) -> None:
    """Not busy, since nobody is there; not a crash either: the documented error, and soon."""
    host = world.host(prompt=False)
    host.storage.always("write", fail(refused))
    work = Work(world)
    running = world.start(lambda: host.lock().try_do(work))
    world.advance(6.0)
    assert running.done
    with pytest.raises(BackendUnavailableError):
        running.result()
    assert not work.began and not host.told(Busy)


def test_twenty_threads_on_a_storage_whose_reads_lie_all_get_their_turns(world: World) -> None:
    """A third of the reads see nobody: refused creates by the hundred, and no exception at all."""
    hosts = [world.host(name) for name in "abcd"]
    for seed, host in enumerate(hosts):
        chance = random.Random(seed)

        def sometimes(call: Call, proceed: Proceed, chance: random.Random = chance) -> Any:
            return nothing_there(call, proceed) if chance.random() < 0.3 else proceed()

        host.storage.always("read", intercept(sometimes))
    work = Work(world, 0.01)

    def fifty(host: Host) -> int:
        return sum(host.lock().do(work) == 42 for _ in range(50))

    threads = [world.start(lambda h=hosts[i % 4]: fifty(h), f"worker-{i}") for i in range(20)]
    for _ in range(100):
        if all(thread.done for thread in threads):
            break
        world.advance(5.0)

    assert [thread.result() for thread in threads] == 20 * [50]
    assert len(work.began) == 1000
    conflicts = [c for h in hosts for c in h.storage.calls if c.outcome == "VersionConflictError"]
    assert conflicts, "the trial has tried nothing"
    assert not any(host.told(Lost) for host in hosts)
