"""Clocks that disagree, run apart, are set or frozen: nobody enters early or waits for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from freezegun import freeze_time

from kit import Host, Running, World
from tako_sync.abc import Absent, Interval, LeaseBackend, Snapshot, Version
from tako_sync.backends.memory import MemoryLease
from tako_sync.ctx import Ctx
from tako_sync.errors import BackendUnavailableError, LeaseLostError, LossReason
from tako_sync.events import Acquired, Lost, Renewed
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.record import Identity, Record, State, read
from tako_sync.runtime import Runtime
from tako_sync.testing.faults import FaultyBackend, fail

KEY = "run-shop-test-reindex"
TTL, MARGIN, POLL = 30.0, 3.0, 2.5
HOUR = 3600.0
YEARS = 10 * 365 * 24 * HOUR


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    finish(world)


def finish(world: World) -> None:
    for host in world.hosts:
        host.storage.release_all()
    world.advance(3 * TTL)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


class Around(LeaseBackend):
    """A storage that says something else about time than the one it wraps."""

    prompt = True

    def __init__(self, backend: LeaseBackend) -> None:
        self.backend = backend

    def moments(
        self, written: Interval | None, now: Interval | None
    ) -> tuple[Interval | None, Interval | None]:
        raise NotImplementedError

    def read(self, key: str, *, timeout: float) -> Snapshot:
        found = self.backend.read(key, timeout=timeout)
        written, now = self.moments(found.written, found.now)
        return Snapshot(found.body, found.version, written, now)

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        return self.backend.write(key, body, expect=expect, timeout=timeout)

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        return self.backend.list(prefix, timeout=timeout)

    def describe(self) -> str:
        return self.backend.describe()


class Timeless(Around):
    """A storage without a clock."""

    def moments(
        self, written: Interval | None, now: Interval | None
    ) -> tuple[Interval | None, Interval | None]:
        return None, None


class Blurred(Around):
    """A storage whose clock is off by up to so many seconds, a part this way, a part that way."""

    def __init__(self, backend: LeaseBackend, width: float, wrong_by: tuple[float, float]) -> None:
        super().__init__(backend)
        self._half = width / 2
        self._wrong_by = wrong_by

    def moments(
        self, written: Interval | None, now: Interval | None
    ) -> tuple[Interval | None, Interval | None]:
        blurred = []
        for moment, wrong in zip((written, now), self._wrong_by):
            shift = wrong * self._half  # the true moment stays inside the interval
            blurred.append(
                moment
                and Interval(
                    moment.earliest + shift - self._half, moment.latest + shift + self._half
                )
            )
        return blurred[0], blurred[1]


class Work:
    """A body that listens to its ctx, watched by the meter."""

    def __init__(self, world: World) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []
        self._world = world

    def __call__(self, ctx: Ctx) -> None:
        with self._world.meter.running(ctx):
            self.began.append(self._world.clock.monotonic())
            ctx.wait(10**6)
            self.ended.append(self._world.clock.monotonic())


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503 service unavailable")


def crash(host: Host) -> None:
    """Cut the host off: as far as anybody else can tell, it has died."""
    host.storage.always("*", fail(unavailable))


def a_record(*, ttl: float = TTL, margin: float = MARGIN, **changes: Any) -> Record:
    record = Record(
        identity=Identity("shop", "test", "reindex"),
        owner="elsewhere:7:gone",
        write="theirs",
        state=State.HELD,
        ttl=ttl,
        margin=margin,
        fence=7,
        acquired="2026-01-01T00:00:00Z",
        expires="2026-01-01T00:00:30Z",
    )
    return record.but(**changes)


def put(world: World, record: Record) -> None:
    version = world.store.read(KEY, timeout=1.0).version
    world.store.write(KEY, record.encode(), expect=version, timeout=1.0)


def stored(world: World) -> Record:
    content = read(world.store.read(KEY, timeout=1.0))
    assert isinstance(content, Record)
    return content


def a_hold_and_a_rival(
    world: World, a: Host, b: Host
) -> tuple[Work, Work, Running[None], Running[None]]:
    mine, theirs = Work(world), Work(world)
    holding = world.start(lambda: a.lock().do(mine))
    stop = Ctx.background(world.clock)

    def rival() -> None:
        b.lock().do(lambda ctx: (theirs.began.append(world.clock.monotonic()), stop.cancel()))

    return mine, theirs, holding, world.start(rival)


def lost(world: World, running: Running[None]) -> LeaseLostError:
    world.advance(3 * TTL)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    return caught.value


# --- Skew --------------------------------------------------------------------------------------

SKEWS = [45.0, -45.0, 0.7, HOUR, -HOUR, YEARS, -YEARS]


@pytest.mark.parametrize("timeless", [False, True], ids=["storage clock", "observation"])
@pytest.mark.parametrize("skew", SKEWS)
def test_at_any_skew_a_live_lease_is_not_stolen_and_a_dead_one_is_taken_over(
    skew: float, timeless: bool
) -> None:
    """No host's clock is compared with another's: neither the time of day nor the other one."""
    world = World()
    if timeless:
        world.store = Timeless(world.store)  # type: ignore[assignment]
    a = world.host("a")
    b = world.host("b", wall_offset=skew, offset=skew)
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(10 * TTL)
    assert not theirs.began, "it never enters while the other renews"
    assert not mine.ended
    crash(a)
    died = world.clock.monotonic()
    world.advance(TTL + MARGIN + POLL)
    rival.result()
    (entered,) = theirs.began
    assert mine.ended[0] < entered <= died + TTL + (MARGIN if timeless else 0) + POLL
    assert lost(world, holding).reason is LossReason.UNREACHABLE
    finish(world)


@pytest.mark.parametrize("timeless", [False, True], ids=["storage clock", "observation"])
@pytest.mark.parametrize(("slow", "fast"), [(0.9995, 1.0005), (0.96, 1.04), (1.04, 0.96)])
def test_clocks_that_run_apart_within_the_margin_do_not_overlap(
    slow: float, fast: float, timeless: bool
) -> None:
    """The margin of a tenth of the ttl covers far more than NTP's two times 0.05 %."""
    world = World()
    if timeless:
        world.store = Timeless(world.store)  # type: ignore[assignment]
    a, b = world.host("a", rate=slow), world.host("b", rate=fast)
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(5 * TTL)
    assert not theirs.began
    crash(a)
    died = world.clock.monotonic()
    world.advance(1.05 * (TTL + MARGIN + POLL))
    (entered,) = theirs.began
    assert mine.ended[0] < entered
    assert entered <= died + 1.05 * (TTL + MARGIN + POLL)
    rival.result()
    lost(world, holding)
    finish(world)


