"""Takeovers, releases and renewals that meet in the storage: nobody touches another's record."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from kit import Host, World
from tako_sync.abc import ABSENT, Absent, LeaseBackend, Snapshot, Version
from tako_sync.backends.memory import MemoryLease
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendUnavailableError,
    LeaseLostError,
    LossReason,
    VersionConflictError,
)
from tako_sync.events import Acquired, Lost, ReleaseUnconfirmed
from tako_sync.flag import Flag
from tako_sync.lock import Lock, TryResult
from tako_sync.policy import LeasePolicy
from tako_sync.record import Identity, Record, State
from tako_sync.runtime import Runtime
from tako_sync.testing.faults import (
    Call,
    Gate,
    Proceed,
    applied_then,
    delay,
    fail,
    intercept,
)

KEY = "run-shop-test-reindex"
TTL = 30.0
ASSURED = 27.0
POLL = 2.5


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503 service unavailable")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.store = Deletable(world.store)  # type: ignore[assignment]
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(2 * TTL)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


class Deletable(LeaseBackend):
    """Any storage, with an operator who deletes records behind the library's back."""

    prompt = True

    def __init__(self, backend: LeaseBackend) -> None:
        self._backend = backend
        self._deleted: dict[str, Version | Absent] = {}

    def delete(self, key: str) -> None:
        self._deleted[key] = self._backend.read(key, timeout=1.0).version

    def read(self, key: str, *, timeout: float) -> Snapshot:
        found = self._backend.read(key, timeout=timeout)
        if found.version == self._deleted.get(key):
            return Snapshot(b"", ABSENT, None, found.now)
        return found

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        beneath = self._deleted.get(key, ABSENT)
        if expect == beneath and expect is not ABSENT:
            raise VersionConflictError(f"{key} was deleted")
        expect = beneath if expect is ABSENT else expect
        return self._backend.write(key, body, expect=expect, timeout=timeout)

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        return self._backend.list(prefix, timeout=timeout)

    def describe(self) -> str:
        return self._backend.describe()


class Work:
    """A body, deaf to its ctx, that lasts until the test ends it; then it returns 42 or raises."""

    def __init__(self, world: World, error: BaseException | None = None) -> None:
        self.finish = Flag()
        self.began: list[float] = []
        self.ctx: Ctx | None = None
        self._world = world
        self._error = error

    def __call__(self, ctx: Ctx) -> int:
        with self._world.meter.running(ctx):
            self.began.append(self._world.clock.monotonic())
            self.ctx = ctx
            self._world.clock.wait(self.finish)
        if self._error is not None:
            raise self._error
        return 42

    @property
    def disturbed(self) -> bool:
        return self.ctx is None or self.ctx.cancelled


def stored(world: World) -> tuple[bytes, Version | Absent]:
    found = world.store.read(KEY, timeout=1.0)
    return found.body, found.version


def record(owner: str = "elsewhere:7:theirs", fence: int = 7) -> bytes:
    return Record(
        identity=Identity("shop", "test", "reindex"),
        owner=owner,
        write=f"a write of {owner}",
        state=State.HELD,
        ttl=TTL,
        margin=3.0,
        fence=fence,
        acquired="2026-01-01T00:00:00Z",
        expires="2026-01-01T00:00:30Z",
    ).encode()


def writes(host: Host) -> list[Call]:
    return [call for call in host.storage.calls if call.op == "write"]


def release(call: Call) -> bool:
    return call.document.get("state") == "released"


# --- A release after a takeover ----------------------------------------------------------


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_release_after_a_takeover_leaves_the_successors_record_alone(
    world: World, ending: str
) -> None:
    """The slow holder's release expects its own version, and there is another's by then."""
    error = ValueError("the body's own") if ending == "raises" else None
    slow, next_one = Work(world, error), Work(world)
    a, b = world.host("a"), world.host("b")
    first = world.start(lambda: a.lock().do(slow), "a")
    a.storage.always("write", fail(unavailable))
    second = world.start(lambda: b.lock().do(next_one), "b")
    world.advance(TTL + POLL)
    assert next_one.began and slow.disturbed
    theirs = stored(world)
    a.storage.heal()

    slow.finish.set()
    world.advance(1.0)

    assert first.done
    if error is None:
        with pytest.raises(LeaseLostError) as caught:
            first.result()
        assert (caught.value.reason, caught.value.value) == (LossReason.UNREACHABLE, 42)
    else:
        assert first.error is error
        assert any('"reindex" was lost' in note for note in getattr(error, "__notes__", []))
    assert stored(world) == theirs, "byte for byte, and not even rewritten"
    assert writes(a)[-1].outcome == "VersionConflictError"
    assert not next_one.disturbed
    next_one.finish.set()
    assert second.result() == 42
    assert [event.reason for event in a.told(Lost)] == [LossReason.UNREACHABLE]
    assert not b.told(Lost)


