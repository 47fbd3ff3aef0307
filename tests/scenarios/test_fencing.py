"""Fences: a late writer is refused, whatever has happened to the record in between."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest

from kit import Host, World
from tako_sync.abc import ABSENT, Absent, Interval, LeaseBackend, Snapshot, Version
from tako_sync.ctx import Ctx
from tako_sync.errors import BackendUnavailableError, LeaseLostError, LossReason
from tako_sync.events import Acquired
from tako_sync.flag import Flag
from tako_sync.record import Record, State, read
from tako_sync.testing.faults import applied_then, fail

KEY = "run-shop-test-reindex"
TTL, POLL = 30.0, 2.5


class Deletable(LeaseBackend):
    """A storage with an operator, or a lifecycle rule, that deletes behind the library's back."""

    prompt = True

    def __init__(self, backend: LeaseBackend, *, clock: bool = True) -> None:
        self._backend = backend
        self._clock = clock
        self._deleted: dict[str, Version | Absent] = {}

    def delete(self, key: str = KEY) -> None:
        self._deleted[key] = self._backend.read(key, timeout=1.0).version

    def read(self, key: str, *, timeout: float) -> Snapshot:
        found = self._backend.read(key, timeout=timeout)
        now = found.now if self._clock else None
        if found.version == self._deleted.get(key):
            return Snapshot(b"", ABSENT, None, now)
        return Snapshot(found.body, found.version, found.written if self._clock else None, now)

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        beneath = self._deleted.get(key, ABSENT)
        if expect is ABSENT:
            return self._backend.write(key, body, expect=beneath, timeout=timeout)
        if expect == beneath:  # deleted: a write over it must be refused
            expect = "no such version"
        return self._backend.write(key, body, expect=expect, timeout=timeout)

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        return self._backend.list(prefix, timeout=timeout)

    def describe(self) -> str:
        return self._backend.describe()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.store = Deletable(world.store)  # type: ignore[assignment]
    yield world
    finish(world)


def finish(world: World) -> None:
    for host in world.hosts:
        host.storage.release_all()
    world.advance(3 * TTL)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


def delete(world: World) -> None:
    assert isinstance(world.store, Deletable)
    world.store.delete()


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503 service unavailable")


def record(world: World) -> Record:
    content = read(world.store.read(KEY, timeout=1.0))
    assert isinstance(content, Record)
    return content


def fence_of(host: Host) -> int:
    return host.lock().do(lambda ctx: ctx.fence)


def rises(fences: Iterable[int]) -> bool:
    return all(earlier < later for earlier, later in pairwise(fences))


# --- Somebody who checks it ----------------------------------------------------------------------


class StaleFenceError(Exception):
    pass


class GuardedStore:
    """The resource's side, in ten lines: it keeps the largest fence and refuses smaller ones."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str]] = []
        self._largest = 0
        self._lock = threading.Lock()

    def write(self, row: str, *, fence: int) -> None:
        with self._lock:
            if fence < self._largest:
                raise StaleFenceError(f"fence {fence} is older than {self._largest}")
            self._largest = fence
            self.rows.append((fence, row))


def test_a_paused_holder_cannot_write_after_a_takeover(world: World) -> None:
    """A checkpoint must not move backwards: A pauses, B writes, A's late write is refused."""
    store, a, b, go = GuardedStore(), world.host("a"), world.host("b"), Flag()

    def pauses(ctx: Ctx) -> str:
        store.write("a 1", fence=ctx.fence)
        world.clock.wait(go)  # deaf, as a thread that the system does not run
        store.write("a 2", fence=ctx.fence)
        return "wrote"

    running = world.start(lambda: a.lock().do(pauses))
    a.storage.always("*", fail(unavailable))
    world.advance(TTL + 1)

    def writes(ctx: Ctx) -> None:
        store.write("b 1", fence=ctx.fence)
        store.write("b 2", fence=ctx.fence)

    b.lock().do(writes, timeout=0)
    go.set()
    world.advance(2 * TTL)
    with pytest.raises(StaleFenceError, match="is older than"):
        running.result()
    assert [row for _fence, row in store.rows] == ["a 1", "b 1", "b 2"]
    assert getattr(running.error, "__notes__", [""])[0].startswith('lease "reindex" was lost')