def test_what_the_writer_believed_about_time_decides_nothing(world: World) -> None:
    """``expires`` is for people: neither an old one frees the lease nor a far one keeps it."""
    host = world.host()
    put(world, a_record(acquired="1970-01-01T00:00:00Z", expires="1970-01-01T00:00:30Z"))
    assert not host.lock().try_do(lambda ctx: pytest.fail("ran"))
    world.advance(TTL - 0.01)
    assert not host.lock().try_do(lambda ctx: pytest.fail("ran"))
    put(world, a_record(acquired="2999-01-01T00:00:00Z", expires="2999-01-01T00:00:30Z"))
    world.advance(TTL)
    assert host.lock().try_do(lambda ctx: "in") == (True, "in")


@pytest.mark.parametrize("text", ["", "soon", "2026-13-45T99:00:00Z", "NaN", "2026-01-01"])
def test_a_time_that_nobody_can_read_decides_nothing_either(world: World, text: str) -> None:
    host = world.host()
    put(world, a_record(acquired=text, expires=text))
    holder = host.lock().holder()
    assert holder is not None
    assert holder.left == TTL
    world.advance(TTL)
    assert host.lock().try_do(lambda ctx: "in") == (True, "in")


# --- The time of day is set ----------------------------------------------------------------------


@pytest.mark.parametrize("step", [HOUR, -HOUR, 13 * HOUR, -YEARS])
def test_setting_the_time_of_day_during_a_hold_neither_loses_nor_prolongs_it(
    world: World, step: float
) -> None:
    a, b = world.host("a"), world.host("b")
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(45)
    world.clock.step_wall(step)
    assert not mine.ended
    world.advance(3 * TTL)
    assert not mine.ended, "no false loss"
    assert not theirs.began, "no early takeover, whatever the record says of its expiry"
    world.clock.step_wall(-2 * step)
    world.advance(15)
    assert not mine.ended
    assert not theirs.began
    assert not a.told(Lost)
    crash(a)
    world.clock.step_wall(step)
    died = world.clock.monotonic()
    world.advance(TTL + POLL)
    (entered,) = theirs.began
    assert entered <= died + TTL + POLL, "nor is the dead holder immortal"
    rival.result()
    lost(world, holding)


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_setting_the_time_of_day_during_a_campaign_changes_no_pause_and_no_timeout(
    world: World, step: float
) -> None:
    put(world, a_record())
    host = world.host()
    begun = world.clock.monotonic()
    first = world.start(lambda: host.lock().do(lambda ctx: world.clock.monotonic() - begun))
    second = world.start(lambda: host.lock("other").do(lambda ctx: "in", timeout=10))
    world.advance(10)
    world.clock.step_wall(step)
    world.advance(10)
    world.clock.step_wall(-step)
    assert not first.done
    world.advance(13)
    assert TTL <= first.result() <= TTL + 2.0
    assert second.result() == "in"