def test_a_release_delayed_until_after_the_takeover_leaves_the_successors_record_alone(
    world: World,
) -> None:
    """Sent in time, it hangs on its way; the caller has its value long before it arrives."""
    slow, next_one = Work(world), Work(world)
    a, b = world.host("a", prompt=False), world.host("b")
    first = world.start(lambda: a.lock().do(slow), "a")
    a.storage.always("write", fail(unavailable), when=lambda call: not release(call))
    gate = a.storage.gate("write", when=release)
    second = world.start(lambda: b.lock().do(next_one), "b")
    world.advance(25.0)
    slow.finish.set()
    # A renewal may be under way: its end is waited for, then a moment for the release.
    world.advance(1.0)
    assert first.result() == 42, "it had returned within its deadline"
    assert gate.calls
    world.advance(TTL + POLL - 26.0)
    assert next_one.began
    theirs = stored(world)

    gate.open()
    world.advance(5.0)

    assert stored(world) == theirs
    assert {call.outcome for call in gate.calls} == {"VersionConflictError"}
    assert not next_one.disturbed and not a.told(Lost)
    assert not a.told(ReleaseUnconfirmed), "the look has settled it"
    next_one.finish.set()
    assert second.result() == 42


# --- Two who see the same expired record ---------------------------------------------------


def test_the_slower_of_two_who_see_an_expired_record_goes_back_to_polling(world: World) -> None:
    """Its one write expects the version it saw, is refused, and the winner is not disturbed."""
    world.store.write(KEY, record(), expect=ABSENT, timeout=1.0)
    world.advance(TTL + 1.0)
    b, c = world.host("b"), world.host("c")
    won, waited = Work(world), Work(world)
    gate = Gate()
    c.storage.script("write", gate)
    slower = world.start(lambda: c.lock().do(waited), "c")
    faster = world.start(lambda: b.lock().do(won), "b")
    assert won.began and gate.calls
    theirs = stored(world)

    gate.open()
    world.advance(5.0)

    assert stored(world) == theirs and not won.disturbed and not waited.began
    assert [call.op for call in c.storage.calls[:3]] == ["read", "write", "read"]
    assert c.storage.calls[1].expect == writes(b)[0].expect
    assert set(c.requests()[2:]) == {"read"}, "while it is held, campaigners only look"
    won.finish.set()
    world.advance(POLL)
    assert faster.result() == 42 and len(waited.began) == 1
    waited.finish.set()
    assert slower.result() == 42


class Steps:
    """Stops every request, and every body, until it is that one's turn."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._world = world
        self._chance = chance
        self._pending: list[tuple[str, Flag]] = []

    def stop(self, what: str) -> None:
        turn = Flag()
        self._pending.append((what, turn))
        self._world.clock.wait(turn)

    def fault(self, call: Call, proceed: Proceed) -> Any:
        self.stop(call.op)
        return proceed()

    def body(self, ctx: Ctx) -> int:
        with self._world.meter.running(ctx):
            self.stop("body")
            assert not ctx.cancelled
        return ctx.fence

    def take(self, but: str = "") -> bool:
        """Give one of those who wait their turn; return whether there was any."""
        choices = [pending for pending in self._pending if pending[0] != but]
        if not choices:
            return False
        chosen = self._chance.choice(choices)
        self._pending.remove(chosen)
        chosen[1].set()
        self._world.advance(0)
        return True


def one_interleaving(seed: int, meanwhile: str) -> int:
    """Let three call ``try_do`` on one expired record, in a random order; return how many ran."""
    chance = random.Random(seed)
    world = World()
    store = Deletable(world.store)
    world.store = store  # type: ignore[assignment]
    world.store.write(KEY, record(), expect=ABSENT, timeout=1.0)
    world.advance(TTL + 1.0)
    expired = stored(world)[1]
    steps = Steps(world, chance)
    hosts = [world.host(name) for name in "bcd"]
    for host in hosts:
        host.storage.always("*", steps.fault)

    def attempt(host: Host) -> TryResult[int]:
        return host.lock().try_do(steps.body)

    running = [world.start(lambda host=host: attempt(host), host.name) for host in hosts]
    if meanwhile != "nothing":
        for _ in range(chance.randrange(4)):
            steps.take(but="write")
        store.delete(KEY)
        if meanwhile == "deleted and recreated":
            world.store.write(KEY, record("new:1:1"), expect=ABSENT, timeout=1.0)
    while not all(thread.done for thread in running):
        if not steps.take():  # one who has lost three races pauses, whoever has won them
            world.advance(1.0)

    results = [thread.result() for thread in running]
    world.meter.check()
    assert world.meter.fences == sorted({r.value for r in results if r.value is not None})
    applied = [call for host in hosts for call in writes(host) if call.applied]
    expected = [call.expect for call in applied]
    assert len(set(expected)) == len(expected), "two writes took the place of one version"
    if meanwhile == "nothing":
        assert expired in expected and ABSENT not in expected
    if meanwhile == "deleted and recreated":
        assert not applied and stored(world)[0] == record("new:1:1")
    return sum(result.ran for result in results)


@pytest.mark.parametrize(
    ("meanwhile", "fewest", "most"),
    [("nothing", 1, 3), ("deleted", 1, 3), ("deleted and recreated", 0, 0)],
)
def test_no_interleaving_of_takeovers_gives_two_holders(
    meanwhile: str, fewest: int, most: int
) -> None:
    """A thousand orders of three campaigners' reads, writes and bodies, a third of each kind."""
    ran = {one_interleaving(seed, meanwhile) for seed in range(334)}
    assert (min(ran), max(ran)) == (fewest, most)


