"""Threads of one process: one Lock object for many, nested calls, and holds that are forgotten."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from kit import Running, World
from tako_sync.backends.memory import MemoryLease
from tako_sync.ctx import Ctx, current_ctx
from tako_sync.errors import (
    CampaignTimeoutError,
    LeaseLostError,
    LossReason,
    NotReentrantError,
    UsageError,
)
from tako_sync.events import Acquired, Lost
from tako_sync.flag import Flag
from tako_sync.line import Line
from tako_sync.lock import Hold, Lock
from tako_sync.policy import LeasePolicy
from tako_sync.record import Record, State, read
from tako_sync.runtime import Runtime
from tako_sync.testing.faults import Call, fail
from tako_sync.testing.overlap import OverlapMeter

KEY = "run-shop-test-reindex"
TTL = 30.0
NEVER = 40.0


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(2 * TTL)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


def stored(world: World) -> Record:
    found = read(world.store.read(KEY, timeout=5))
    assert isinstance(found, Record)
    return found


# --- 29: one Lock object in many threads ---------------------------------------------------


@pytest.mark.parametrize("ending", ["returns", "raises"])
@pytest.mark.parametrize("way", ["do", "hold", "try_do"])
def test_an_expired_hold_of_one_thread_ends_without_touching_the_next_hold_of_the_same_lock(
    world: World, way: str, ending: str
) -> None:
    host = world.host()
    relock = host.lock()
    may_end, seen = {"a": Flag(), "b": Flag()}, dict[str, Ctx]()

    def body(name: str, ctx: Ctx) -> str:
        seen[name] = ctx
        with world.meter.running(ctx):
            world.clock.wait(may_end[name])
        if ending == "raises" and name == "a":
            raise ValueError("a's own")
        return name

    def run(name: str) -> Any:
        if way == "hold" and name == "a":
            with relock.hold() as ctx:
                return body(name, ctx)
        if way == "try_do" and name == "a":
            return relock.try_do(partial(body, name))
        return relock.do(partial(body, name))

    a = world.start(partial(run, "a"), "a")
    owner_a = seen["a"].lease.owner

    def of_a(call: Call) -> bool:
        return call.document.get("owner") == owner_a and call.document.get("state") == "held"

    host.storage.always("write", fail(ConnectionResetError("cut")), when=of_a)
    b = world.start(partial(run, "b"), "b")
    assert "b" not in seen, "a has it"
    world.advance(TTL + 3)
    assert seen["a"].cancelled and not seen["b"].cancelled
    before = world.store.read(KEY, timeout=5)
    held = stored(world)
    assert held.owner == seen["b"].lease.owner

    may_end["a"].set()
    world.advance(0)
    with pytest.raises(ValueError if ending == "raises" else LeaseLostError) as caught:
        a.result()
    if ending == "returns":
        assert caught.value.value == ("a" if way != "hold" else None)  # type: ignore[attr-defined]
    assert world.store.read(KEY, timeout=5).body == before.body, "byte for byte"
    assert world.store.read(KEY, timeout=5).version == before.version

    # And b's own bookkeeping is b's: renewed, not free for a third thread, released at its end.
    world.advance(TTL)
    assert not seen["b"].cancelled
    assert not relock.try_do(lambda ctx: 1)
    may_end["b"].set()
    world.advance(0)
    assert b.result() == "b"
    assert stored(world).state is State.RELEASED
    assert [event.fence for event in host.told(Lost)] == [seen["a"].fence]


def test_thirty_two_threads_hammering_one_lock_never_run_two_bodies_at_once() -> None:
    policy = LeasePolicy(ttl=20, poll=0.05)
    runtime = Runtime(MemoryLease(), app="shop", env="test", policy=policy)
    relock, meter = Lock("reindex").bound_to(runtime), OverlapMeter()
    inside, ran, most = [], Counter[int](), [0]

    def body(number: int, ctx: Ctx) -> int:
        with meter.running(ctx):
            inside.append(number)
            most[0] = max(most[0], len(inside))
            ran[number] += 1
            ctx.wait(0.0002)
            inside.remove(number)
        return number

    def work(number: int) -> list[int]:
        return [relock.do(partial(body, number)) for _ in range(25)]

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(work, range(32), timeout=NEVER))
    assert answers == [[number] * 25 for number in range(32)]
    assert ran == Counter(dict.fromkeys(range(32), 25))
    assert most == [1]
    meter.check()
    assert len(meter.fences) == 32 * 25


def test_thirty_two_threads_trying_at_once_are_either_in_or_told_who_is() -> None:
    runtime = Runtime(MemoryLease(), app="shop", env="test")
    relock, meter = Lock("reindex").bound_to(runtime), OverlapMeter()
    owners = set[str]()

    def body(ctx: Ctx) -> str:
        with meter.running(ctx):
            owners.add(ctx.lease.owner)
            ctx.wait(0.0005)
        return ctx.lease.owner

    def work(number: int) -> int:
        ran = 0
        for _ in range(25):
            result = relock.try_do(body)
            if result:
                ran += 1
                assert result.value in owners and result.holder is None
            else:
                assert result.value is None and result.holder is not None
        return ran

    with ThreadPoolExecutor(32) as pool:
        ran = sum(pool.map(work, range(32), timeout=NEVER))
    assert ran == len(meter.fences) == len(owners) >= 1
    meter.check()


# --- 30: nested --------------------------------------------------------------------------------


def nest_in_do(lock: Lock) -> object:
    return lock.do(lambda ctx: "inner")


def nest_in_hold(lock: Lock) -> object:
    with lock.hold():
        return "inner"


def nest_in_guard(lock: Lock) -> object:
    return lock.guard(lambda: "inner")()


def nest_with_timeout(lock: Lock) -> object:
    return lock.do(lambda ctx: "inner", timeout=10)


@pytest.mark.parametrize("inner", [nest_in_do, nest_in_hold, nest_in_guard, nest_with_timeout])
@pytest.mark.parametrize("same_object", [True, False])
def test_to_wait_for_ones_own_lease_is_refused_at_once(
    world: World, inner: Callable[[Lock], object], same_object: bool
) -> None:
    host = world.host()
    outer = host.lock()

    def body(ctx: Ctx) -> int:
        before = world.clock.monotonic(), len(host.requests())
        with pytest.raises(NotReentrantError, match="wait for itself"):
            inner(outer if same_object else host.lock())
        assert (world.clock.monotonic(), len(host.requests())) == before
        assert not ctx.cancelled, "the outer hold has taken no harm"
        return 1

    running = world.start(lambda: outer.do(body))
    assert running.result() == 1
    assert stored(world).state is State.RELEASED


def test_a_block_within_a_block_and_deep_in_calls_is_refused_as_well(world: World) -> None:
    host = world.host()
    relock, other = host.lock(), host.lock("other")

    def run() -> str:
        with relock.hold(), other.hold():
            with pytest.raises(NotReentrantError):
                other.do(lambda ctx: "never")
            with pytest.raises(NotReentrantError):
                other.do(lambda ctx: "never", ctx=current_ctx().child())
            with pytest.raises(NotReentrantError):
                relock.do(lambda ctx: "never")
        return relock.do(lambda ctx: other.do(lambda inner: "another name is no matter"))

    assert world.start(run).result() == "another name is no matter"


def test_try_do_within_ones_own_hold_is_busy_and_names_oneself(world: World) -> None:
    host = world.host()

    def body(ctx: Ctx) -> list[object]:
        result = host.lock().try_do(lambda ctx: "never")
        assert result.holder is not None
        return [result.ran, result.holder.owner == ctx.lease.owner]

    assert world.start(lambda: host.lock().do(body)).result() == [False, True]


@pytest.mark.parametrize("carried", [True, False])
def test_a_body_that_joins_a_thread_which_wants_its_lease(world: World, carried: bool) -> None:
    """Where the ctx was carried into the thread, it is refused; else it is like anyone else."""
    host = world.host()

    def body(ctx: Ctx) -> BaseException | None:
        fn: Callable[[], object] = partial(host.lock().do, lambda inner: "never", timeout=5)
        inner = Running(ctx.wrap(fn) if carried else fn, "inner")
        task = world.clock.spawn(inner._enter, "inner")
        task.join()
        assert not ctx.cancelled
        return inner.error

    running = world.start(lambda: host.lock().do(body))
    world.advance(6)
    error = running.result()
    if carried:
        assert isinstance(error, NotReentrantError)
    else:
        assert isinstance(error, CampaignTimeoutError)
        assert error.holder is not None, "and it names who it waited for"


def test_after_a_loss_within_its_body_the_same_thread_may_acquire_anew(world: World) -> None:
    """The lost hold is nobody's any more: to wait for it would not be to wait for oneself."""
    host, operator = world.host("a"), world.host("b")
    told: list[int] = []

    def body(ctx: Ctx) -> str:
        shown = operator.lock().holder()
        assert shown is not None
        operator.lock().break_(shown, now=True)
        ctx.wait(11)
        assert ctx.cancelled
        told.append(host.lock().do(lambda inner: inner.fence))
        told.append(ctx.fence)
        return "ended"

    running = world.start(lambda: host.lock().do(body))
    world.advance(20)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.BROKEN
    assert told[0] > told[1]