def test_after_the_time_of_day_was_set_the_record_shows_the_new_one(world: World) -> None:
    """For people it should be right, and it is written anew at each heartbeat."""
    host, go = world.host(), Flag()
    running = world.start(lambda: host.lock().do(lambda ctx: world.clock.wait(go)))
    world.clock.step_wall(HOUR)
    world.advance(10)
    expires = datetime.fromisoformat(stored(world).expires.replace("Z", "+00:00"))
    assert abs((expires - world.clock.wall()).total_seconds() - TTL) < 1
    go.set()
    world.advance(0)
    running.result()


# --- A record that is long dead ------------------------------------------------------------------


@pytest.mark.parametrize("call", ["try_do", "do", "do with no time"])
def test_a_newcomer_takes_over_a_long_dead_lease_at_once(world: World, call: str) -> None:
    """The storage's clock knows its age: nobody need watch it for a ttl."""
    put(world, a_record())
    world.advance(600)
    host = world.host()
    begun = world.clock.monotonic()
    if call == "try_do":
        assert host.lock().try_do(lambda ctx: "in") == (True, "in")
    else:
        timeout = 0 if call == "do with no time" else None
        assert host.lock().do(lambda ctx: "in", timeout=timeout) == "in"
    assert world.clock.monotonic() == begun
    assert host.requests() == ["read", "write", "write"]
    (acquired,) = host.told(Acquired)
    assert acquired.how == "expired"


def test_a_lease_is_free_at_the_very_instant_of_its_ttl_and_not_before(world: World) -> None:
    put(world, a_record(ttl=10.0, margin=1.0))
    host = world.host()
    world.advance(9.999)
    assert not host.lock().try_do(lambda ctx: pytest.fail("ran"))
    world.advance(0.001)
    assert host.lock().try_do(lambda ctx: "in") == (True, "in")


# --- A storage without a clock -------------------------------------------------------------------


@pytest.fixture
def timeless() -> Iterator[World]:
    world = World()
    world.store = Timeless(world.store)  # type: ignore[assignment]
    yield world
    finish(world)


@pytest.mark.parametrize(("ttl", "margin"), [(30.0, 3.0), (10.0, 1.0), (60.0, 20.0), (5.0, 0.0)])
@pytest.mark.parametrize("observers_ttl", [2.0, 30.0, 300.0])
def test_observation_waits_for_the_records_ttl_and_margin_not_for_its_own(
    timeless: World, ttl: float, margin: float, observers_ttl: float
) -> None:
    """An observer with a shorter ttl of its own must not take over from a longer one early."""
    put(timeless, a_record(ttl=ttl, margin=margin))
    timeless.advance(1000)  # what went before counts for nothing: nobody has seen it
    host = timeless.host(policy=LeasePolicy(ttl=observers_ttl))
    begun = timeless.clock.monotonic()
    running = timeless.start(lambda: host.lock().do(lambda ctx: timeless.clock.monotonic() - begun))
    timeless.advance(ttl + margin - 0.001)
    assert not running.done
    timeless.advance(2.0 + 0.001)
    assert ttl + margin <= running.result() <= ttl + margin + 2.0


def test_observation_begins_anew_at_each_change(timeless: World) -> None:
    put(timeless, a_record())
    host = timeless.host()
    begun = timeless.clock.monotonic()
    running = timeless.start(lambda: host.lock().do(lambda ctx: timeless.clock.monotonic() - begun))
    for number in range(4):
        timeless.advance(20)
        put(timeless, a_record(write=f"beat {number}"))
    timeless.advance(TTL + MARGIN - 0.1)
    assert not running.done
    timeless.advance(POLL + 0.6)
    assert 80 + TTL + MARGIN <= running.result() <= 80 + POLL + TTL + MARGIN + 2.0


def test_one_attempt_cannot_observe_but_a_process_that_looks_again_can(timeless: World) -> None:
    """try_do of a new process cannot take over there; the docs say so."""
    put(timeless, a_record())
    timeless.advance(1000)
    host = timeless.host()
    result = host.lock().try_do(lambda ctx: pytest.fail("ran"))
    assert result.holder is not None
    assert result.holder.left == TTL + MARGIN
    timeless.advance(20)
    holder = host.lock().holder()
    assert holder is not None
    assert holder.left == TTL + MARGIN - 20
    timeless.advance(TTL + MARGIN - 20)
    assert host.lock().holder() is None
    assert host.lock().try_do(lambda ctx: "in") == (True, "in")
    newcomer = timeless.host("newcomer")
    assert newcomer.lock().holder() is None, "released: that needs no clock"