# --- A body that drains --------------------------------------------------------------------


@pytest.mark.parametrize("drains", [10.0, 10 * TTL])
def test_a_cancelled_body_keeps_its_lease_until_it_has_really_returned(
    world: World, drains: float
) -> None:
    """Cancel, then release: the next one would start while the workers of this one still drain."""
    a, b = world.host("a"), world.host("b")
    parent = Ctx.background(world.clock)
    ended: list[float] = []

    def body(ctx: Ctx) -> str:
        ctx.wait(600.0)
        world.clock.wait(Flag(), drains)
        ended.append(world.clock.monotonic())
        return "drained"

    running = world.start(lambda: a.lock().do(body, ctx=parent))
    waiting = world.start(lambda: b.lock().do(lambda ctx: world.clock.monotonic()))
    world.advance(5.0)
    parent.cancel("a deploy")
    world.advance(drains - 0.1)
    assert not waiting.done and not ended
    assert b'"held"' in stored(world)[0]
    world.advance(0.1 + POLL)
    assert running.result() == "drained", "and it was no loss"
    assert ended[0] <= waiting.result() <= ended[0] + POLL


# --- A renewal by a former holder ----------------------------------------------------------


def test_a_queued_heartbeat_let_through_after_a_takeover_changes_nothing(world: World) -> None:
    """The former holder was cut off for longer than the ttl; its renewal arrives last of all."""
    slow, next_one = Work(world), Work(world)
    a, b = world.host("a", prompt=False), world.host("b")
    first = world.start(lambda: a.lock().do(slow), "a")
    gate = a.storage.gate("*")
    second = world.start(lambda: b.lock().do(next_one), "b")
    world.advance(ASSURED)
    assert slow.disturbed and not next_one.began
    world.advance(TTL + POLL - ASSURED)
    assert next_one.began and gate.calls
    theirs = stored(world)

    gate.open()
    world.advance(2.0)

    assert stored(world) == theirs and not next_one.disturbed
    assert not any(call.applied for call in gate.calls if call.op == "write")
    slow.finish.set()
    world.advance(1.0)
    with pytest.raises(LeaseLostError):
        first.result()
    assert stored(world) == theirs and not next_one.disturbed
    next_one.finish.set()
    assert second.result() == 42


def test_a_renewal_never_creates_a_record_that_an_operator_deleted(world: World) -> None:
    """It is lost at the next heartbeat, and nothing is written any more, not even a release."""
    a = world.host("a")
    work = Work(world)
    running = world.start(lambda: a.lock().do(work))
    world.advance(5.0)
    world.store.delete(KEY)  # type: ignore[attr-defined]

    world.advance(5.0)

    assert work.disturbed and work.ctx is not None
    assert isinstance(work.ctx.cause, LeaseLostError)
    assert work.ctx.cause.reason is LossReason.DELETED
    work.finish.set()
    world.advance(TTL)
    with pytest.raises(LeaseLostError):
        running.result()
    assert a.requests() == ["read", "write", "write", "read"]
    assert [call.expect for call in writes(a)[1:]] != [ABSENT]
    assert stored(world) == (b"", ABSENT)