# --- Holds that are forgotten ------------------------------------------------------------------


def test_a_block_that_was_never_entered_asks_nothing_of_anybody(world: World) -> None:
    host = world.host()
    held = [host.lock().hold() for _ in range(100)]
    del held
    gc.collect()
    world.advance(TTL)
    assert host.requests() == []


def test_a_block_that_is_dropped_without_an_exit_is_freed_and_not_renewed(world: World) -> None:
    host = world.host()
    leaked = [host.lock(f"name-{number}").hold() for number in range(10)]

    def enter() -> None:
        for hold in leaked:
            hold.__enter__()

    world.start(enter).result()
    world.advance(TTL)
    assert host.storage.count("write") > 20, "while somebody has them, they are renewed"
    leaked.clear()
    gc.collect()
    world.advance(0)
    writes = host.storage.count("write")
    world.advance(3 * TTL)
    assert host.storage.count("write") == writes
    for number in range(10):
        assert host.lock(f"name-{number}").holder() is None


def test_a_block_whose_making_was_interrupted_is_dropped_without_a_word() -> None:
    block = Hold.__new__(Hold)  # and Ctrl-C strikes at the first step of __init__
    del block
    gc.collect()


def test_a_block_is_used_once_by_one_thread(world: World) -> None:
    host = world.host()
    block = host.lock().hold()
    errors: list[str] = []

    def enter() -> None:
        try:
            with block:
                world.clock.wait(Flag(), 1)
        except UsageError as error:
            errors.append(str(error))

    threads = [world.start(enter, f"thread {number}") for number in range(4)]
    world.advance(2)
    for thread in threads:
        thread.result()
    assert len(errors) == 3
    assert len(host.told(Acquired)) == 1
    assert host.lock().holder() is None