def test_observation_counts_from_the_answer_and_not_from_the_question(timeless: World) -> None:
    """A look sent before the record was written may be answered after it."""
    host = timeless.host(prompt=False)
    gate = host.storage.gate("read", when=lambda call: call.number == 1)
    begun = timeless.clock.monotonic()
    running = timeless.start(lambda: host.lock().do(lambda ctx: timeless.clock.monotonic() - begun))
    timeless.advance(3)
    put(timeless, a_record())
    timeless.advance(1)
    gate.open()
    timeless.advance(TTL + MARGIN + 2.0)
    assert running.result() >= 4 + TTL + MARGIN


def test_a_holder_on_a_storage_without_a_clock_is_not_overlapped(timeless: World) -> None:
    a, b = timeless.host("a"), timeless.host("b")
    mine, theirs, holding, rival = a_hold_and_a_rival(timeless, a, b)
    timeless.advance(200)
    assert not theirs.began
    crash(a)
    died = timeless.clock.monotonic()
    timeless.advance(TTL + MARGIN + 2 * POLL)
    (entered,) = theirs.began
    assert mine.ended[0] < entered <= died + TTL + MARGIN + POLL
    rival.result()
    lost(timeless, holding)


# --- A storage whose clock is uncertain ----------------------------------------------------------

WRONG = [(-1.0, -1.0), (1.0, 1.0), (-1.0, 1.0), (1.0, -1.0), (0.0, 0.0)]


@pytest.mark.parametrize("wrong_by", WRONG, ids=str)
@pytest.mark.parametrize("width", [0.5, 2.0])
def test_a_takeover_comes_within_the_ttl_the_two_widths_and_a_poll_and_never_early(
    width: float, wrong_by: tuple[float, float]
) -> None:
    world = World()
    world.store = Blurred(world.store, width, wrong_by)  # type: ignore[assignment]
    a, b = world.host("a"), world.host("b")
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(100)
    assert not theirs.began
    last = max(call.at for call in a.storage.calls)
    crash(a)
    world.advance(TTL + 2 * width + POLL)
    (entered,) = theirs.began
    assert mine.ended[0] < entered
    assert last + TTL <= entered <= last + TTL + 2 * width + POLL
    rival.result()
    lost(world, holding)
    finish(world)


def test_a_storage_that_states_its_skew_has_holders_give_up_that_much_earlier() -> None:
    world = World(LeasePolicy(ttl=60))
    world.store.clock_skew = 4.0
    host = world.host()
    host.lock().do(lambda ctx: None)
    record = stored(world)
    assert record.margin == pytest.approx(2 * 4.0 + 0.001 * 60)
    seen: list[float] = []
    host.lock().do(lambda ctx: seen.append(ctx.remaining()))
    assert seen == [pytest.approx(60 - record.margin)]
    finish(world)


# --- freezegun ---------------------------------------------------------------------------------

WHEN = ["1999-12-31", "2026-01-01", "2099-01-01"]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("tick", [False, True])
def test_a_frozen_time_around_inside_and_across_a_hold_changes_nothing(
    world: World, when: str, tick: bool
) -> None:
    """A user's freeze_time around a view test neither loses nor prolongs a lease."""
    a, b = world.host("a"), world.host("b")
    mine = Work(world)
    with freeze_time(when, tick=tick) as frozen:  # it begins under one frozen time
        running = world.start(lambda: a.lock().do(mine))
        world.advance(20)
        frozen.tick(timedelta(days=400))
        world.advance(20)
        assert not b.lock().try_do(lambda ctx: pytest.fail("ran"))
    world.advance(40)
    with freeze_time("2012-06-01", tick=tick):  # and goes on through another
        world.advance(40)
        assert not b.lock().try_do(lambda ctx: pytest.fail("ran"))
        assert not mine.ended
        crash(a)
    died = world.clock.monotonic()
    with freeze_time(when, tick=tick):
        world.advance(TTL)
        assert died < mine.ended[0] <= died + 27.0, "and is not prolonged"
        assert b.lock().try_do(lambda ctx: "in") == (True, "in")
    lost(world, running)
    assert len(a.told(Renewed)) >= 11