def test_a_renewal_that_lands_after_the_deadline_does_not_revive_the_hold(world: World) -> None:
    """Nobody took the expired lease over. It is lost all the same, and freed as the body ends."""
    a, b = world.host("a", prompt=False), world.host("b")
    work = Work(world)
    running = world.start(lambda: a.lock().do(work))
    granted = stored(world)
    gate = a.storage.gate("*")
    world.advance(TTL + 1.0)
    assert work.disturbed

    a.storage.heal()
    gate.open()
    world.advance(1.0)

    late = stored(world)
    assert late != granted and b'"held"' in late[0], "it has landed"
    assert work.disturbed
    sent = len(writes(a))
    world.advance(3.0)
    assert len(writes(a)) == sent, "a lost hold is not renewed"
    assert not b.lock().try_do(Work(world)).ran, "others respect the record that has landed"
    work.finish.set()
    world.advance(1.0)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.UNREACHABLE
    assert b'"released"' in stored(world)[0]
    assert [event.reason for event in a.told(Lost)] == [LossReason.UNREACHABLE]


# --- A release and a heartbeat in flight -----------------------------------------------------


@pytest.mark.parametrize("landing", ["before", "during", "after", "never"])
def test_a_heartbeat_in_flight_at_the_release_costs_neither_result_nor_lease(
    world: World, landing: str
) -> None:
    """Stop, join for one request timeout at most, then release with the last known version."""
    a, b = world.host("a", prompt=False), world.host("b")
    work = Work(world)
    running = world.start(lambda: a.lock().do(work))
    in_flight = a.storage.gate("write", when=lambda call: not release(call))
    releasing = Gate()
    if landing == "during":
        a.storage.script("write", releasing, when=release)
    world.advance(10.0)
    assert len(in_flight.calls) == 1 and not work.disturbed

    work.finish.set()
    world.advance(1.0)
    assert not running.done and len(writes(a)) == 2, "no release beside a renewal under way"
    if landing == "before":
        in_flight.open()
        world.advance(0)
    elif landing == "during":
        world.advance(5.0 - 1.0)
        assert releasing.calls, "the join has ended after one request timeout"
        in_flight.open()
        world.advance(0)
        releasing.open()
        world.advance(1.0)
    else:
        world.advance(5.0 - 1.0)

    assert running.done, "the caller is kept waiting"
    assert running.result() == 42 and not a.told(Lost)
    assert b'"released"' in stored(world)[0]
    sent = len(a.storage.calls)
    if landing == "after":
        free = stored(world)
        in_flight.open()
        world.advance(1.0)
        assert stored(world) == free
    assert b.lock().try_do(lambda ctx: "in") == (True, "in")
    world.advance(2 * TTL)
    assert len(a.storage.calls) == sent, "nothing leaves the process after do has returned"


@pytest.mark.parametrize(("prompt", "cycles"), [(True, 1000), (False, 300)])
def test_thousands_of_short_cycles_with_renewals_under_way_are_all_successes(
    prompt: bool, cycles: int
) -> None:
    """Bodies end around the first heartbeat of a short ttl, whose answers take their time."""
    world = World(LeasePolicy(ttl=0.3))
    host = world.host(prompt=prompt)
    lock = host.lock()
    chance = random.Random(11)

    def slow(call: Call, proceed: Proceed) -> Any:
        if release(call):
            return proceed()
        return delay(chance.uniform(0, 0.015), chance.uniform(0, 0.015))(call, proceed)

    host.storage.always("write", intercept(slow))

    def body(ctx: Ctx) -> int:
        with world.meter.running(ctx):
            ctx.wait(chance.uniform(0.05, 0.13))
        return ctx.fence

    def run() -> int:
        for done in range(cycles):
            fence = lock.do(body)
            sent = len(host.storage.calls)
            found = world.store.read(KEY, timeout=1.0)
            assert b'"released"' in found.body and str(fence).encode() in found.body
            if done % 10 == 0:
                Ctx.background(world.clock).wait(0.1)
                assert len(host.storage.calls) == sent, "something was sent after the end"
        return cycles

    running = world.start(run)
    while not running.done:
        world.advance(60.0)

    assert running.result() == cycles
    world.meter.check()
    assert not host.told(Lost) and not host.told(ReleaseUnconfirmed)
    renewals = [c for c in writes(host) if c.outcome == "ok" and not release(c)]
    assert len(renewals) > 1.3 * cycles, "the trial has hardly any heartbeat in it"
    assert not world.clock.waiters