# --- Bodies that start threads -------------------------------------------------------------------


def test_threads_of_a_body_see_its_ctx_and_its_end(world: World) -> None:
    host = world.host()
    seen: list[tuple[int, bool]] = []
    ended: list[bool] = []

    def work() -> None:
        ctx = current_ctx()
        seen.append((ctx.fence, ctx.cancelled))
        ended.append(ctx.wait(3600))

    def body(ctx: Ctx) -> int:
        for number in range(5):
            world.clock.spawn(ctx.wrap(work), f"helper {number}")
        world.clock.wait(Flag(), 2)
        return ctx.fence

    running = world.start(lambda: host.lock().do(body))
    world.advance(1)
    assert ended == []
    world.advance(2)
    fence = running.result()
    assert seen == [(fence, False)] * 5
    assert ended == [True] * 5, "the hold is over, so nobody works on under it"
    assert host.lock().holder() is None


def test_threads_of_a_body_are_cancelled_by_a_loss_before_another_gets_in(world: World) -> None:
    host, other = world.host("a"), world.host("b")
    order: list[str] = []

    def work() -> None:
        current_ctx().done.wait()
        order.append("helper cancelled")

    def body(ctx: Ctx) -> None:
        with world.meter.running(ctx):
            world.clock.spawn(ctx.wrap(work), "helper")
            world.clock.wait(Flag(), 3 * TTL)

    def next_body(ctx: Ctx) -> None:
        order.append("next")
        with world.meter.running(ctx):
            pass

    running = world.start(lambda: host.lock().do(body))
    host.storage.always("*", fail(ConnectionResetError("cut")))
    following = world.start(lambda: other.lock().do(next_body))
    world.advance(3 * TTL + 1)
    assert order == ["helper cancelled", "next"]
    following.result()
    with pytest.raises(LeaseLostError):
        running.result()