def test_a_body_that_freezes_time_keeps_its_lease_and_its_pauses(world: World) -> None:
    host = world.host()

    def body(ctx: Ctx) -> list[bool]:
        answers = []
        with freeze_time("1999-12-31") as frozen:
            for _ in range(10):
                answers.append(ctx.wait(10))
                frozen.move_to("2031-01-01")
                ctx.check()
                ctx.ensure(10)
        return answers

    begun = world.clock.monotonic()
    running = world.start(lambda: host.lock().do(body))
    world.advance(101)
    assert running.result() == [False] * 10
    assert world.clock.monotonic() - begun == 101
    assert not host.told(Lost)


def test_a_frozen_time_does_not_stand_in_a_record(world: World) -> None:
    """People read it; a date from a test's frame would mislead them."""
    host = world.host()
    with freeze_time("1999-12-31"):
        host.lock().do(lambda ctx: None)
    assert stored(world).acquired == "2026-01-01T00:00:00Z", "the clock's own"


@pytest.fixture
def real() -> Iterator[tuple[Runtime, FaultyBackend]]:
    """The system's own clock, with a ttl that is short and still has room on a busy machine."""
    storage = FaultyBackend(MemoryLease(), prompt=True)
    yield Runtime(storage, app="shop", env="test", policy=LeasePolicy(ttl=1.2)), storage
    storage.release_all()


@pytest.mark.parametrize("place", ["around", "inside", "across"])
def test_on_the_systems_clock_a_frozen_time_neither_loses_a_hold_nor_stops_its_heartbeat(
    real: tuple[Runtime, FaultyBackend], place: str
) -> None:
    runtime, storage = real
    lock = Lock("reindex").bound_to(runtime)

    def hold() -> None:
        with lock.hold() as ctx:
            assert ctx.wait(0.7) is False
            if place == "across":
                freezer.start()
            assert ctx.wait(0.7) is False, "longer than the ttl in all, so it was renewed"
            ctx.check()
            assert 0 < ctx.remaining() <= 1.08
            assert not lock.try_do(lambda ctx: pytest.fail("ran"))
        assert ctx.cancelled

    freezer: Any = freeze_time("1999-12-31")
    if place == "across":
        try:
            hold()
        finally:
            freezer.stop()
    elif place == "around":
        with freezer:
            hold()
    else:
        with lock.hold() as ctx, freezer:
            assert ctx.wait(1.4) is False
            ctx.check()
    renewals = [call for call in storage.calls if call.document.get("state") == "held"]
    assert len(renewals) >= 3, "the grant, and two renewals at least"
    assert storage.calls[-1].document["state"] == "released"


def test_on_the_systems_clock_a_frozen_time_does_not_prolong_a_hold(
    real: tuple[Runtime, FaultyBackend],
) -> None:
    runtime, storage = real
    with freeze_time("1999-12-31"):
        with pytest.raises(LeaseLostError) as caught:
            hold_through_an_outage(Lock("reindex").bound_to(runtime), storage)
        assert caught.value.reason is LossReason.UNREACHABLE
        storage.heal()
    assert Lock("reindex").bound_to(runtime).do(lambda ctx: "again", timeout=10) == "again"


def hold_through_an_outage(lock: Lock, storage: FaultyBackend) -> None:
    with lock.hold() as ctx:
        storage.always("*", fail(unavailable))
        assert ctx.done.wait(20) is True, "woken at the deadline"


def test_the_systems_time_of_day_is_in_utc_in_the_record(
    real: tuple[Runtime, FaultyBackend],
) -> None:
    runtime, _storage = real
    lock = Lock("reindex").bound_to(runtime)
    before = datetime.now(timezone.utc)
    with lock.hold():
        holder = lock.holder()
    assert holder is not None
    assert holder.since is not None
    assert before <= holder.since <= datetime.now(timezone.utc)


def test_every_way_of_asking_gives_the_same_answer_at_the_same_instant(world: World) -> None:
    """The deadline is one number: cancelled, done, remaining, wait and check agree on it."""
    host = world.host()
    seen: list[tuple[bool, bool, bool, bool]] = []

    def ask(ctx: Ctx) -> tuple[bool, bool, bool, bool]:
        return ctx.cancelled, ctx.done.is_set(), ctx.remaining() == 0.0, ctx.lease.end is not None

    def body(ctx: Ctx) -> None:
        crash(host)
        for pause in (26.9, 0.0999, 0.0002):
            world.clock.wait(Flag(), pause)
            seen.append(ask(ctx))

    running = world.start(lambda: host.lock().do(body))
    world.advance(3 * TTL)
    with pytest.raises(LeaseLostError):
        running.result()
    assert seen == [(False,) * 4, (False,) * 4, (True,) * 4]