def test_thousands_of_cycles_on_the_system_clock_leave_a_free_lease() -> None:
    """Real threads this time: as many turns as the machine gives, each of them a success."""
    store = MemoryLease()
    runtime = Runtime(store, app="shop", env="test", policy=LeasePolicy(ttl=0.3))
    lock = Lock("reindex").bound_to(runtime)
    fences = [lock.do(lambda ctx: ctx.fence) for _ in range(2000)]
    assert fences == sorted(set(fences))
    assert b'"released"' in store.read(KEY, timeout=1.0).body


# --- Granted too late ------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["try_do", "do"])
def test_a_grant_whose_answer_comes_after_its_own_deadline_is_none(world: World, way: str) -> None:
    """Applied at once, answered a ttl and a second later; a second contender polls meanwhile."""
    a, b = world.host("a"), world.host("b")
    a.storage.script("write", delay(after=TTL + 3.0, deaf=True))
    late, other = Work(world), Work(world)
    start = world.clock.monotonic()
    call: Callable[[], Any] = lambda: (  # noqa: E731
        a.lock().try_do(late) if way == "try_do" else a.lock().do(late)
    )
    first = world.start(call, "a")
    second = world.start(lambda: b.lock().do(other), "b")

    world.advance(TTL + POLL + 3.0)

    assert not late.began, "the body was started on a dead grant"
    assert len(other.began) == 1 and other.began[0] - start >= TTL
    theirs = stored(world)
    world.advance(3.0)
    assert stored(world) == theirs and not other.disturbed
    if way == "try_do":
        assert not first.result().ran and first.result().holder.fence == other.ctx.fence  # type: ignore[union-attr]
        assert not a.told(Acquired)
        other.finish.set()
        world.advance(0)
    else:
        other.finish.set()
        world.advance(POLL)
        assert len(late.began) == 1, "the campaign goes on"
        late.finish.set()
        world.advance(0)
        assert first.result() == 42
    assert second.result() == 42


@pytest.mark.parametrize(("after", "counts"), [(26.5, True), (27.0, False), (31.0, False)])
def test_the_validity_of_a_grant_counts_from_before_its_request(
    world: World, after: float, counts: bool
) -> None:
    """What is left when the answer comes is what was sent for, less the time it took."""
    a = world.host("a")
    a.storage.script("write", delay(after=after, deaf=True))
    work = Work(world)
    start = world.clock.monotonic()
    running = world.start(lambda: a.lock().do(work))

    world.advance(after)

    sent = writes(a)[0].at
    assert sent == start
    if counts:
        assert work.began == [start + after] and work.ctx is not None
        assert work.ctx.remaining() == pytest.approx(ASSURED - after)
        assert work.ctx.fence == writes(a)[0].document["fence"]
    else:
        assert not work.began
        assert [release(call) for call in writes(a)] == [False, True], "it is given back"
        world.advance(0.2)
        assert len(work.began) == 1 and work.ctx is not None
        assert work.ctx.remaining() == pytest.approx(
            writes(a)[2].at + ASSURED - world.clock.monotonic()
        )
    world.advance(1.0)
    work.finish.set()
    world.advance(1.0)
    assert len(work.began) == 1
    if counts:
        with pytest.raises(LeaseLostError):
            running.result()
    else:
        assert running.result() == 42


@pytest.mark.parametrize("contended", [True, False])
def test_an_own_record_found_after_its_deadline_is_not_adopted(
    world: World, contended: bool
) -> None:
    """The write landed, then the storage could not be reached for longer than the ttl."""
    a, b = world.host("a", prompt=False), world.host("b")
    late, other = Work(world), Work(world)
    a.storage.script("write", applied_then(unavailable))
    a.storage.always("*", fail(unavailable), when=lambda call: call.number > 2)
    start = world.clock.monotonic()
    first = world.start(lambda: a.lock().do(late), "a")
    second = world.start(lambda: b.lock().do(other), "b") if contended else None
    world.advance(TTL + POLL)
    assert not late.began
    a.storage.heal()
    world.advance(3.0)  # the longest pause between two attempts on a storage that fails

    if second is not None:
        assert other.began and not late.began and not other.disturbed
        other.finish.set()
        world.advance(POLL)
        assert second.result() == 42
    else:
        assert [release(call) for call in writes(a)][-1], "its own dead record is given back"
        world.advance(3.0)
    assert len(late.began) == 1 and late.began[0] > start + TTL and late.ctx is not None
    assert late.ctx.remaining() > ASSURED - 6.0
    late.finish.set()
    world.advance(0)
    assert first.result() == 42