def test_the_threads_of_a_pool_do_not_keep_the_ctx_of_the_call_before(world: World) -> None:
    host = world.host()
    with ThreadPoolExecutor(1) as pool:

        def body(ctx: Ctx) -> int:
            return pool.submit(ctx.wrap(lambda: current_ctx().fence)).result(NEVER)

        assert world.start(lambda: host.lock().do(body)).result() > 0
        with pytest.raises(UsageError, match="no current ctx"):
            pool.submit(current_ctx).result(NEVER)


# --- The line of local waiters ------------------------------------------------------------------


def test_an_interrupt_in_the_moment_of_leaving_the_line_does_not_stop_those_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, kept by whoever handles it, keeps the frame: nobody else makes room then."""
    host = world.host()
    leave, struck = Line.leave, list[bool]()

    def strike_first(self: Line, turn: Flag) -> None:
        if not struck:
            struck.append(True)
            raise KeyboardInterrupt
        leave(self, turn)

    monkeypatch.setattr(Line, "leave", strike_first)
    try:
        host.lock().do(lambda ctx: "never")
    except KeyboardInterrupt as interrupt:
        behind = world.start(lambda: host.lock().do(lambda ctx: "in"), "behind")
        world.advance(TTL + 5)  # the grant itself has been lost on the way: it ages
        assert behind.done
        assert behind.result() == "in"
        assert interrupt.__traceback__ is not None  # noqa: PT017 - it is kept alive here on purpose
    assert struck


def test_threads_that_give_up_leave_no_gap_in_the_line(world: World) -> None:
    host = world.host()
    may_end = Flag()
    holder = world.start(lambda: host.lock().do(lambda ctx: world.clock.wait(may_end)), "holder")
    parents = [Ctx.background(world.clock) for _ in range(6)]
    order: list[int] = []
    waiting = [
        world.start(
            partial(host.lock().do, lambda ctx, n=n: order.append(n), ctx=parents[n]), f"{n}"
        )
        for n in range(6)
    ]
    for number in (0, 2, 3):  # the first, and two in the middle
        parents[number].cancel("changed its mind")
    world.advance(0)
    may_end.set()
    world.advance(1)
    assert holder.result()
    assert order == [1, 4, 5]
    assert [thread.error is not None for thread in waiting] == [
        number in (0, 2, 3) for number in range(6)
    ]


def test_threads_that_wait_are_let_in_in_the_order_in_which_they_came(world: World) -> None:
    host = world.host()
    may_end = Flag()
    holder = world.start(lambda: host.lock().do(lambda ctx: world.clock.wait(may_end)), "holder")
    order: list[int] = []
    waiting = [
        world.start(partial(host.lock().do, lambda ctx, n=n: order.append(n)), f"{n}")
        for n in range(8)
    ]
    may_end.set()
    world.advance(0)
    for thread in [holder, *waiting]:
        thread.result()
    assert order == list(range(8))