def test_a_holders_own_workers_do_not_fence_each_other(world: World) -> None:
    """A heartbeat changes the storage's version, and must not change the fence."""
    store, host = GuardedStore(), world.host()

    def body(ctx: Ctx) -> None:
        early = ctx.fence
        for number in range(10):
            ctx.wait(15)
            store.write(f"new {number}", fence=ctx.fence)
            store.write(f"old {number}", fence=early)

    running = world.start(lambda: host.lock().do(body))
    world.advance(160)
    running.result()
    assert len(store.rows) == 20


# --- Constant while held ------------------------------------------------------------------------


def test_a_fence_is_constant_while_held_whatever_happens_to_the_renewals(world: World) -> None:
    host, seen = world.host(), set[int]()
    host.storage.script(
        "write", None, None, applied_then(unavailable), fail(unavailable), None, fail(unavailable)
    )

    def body(ctx: Ctx) -> None:
        versions = set()
        for _ in range(30):
            ctx.wait(5)
            found = world.store.read(KEY, timeout=1)
            versions.add(found.version)
            content = read(found)
            assert isinstance(content, Record)
            seen.update({ctx.fence, ctx.lease.fence, content.fence, ctx.child().fence})
        assert len(versions) >= 15, "the version changes with each heartbeat"

    running = world.start(lambda: host.lock().do(body))
    world.advance(160)
    running.result()
    assert len(seen) == 1
    assert record(world).fence in seen, "the release keeps it"


def test_a_fence_is_that_of_the_write_that_landed(world: World) -> None:
    """The create was applied, its answer lost: the body gets the fence that stands there."""
    host, seen = world.host(), list[int]()
    host.storage.script("write", applied_then(unavailable))
    running = world.start(
        lambda: host.lock().do(lambda ctx: seen.extend([ctx.fence, record(world).fence]))
    )
    world.advance(1)
    running.result()
    assert seen[0] == seen[1]


def test_a_hand_over_request_and_a_break_keep_the_fence(world: World) -> None:
    host, go = world.host(), Flag()
    running = world.start(lambda: host.lock().do(lambda ctx: (world.clock.wait(go), ctx.fence)[1]))
    holder = host.lock().holder()
    assert holder is not None
    host.lock().request_handover(holder)
    assert record(world).fence == holder.fence
    world.advance(11)
    holder = host.lock().holder()
    assert holder is not None
    host.lock().break_(holder)
    assert record(world).fence == holder.fence
    world.advance(11)
    go.set()
    world.advance(1)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.fence == caught.value.value == holder.fence


# --- Rises over everything -----------------------------------------------------------------------


def test_a_fence_is_a_whole_number_that_rises_by_the_hour_and_by_the_microsecond(
    world: World,
) -> None:
    """It follows the storage's time, and is never below the one before plus one."""
    host = world.host()
    fences = [fence_of(host) for _ in range(1000)]
    assert all(type(fence) is int for fence in fences)
    assert rises(fences)
    world.advance(3600)
    assert fence_of(host) == fences[-1] + 1, "without a look, the storage's time is not known"
    assert fence_of(world.host("b")) == fences[0] + 3_600_000_000
    assert fence_of(host) < 2**63 // 1000, "it fits a signed column for 290 years of uptime"


def test_a_fence_rises_over_release_takeover_break_and_foreign_records(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    fences = [fence_of(a), fence_of(b), fence_of(a)]

    hold = a.lock().hold()
    fences.append(hold.__enter__().fence)  # a crash: nothing ends it
    a.storage.always("*", fail(unavailable))
    world.advance(TTL)
    fences.append(fence_of(b))
    a.storage.heal()
    with pytest.raises(LeaseLostError):
        hold.__exit__(None, None, None)

    def is_broken() -> None:
        with b.lock().hold() as ctx:
            fences.append(ctx.fence)
            holder = a.lock().holder()
            assert holder is not None
            a.lock().break_(holder, now=True)
            fences.append(fence_of(a))
            ctx.wait(600)

    running = world.start(is_broken)
    world.advance(11)
    with pytest.raises(LeaseLostError):
        running.result()
    fences.append(fence_of(b))

    version = world.store.read(KEY, timeout=1).version
    world.store.write(KEY, b'{"owner":"go:1:x","expires":"x"}', expect=version, timeout=1)
    world.advance(TTL)
    fences.append(fence_of(a))
    assert len(fences) == 9
    assert rises(fences)


def test_a_fence_rises_over_a_thousand_releases_and_deletions(world: World) -> None:
    """A token that begins again when the record has gone fences the wrong one."""
    host, other = world.host("a"), world.host("b")
    fences = []
    for number in range(500):
        fences.append(fence_of(host if number % 3 else other))
        if number % 2:
            delete(world)
            world.advance(0.001)  # as much as the storage's clock tells apart
    assert rises(fences)
    assert len(set(fences)) == 500


def test_without_the_storages_time_a_fence_rises_as_long_as_the_record_stands() -> None:
    """And, within one campaign, over a deletion that it has seen."""
    world = World()
    world.store = Deletable(world.store, clock=False)  # type: ignore[assignment]
    host, other = world.host("a"), world.host("b")
    fences = [fence_of(host if number % 2 else other) for number in range(100)]
    assert fences == list(range(1, 101))
    finish(world)


def test_a_fence_in_the_record_that_is_ahead_of_the_storages_time_is_exceeded(
    world: World,
) -> None:
    """A storage moved to a machine whose clock is behind, or a clock that was set back."""
    host = world.host()
    fence_of(host)
    ahead = record(world).but(fence=2**62, state=State.RELEASED)
    version = world.store.read(KEY, timeout=1).version
    world.store.write(KEY, ahead.encode(), expect=version, timeout=1)
    assert fence_of(world.host("b")) == 2**62 + 1


def test_a_lost_race_does_not_let_the_winners_fence_be_repeated(world: World) -> None:
    """Both read the same record; whoever comes second sees the winner's and goes above it."""
    a, b = world.host("a"), world.host("b")
    gate = b.storage.gate("write", when=lambda call: call.number <= 2)
    running = world.start(lambda: b.lock().do(lambda ctx: ctx.fence))
    assert gate.arrived.is_set()
    first = fence_of(a)
    gate.open()
    world.advance(POLL)
    assert running.result() > first


@pytest.mark.parametrize("seed", range(10))
def test_a_fence_rises_through_a_storm_of_losses_breaks_and_deletions(seed: int) -> None:
    world = World()
    world.store = Deletable(world.store)  # type: ignore[assignment]
    chance = random.Random(seed)
    stop = Ctx.background(world.clock)
    hosts = [world.host(name, offset=chance.uniform(-9, 9)) for name in "abc"]
    operator = world.host("operator")

    def loop(host: Host) -> None:
        def body(ctx: Ctx) -> None:
            ctx.wait(chance.choice([0.01, 1, 15, 60]))

        while not stop.wait(0.01):
            try:
                host.lock().do(body, ctx=stop)
            except Exception:  # noqa: BLE001 - losses, outages, the end
                pass

    running = [world.start(lambda host=host: loop(host)) for host in hosts]
    for _ in range(60):
        world.advance(chance.uniform(0.1, 20))
        event = chance.randrange(6)
        host = chance.choice(hosts)
        if event == 0:
            delete(world)
        elif event == 1:
            host.storage.always("*", fail(unavailable))
        elif event == 2:
            world.clock.step_wall(chance.uniform(-9999, 9999))
        elif event == 3 and (holder := operator.lock().holder()) is not None:
            operator.lock().break_(holder, now=True)
        else:
            host.storage.heal()
    for host in hosts:
        host.storage.heal()
    stop.cancel()
    world.advance(3 * TTL)
    for one in running:
        one.result()
    granted = [event for host in hosts for event in host.told(Acquired)]
    fences = sorted(event.fence for event in granted)
    assert len(fences) >= 20
    assert len(set(fences)) == len(fences), "none is handed out twice"
    for host in hosts:
        assert rises(event.fence for event in host.told(Acquired))


# --- Deletion behind the library's back ----------------------------------------------------------


def test_a_record_deleted_under_a_holder_is_a_loss_and_is_not_created_again(
    world: World,
) -> None:
    """A renewal never creates."""
    host = world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: ctx.wait(600)))
    world.advance(3)
    delete(world)
    world.advance(7.1)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.DELETED
    world.advance(2 * TTL)
    assert world.store.read(KEY, timeout=1).version is ABSENT
    assert host.lock().try_do(lambda ctx: ctx.fence).value > caught.value.fence  # type: ignore[operator]


def test_a_deletion_lets_another_in_early_and_the_fence_is_what_remains(world: World) -> None:
    """It cannot be made safe: until its next heartbeat the holder believes in its lease."""
    store, a, b, go = GuardedStore(), world.host("a"), world.host("b"), Flag()

    def body(ctx: Ctx) -> None:
        store.write("a 1", fence=ctx.fence)
        world.clock.wait(go)
        assert not ctx.cancelled, "it cannot know yet"
        store.write("a 2", fence=ctx.fence)

    running = world.start(lambda: a.lock().do(body))
    world.advance(1)
    delete(world)
    b.lock().do(lambda ctx: store.write("b 1", fence=ctx.fence), timeout=0)
    go.set()
    world.advance(0)
    with pytest.raises(StaleFenceError):
        running.result()
    assert [row for _fence, row in store.rows] == ["a 1", "b 1"]


def test_a_record_deleted_after_its_release_costs_nothing(world: World) -> None:
    host = world.host()
    before = fence_of(host)
    delete(world)
    world.advance(1)
    assert fence_of(host) > before, "also where this process thought it knew the version"
    assert host.requests() == ["read", "write", "write", "write", "read", "write", "write"]


def test_a_record_deleted_in_mid_campaign_frees_the_name(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    hold = a.lock().hold()
    first = hold.__enter__().fence
    running = world.start(lambda: b.lock().do(lambda ctx: ctx.fence))
    world.advance(5)
    delete(world)
    world.advance(POLL)
    assert running.result() > first
    world.advance(5)
    with pytest.raises(LeaseLostError):
        hold.__exit__(None, None, None)


def test_a_campaign_that_saw_a_fence_goes_above_it_after_a_deletion_without_any_clock() -> None:
    """What it has seen in the record it remembers, for as long as it campaigns."""
    world = World()
    world.store = Deletable(world.store, clock=False)  # type: ignore[assignment]
    a, b = world.host("a"), world.host("b")
    for _ in range(7):
        fence_of(a)
    hold = a.lock().hold()
    assert hold.__enter__().fence == 8
    running = world.start(lambda: b.lock().do(lambda ctx: ctx.fence))
    world.advance(5)
    world.store.delete()  # type: ignore[attr-defined]
    world.advance(POLL)
    assert running.result() == 9
    world.advance(5)
    with pytest.raises(LeaseLostError):
        hold.__exit__(None, None, None)
    finish(world)


def test_the_uncertainty_of_the_storages_clock_is_counted_upwards(world: World) -> None:
    """The latest that it may be: an earlier guess might have been handed out before."""

    class Blurred(Deletable):
        def read(self, key: str, *, timeout: float) -> Snapshot:
            found = super().read(key, timeout=timeout)
            now = world.clock.monotonic()
            return Snapshot(found.body, found.version, None, Interval(now - 5, now + 5))

    world.store = Blurred(world.store)  # type: ignore[assignment]
    assert fence_of(world.host()) == int((world.clock.monotonic() + 5) * 1e6)


# --- Told with it ------------------------------------------------------------------------------


def test_the_fence_stands_everywhere_a_person_or_program_may_look(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    with a.lock().hold() as ctx:
        holder = b.lock().holder()
        assert holder is not None
        result = b.lock().try_do(lambda ctx: pytest.fail("ran"))
        assert result.holder is not None
        (acquired,) = a.told(Acquired)
        assert {
            ctx.fence, ctx.lease.fence, holder.fence, result.holder.fence, acquired.fence,
            record(world).fence,
        } == {ctx.fence}  # fmt: skip
        assert f"fence {ctx.fence}" in str(holder)
        assert f"fence {ctx.fence}" in acquired.message
        assert f"fence={ctx.fence}" in repr(ctx.lease)
