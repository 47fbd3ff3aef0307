"""Ctx: each question is answered from the clocks, and each kind of end wakes who waits."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import tako_sync as tako
from kit import World
from tako_sync.ctx import Ctx, current_ctx
from tako_sync.errors import (
    BackendUnavailableError,
    ConfigurationError,
    CtxCancelledError,
    CtxDeadlineError,
    HandoverRequestedError,
    LeaseLostError,
    LossReason,
    NotAssuredError,
    NotReentrantError,
    UsageError,
)
from tako_sync.flag import Flag
from tako_sync.testing.clock import FakeClock
from tako_sync.testing.faults import fail

ASSURED = 27.0
"""Seconds for which a hold is assured after a write: the ttl of 30 less the margin of 3."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(60)
    assert not world.clock.waiters, "something goes on after the end"


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503 service unavailable")


def in_thread(clock: FakeClock, fn: Callable[[], object]) -> list[tuple[object, float]]:
    """Run ``fn`` in a thread of the clock; the list receives its answer and when it came."""
    answers: list[tuple[object, float]] = []
    clock.spawn(lambda: answers.append((fn(), clock.monotonic())), "asker")
    clock.advance(0)
    return answers


# --- Without a lease ---------------------------------------------------------------------------


def test_a_background_ctx_is_never_cancelled_by_itself(clock: FakeClock) -> None:
    ctx = Ctx.background(clock)
    clock.advance(10**7)
    assert (ctx.cancelled, ctx.cause, ctx.remaining()) == (False, None, math.inf)
    assert not ctx.done.is_set()
    ctx.check()
    ctx.ensure(10**9)


def test_a_background_ctx_needs_no_clock() -> None:
    child = tako.Ctx.background().child(timeout=0.01)
    assert child.wait(60) is True, "woken by the system's clock at its own deadline"
    assert type(child.cause) is CtxDeadlineError


def test_a_background_ctx_has_no_lease_and_no_fence(clock: FakeClock) -> None:
    expected = "^this ctx belongs to no lease, so it has no lease and no fence$"
    for ctx in (Ctx.background(clock), Ctx.background(clock).child(timeout=3)):
        with pytest.raises(UsageError, match=expected):
            ctx.lease  # noqa: B018
        with pytest.raises(UsageError, match=expected):
            ctx.fence  # noqa: B018


# --- cancel, cause, check ----------------------------------------------------------------------


def test_cancel_sets_everything_that_can_be_asked(clock: FakeClock) -> None:
    ctx = Ctx.background(clock)
    ctx.cancel("shutting down")
    assert ctx.cancelled
    assert ctx.done.is_set()
    assert ctx.remaining() == 0.0
    assert ctx.wait(60) is True
    assert ctx.done.wait(60) is True
    assert (type(ctx.cause), str(ctx.cause)) == (CtxCancelledError, "shutting down")
    for ask in (ctx.check, lambda: ctx.ensure(1)):
        with pytest.raises(CtxCancelledError) as caught:
            ask()
        assert caught.value is ctx.cause


def test_cancel_needs_no_cause(clock: FakeClock) -> None:
    ctx = Ctx.background(clock)
    ctx.cancel()
    assert str(ctx.cause) == "the ctx was cancelled"
    empty = Ctx.background(clock)
    empty.cancel("")
    assert str(empty.cause) == "the ctx was cancelled"


def test_check_raises_the_very_exception_that_was_given(clock: FakeClock) -> None:
    ctx, mine = Ctx.background(clock), KeyError("mine")
    ctx.cancel(mine)
    with pytest.raises(KeyError) as caught:
        ctx.check()
    assert caught.value is mine


def test_a_cause_checked_a_thousand_times_does_not_grow(clock: FakeClock) -> None:
    ctx = Ctx.background(clock)
    ctx.cancel("over")
    lengths = set()
    for _ in range(1000):
        with pytest.raises(CtxCancelledError) as caught:
            ctx.check()
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1, "the traceback of one check is no part of the next"


def test_the_first_cause_stays(clock: FakeClock) -> None:
    ctx = Ctx.background(clock).child(timeout=5)
    ctx.cancel("first")
    ctx.cancel("second")
    clock.advance(10)
    assert str(ctx.cause) == "first"


@pytest.mark.parametrize("cause", [7, ValueError, ["over"], b"over"])
def test_a_cause_that_can_neither_be_raised_nor_read_is_refused(
    clock: FakeClock, cause: object
) -> None:
    ctx = Ctx.background(clock)
    with pytest.raises(UsageError) as caught:
        ctx.cancel(cause)  # type: ignore[arg-type]
    assert str(caught.value) == f"a cause is an exception or a text, not {cause!r}"
    assert not ctx.cancelled


# --- Children ----------------------------------------------------------------------------------


def test_a_child_is_cancelled_with_its_parent_and_has_the_same_cause(clock: FakeClock) -> None:
    parent = Ctx.background(clock)
    child, grandchild = parent.child(), parent.child().child(timeout=99)
    parent.cancel("all of it")
    assert child.cause is parent.cause
    assert grandchild.cause is parent.cause


def test_a_parent_is_not_cancelled_with_its_child(clock: FakeClock) -> None:
    parent = Ctx.background(clock)
    child, sibling = parent.child(timeout=5), parent.child()
    child.cancel("this part only")
    clock.advance(6)
    assert not parent.cancelled
    assert not sibling.cancelled


def test_a_child_ends_at_its_own_time_at_that_very_instant(clock: FakeClock) -> None:
    child = Ctx.background(clock).child(timeout=5)
    clock.advance(4.5)
    assert (child.cancelled, child.remaining()) == (False, 0.5)
    clock.advance(0.5)
    assert (child.cancelled, child.remaining()) == (True, 0.0)
    assert (type(child.cause), str(child.cause)) == (CtxDeadlineError, "the ctx's time is over")
    with pytest.raises(TimeoutError):
        child.check()


def test_a_childs_time_is_bounded_by_its_parents(clock: FakeClock) -> None:
    parent = Ctx.background(clock).child(timeout=5)
    child = parent.child(timeout=60)
    assert child.remaining() == 5.0
    clock.advance(5)
    assert child.cancelled
    assert isinstance(child.cause, CtxDeadlineError)


def test_a_child_of_the_cancelled_is_born_cancelled(clock: FakeClock) -> None:
    parent = Ctx.background(clock)
    parent.cancel("too late")
    child = parent.child(timeout=60)
    assert child.cause is parent.cause
    assert child.wait(math.inf) is True


@pytest.mark.parametrize("timeout", [-1, math.nan, math.inf])
def test_a_childs_timeout_is_a_span_of_time(clock: FakeClock, timeout: float) -> None:
    with pytest.raises(ConfigurationError, match=r"^timeout is a finite number of seconds from 0"):
        Ctx.background(clock).child(timeout=timeout)


def test_children_that_are_dropped_leave_nothing_behind(clock: FakeClock) -> None:
    """A body that makes a child for each of a million rows must not pile them up."""
    parent = Ctx.background(clock)
    last = None
    for number in range(2000):
        last = parent.child(timeout=None if number % 2 else 60)
        assert not last.done.is_set()  # its event makes it a part of a cycle
    kept = weakref.ref(last)
    del last
    gc.collect()
    assert kept() is None
    assert parent.flag._watchers == []


# --- wait, ensure, remaining -------------------------------------------------------------------


def test_wait_sleeps_its_time_and_says_that_nothing_was_cancelled(clock: FakeClock) -> None:
    answers = in_thread(clock, lambda: Ctx.background(clock).wait(2))
    begun = clock.monotonic()
    clock.advance(1.9)
    assert not answers
    clock.advance(0.2)
    assert answers == [(False, begun + 2)]


@pytest.mark.parametrize("seconds", [2.0, 3600, math.inf])
def test_wait_wakes_at_the_deadline_though_nobody_tells_it(
    clock: FakeClock, seconds: float
) -> None:
    child = Ctx.background(clock).child(timeout=1)
    answers = in_thread(clock, lambda: child.wait(seconds))
    begun = clock.monotonic()
    clock.advance(1)
    assert answers == [(True, begun + 1)]


def test_wait_wakes_when_the_parent_is_cancelled(clock: FakeClock) -> None:
    parent = Ctx.background(clock)
    child = parent.child().child()
    answers = in_thread(clock, lambda: child.wait(math.inf))
    clock.spawn(lambda: parent.cancel("now"), "canceller")
    clock.advance(0)
    assert answers == [(True, clock.monotonic())]


def test_wait_for_no_time_only_asks(clock: FakeClock) -> None:
    ctx = Ctx.background(clock)
    assert ctx.wait(0) is False
    ctx.cancel()
    assert ctx.wait(0) is True


def test_ensure_accepts_exactly_what_is_left_and_refuses_more(clock: FakeClock) -> None:
    ctx = Ctx.background(clock).child(timeout=8)
    clock.advance(3)
    ctx.ensure(5)
    with pytest.raises(NotAssuredError) as caught:
        ctx.ensure(5.25)
    error = caught.value
    assert (error.wanted, error.remaining) == (5.25, 5.0)
    assert str(error) == "5.25 s were asked for, but only 5.000 s are assured"
    assert not ctx.cancelled, "too little time for this step is no cancellation"


def test_ensure_on_the_cancelled_raises_the_cause_and_not_that_time_is_short(
    clock: FakeClock,
) -> None:
    ctx = Ctx.background(clock).child(timeout=8)
    clock.advance(8)
    with pytest.raises(CtxDeadlineError):
        ctx.ensure(1)


# --- done --------------------------------------------------------------------------------------


def test_done_is_one_event_and_a_threading_event(clock: FakeClock) -> None:
    ctx = Ctx.background(clock)
    assert ctx.done is ctx.done
    assert isinstance(ctx.done, threading.Event)
    assert repr(ctx.done) == "<Done not set>"
    ctx.cancel()
    assert repr(ctx.done) == "<Done set>"


def test_done_honours_a_deadline_that_passes_unasked(clock: FakeClock) -> None:
    done = Ctx.background(clock).child(timeout=5).done
    clock.advance(4.9)
    assert not done.is_set()
    clock.advance(0.1)
    assert done.is_set()
    assert done.wait() is True


def test_waiting_for_done_ends_at_the_deadline_or_the_timeout(clock: FakeClock) -> None:
    done = Ctx.background(clock).child(timeout=5).done
    begun = clock.monotonic()
    short, without = in_thread(clock, lambda: done.wait(2)), in_thread(clock, done.wait)
    long, none = in_thread(clock, lambda: done.wait(100)), in_thread(clock, lambda: done.wait(0))
    clock.advance(10)
    assert none == [(False, begun)]
    assert short == [(False, begun + 2)]
    assert without == long == [(True, begun + 5)]


def test_setting_done_cancels_and_clearing_it_is_refused(clock: FakeClock) -> None:
    ctx = Ctx.background(clock)
    ctx.done.set()
    assert str(ctx.cause) == "the ctx was cancelled"
    with pytest.raises(RuntimeError, match=r"^a ctx is never un-cancelled$"):
        ctx.done.clear()


def test_code_that_wants_a_threading_event_can_be_given_done(world: World) -> None:
    """Library code of others polls or waits on an event of ours, and stops when the lease goes."""
    beats: list[float] = []

    def pump(stop: threading.Event) -> None:
        while not stop.wait(timeout=10):
            beats.append(world.clock.monotonic() - begun)
        assert stop.is_set()

    host = world.host()
    host.storage.always("write", fail(unavailable), when=lambda c: c.number > 2)
    begun = world.clock.monotonic()
    running = world.start(lambda: host.lock().do(lambda ctx: pump(ctx.done)))
    world.advance(60)
    with pytest.raises(LeaseLostError):
        running.result()
    assert beats == [10.0, 20.0], "and not at 30: the hold was over at 27"


def test_a_clock_can_wait_for_done(clock: FakeClock) -> None:
    """FakeClock cannot be told of a deadline by an event; it looks at the end of its advance."""
    child = Ctx.background(clock).child(timeout=5)
    answers = in_thread(clock, lambda: clock.wait(child.done, 60))
    clock.advance(6)
    assert [answer for answer, _when in answers] == [True]


# --- on_cancel ---------------------------------------------------------------------------------


def test_a_callback_is_called_once_in_the_order_of_registration(clock: FakeClock) -> None:
    ctx, called = Ctx.background(clock), list[int]()
    for number in range(3):
        ctx.on_cancel(lambda number=number: called.append(number))
    assert called == []
    ctx.cancel("a")
    ctx.cancel("b")
    assert called == [0, 1, 2]


def test_a_callback_registered_too_late_is_called_at_once(clock: FakeClock) -> None:
    ctx, called = Ctx.background(clock), list[str]()
    ctx.cancel()
    ctx.on_cancel(lambda: called.append(threading.current_thread().name))
    assert called == [threading.current_thread().name]


def test_a_callback_runs_in_the_thread_that_cancels(clock: FakeClock) -> None:
    ctx, called = Ctx.background(clock), list[str]()
    ctx.on_cancel(lambda: called.append(threading.current_thread().name))
    clock.spawn(ctx.cancel, "canceller")
    clock.advance(0)
    assert called == ["canceller"]


def test_a_callback_that_raises_is_logged_and_harms_neither_the_others_nor_the_canceller(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    ctx, called = Ctx.background(clock), list[str]()

    def broken() -> None:
        raise ZeroDivisionError

    ctx.on_cancel(broken)
    ctx.on_cancel(lambda: called.append("second"))
    with caplog.at_level(logging.DEBUG, "tako_sync"):
        ctx.cancel("over")
    assert called == ["second"]
    (line,) = caplog.records
    assert "on_cancel callback" in line.getMessage()
    assert "broken" in line.getMessage()
    assert line.exc_info is not None
    assert line.exc_info[0] is ZeroDivisionError
    assert str(ctx.cause) == "over"


def test_a_callback_that_is_undone_is_not_called(clock: FakeClock) -> None:
    ctx, called = Ctx.background(clock), list[int]()
    undo = ctx.on_cancel(lambda: called.append(1))
    ctx.on_cancel(lambda: called.append(2))
    undo()
    undo()
    ctx.cancel()
    undo()
    assert called == [2]
    assert ctx.flag._watchers == []


def test_a_callback_is_called_at_a_deadline_though_nobody_asks(clock: FakeClock) -> None:
    called: list[float] = []
    child = Ctx.background(clock).child(timeout=5)
    child.on_cancel(lambda: called.append(clock.monotonic()))
    begun = clock.monotonic()
    clock.advance(60)
    assert called == [begun + 5]
    assert not clock.waiters


def test_a_callback_on_a_child_that_nobody_keeps_is_called_all_the_same(clock: FakeClock) -> None:
    """`ctx.child().on_cancel(sock.close)`: the line has no name for the child."""
    parent, called = Ctx.background(clock), list[str]()
    parent.child().on_cancel(lambda: called.append("child"))
    parent.child().child().on_cancel(lambda: called.append("grandchild"))
    begun = clock.monotonic()
    parent.child(timeout=3).on_cancel(
        lambda: called.append(f"timed, after {clock.monotonic() - begun:g} s")
    )
    gc.collect()
    clock.advance(10)
    assert called == ["timed, after 3 s"]
    parent.cancel()
    assert called == ["timed, after 3 s", "child", "grandchild"]


def test_a_callback_that_is_undone_lets_its_child_go(clock: FakeClock) -> None:
    parent = Ctx.background(clock)
    child = parent.child().child()
    undo = child.on_cancel(lambda: None)
    kept = weakref.ref(child)
    undo()
    del child, undo
    gc.collect()
    assert kept() is None
    assert parent.flag._watchers == []


def test_many_callbacks_on_one_deadline_take_one_thread(clock: FakeClock) -> None:
    child, called = Ctx.background(clock).child(timeout=5), list[int]()
    for number in range(50):
        child.on_cancel(lambda number=number: called.append(number))
    clock.advance(0)
    assert len(clock.waiters) == 1
    clock.advance(5)
    assert called == list(range(50))
    assert not clock.waiters


def test_a_callback_may_cancel_others_and_register_more(clock: FakeClock) -> None:
    ctx, other, called = Ctx.background(clock), Ctx.background(clock), list[str]()

    def chain() -> None:
        other.cancel("with it")
        ctx.on_cancel(lambda: called.append("more"))

    ctx.on_cancel(chain)
    ctx.cancel()
    assert (str(other.cause), called) == ("with it", ["more"])


def test_a_ctx_cancelled_from_twenty_threads_calls_back_once(clock: FakeClock) -> None:
    ctx, called, barrier = Ctx.background(clock), list[int](), threading.Barrier(20)
    ctx.on_cancel(lambda: called.append(1))

    def cancel() -> None:
        barrier.wait()
        ctx.cancel(threading.current_thread().name)

    threads = [threading.Thread(target=cancel) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert called == [1]
    assert str(ctx.cause) in {thread.name for thread in threads}


# --- With a lease ------------------------------------------------------------------------------


def test_a_bodys_ctx_has_the_lease_its_fence_and_the_time_assured(world: World) -> None:
    host, seen = world.host(), list[object]()

    def body(ctx: Ctx) -> None:
        seen.extend([ctx.lease.name, str(ctx.lease), ctx.remaining(), ctx.fence == ctx.lease.fence])
        child = ctx.child(timeout=100)
        seen.extend([child.lease is ctx.lease, child.fence == ctx.fence, child.remaining()])
        ctx.ensure(ASSURED)
        with pytest.raises(NotAssuredError):
            ctx.ensure(ASSURED + 0.5)

    host.lock().do(body)
    assert seen == ["reindex", "reindex", ASSURED, True, True, True, ASSURED]


def test_a_heartbeat_prolongs_what_is_assured(world: World) -> None:
    host, seen = world.host(), list[float]()

    def body(ctx: Ctx) -> None:
        for _ in range(4):
            ctx.wait(7.5)
            seen.append(ctx.remaining())

    running = world.start(lambda: host.lock().do(body))
    world.advance(30)
    running.result()
    assert seen[0] == ASSURED - 7.5, "nothing was renewed so far"
    for left, after in zip(seen[1:], (5.0, 2.5, 0.0)):
        assert after <= ASSURED - left <= after + 0.51, "a beat is sent a little early"


def test_a_body_asleep_in_its_own_wait_wakes_at_the_loss(world: World) -> None:
    host = world.host()
    host.storage.always("write", fail(unavailable), when=lambda c: c.number > 2)
    seen: list[object] = []
    begun = world.clock.monotonic()

    def body(ctx: Ctx) -> str:
        ctx.on_cancel(lambda: seen.append(("called", world.clock.monotonic() - begun)))
        seen.append((ctx.wait(600), world.clock.monotonic() - begun))
        with pytest.raises(LeaseLostError):
            ctx.check()
        assert isinstance(ctx.cause, LeaseLostError)
        seen.append(ctx.cause.reason)
        return "late"

    running = world.start(lambda: host.lock().do(body))
    world.advance(60)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert sorted(seen[:2], key=str) == [("called", ASSURED), (True, ASSURED)]
    assert seen[2] is LossReason.UNREACHABLE
    assert caught.value.value == "late"


def test_a_body_is_told_of_a_loss_by_its_childs_event_too(world: World) -> None:
    host, seen = world.host(), list[object]()
    host.storage.always("write", fail(unavailable), when=lambda c: c.number > 2)

    def body(ctx: Ctx) -> None:
        child = ctx.child().child(timeout=500)
        seen.append(child.done.wait(400))
        seen.append(isinstance(child.cause, LeaseLostError))

    running = world.start(lambda: host.lock().do(body))
    world.advance(ASSURED)
    assert seen == [True, True]
    world.advance(ASSURED)
    with pytest.raises(LeaseLostError):
        running.result()


def test_cancelling_a_bodys_ctx_loses_no_lease(world: World) -> None:
    """The lease is kept, and renewed, until the body has really returned."""
    host, go = world.host(), Flag()
    held: list[Ctx] = []

    def body(ctx: Ctx) -> str:
        held.append(ctx)
        world.clock.wait(go)
        return "drained"

    running = world.start(lambda: host.lock().do(body))
    held[0].cancel("please stop")
    world.advance(100)
    assert host.lock().holder() is not None
    assert held[0].lease.end is None
    assert held[0].remaining() == 0.0
    go.set()
    assert running.result() == "drained"
    assert host.lock().holder() is None


@pytest.mark.parametrize("how", ["do", "try_do", "hold"])
def test_after_the_hold_has_ended_its_ctx_reads_cancelled(world: World, how: str) -> None:
    """A thread that outlives the body must not go on believing in the lease."""
    lock, kept = world.host().lock(), list[Ctx]()
    if how == "hold":
        with lock.hold() as ctx:
            kept += [ctx, ctx.child(), ctx.child(timeout=500)]
    else:
        getattr(lock, how)(lambda ctx: kept.extend([ctx, ctx.child(), ctx.child(timeout=500)]))
    for ctx in kept:
        assert ctx.cancelled
        assert ctx.done.is_set()
        assert ctx.remaining() == 0.0
        assert type(ctx.cause) is CtxCancelledError
        assert str(ctx.cause) == 'the hold of lease "reindex" has ended'
        with pytest.raises(CtxCancelledError, match="has ended"):
            ctx.check()
        assert ctx.fence == kept[0].fence, "it may still be asked for, to send with a late write"


def test_callbacks_of_a_bodys_ctx_are_called_at_its_end(world: World) -> None:
    """As a context's cancellation in Go: whoever works for the body learns that it is over."""
    called: list[str] = []
    world.host().lock().do(lambda ctx: ctx.on_cancel(lambda: called.append("over")))
    assert called == ["over"]


def test_a_hand_over_request_cancels_the_ctx_and_keeps_the_lease(world: World) -> None:
    a, b, seen = world.host("a"), world.host("b"), list[object]()

    def body(ctx: Ctx) -> str:
        seen.append(ctx.wait(600))
        seen.append(ctx.cause)
        seen.append(ctx.lease.end)
        return "handed over"

    running = world.start(lambda: a.lock().do(body))
    holder = b.lock().holder()
    assert holder is not None
    b.lock().request_handover(holder, by="deploy 7")
    world.advance(11)
    assert running.result() == "handed over"
    assert seen[0] is True
    assert type(seen[1]) is HandoverRequestedError
    assert str(seen[1]) == "deploy 7 asks for a hand-over"
    assert seen[2] is None


def test_a_parent_ends_the_bodys_ctx_with_its_own_cause(world: World) -> None:
    host = world.host()
    parent = Ctx.background(world.clock).child(timeout=12)

    def body(ctx: Ctx) -> float:
        assert ctx.remaining() == 12.0
        ctx.wait(600)
        assert ctx.cause is parent.cause
        return world.clock.monotonic()

    begun = world.clock.monotonic()
    running = world.start(lambda: host.lock().do(body, ctx=parent))
    world.advance(60)
    assert running.result() == begun + 12, "and it is no loss: do returned the value"


def test_a_thousand_holds_under_one_parent_leave_nothing_with_it(world: World) -> None:
    """The ctx of a worker that lives for months is the parent of all its holds."""
    lock, parent = world.host().lock(), Ctx.background(world.clock)
    for _ in range(500):
        lock.do(lambda ctx: ctx.done, ctx=parent)
        lock.try_do(lambda ctx: None, ctx=parent)
    gc.collect()
    assert parent.flag._watchers == []


# --- current_ctx -------------------------------------------------------------------------------

NONE_HERE = (
    "^no body of a lock is running here, so there is no current ctx; in a thread that a body has "
    r"started, wrap the function: pool.submit\(ctx.wrap\(fn\)\)$"
)


def test_there_is_no_current_ctx_outside_a_body() -> None:
    with pytest.raises(UsageError, match=NONE_HERE):
        current_ctx()


def test_deep_code_finds_the_ctx_of_the_body_it_runs_in(world: World) -> None:
    host = world.host()

    def deep(depth: int) -> Ctx:
        return current_ctx() if depth == 0 else deep(depth - 1)

    host.lock().do(lambda ctx: ctx is deep(20) or pytest.fail("another ctx"))
    assert host.lock().do(lambda ctx: tako.current_ctx() is ctx)
    with pytest.raises(UsageError, match=NONE_HERE):
        current_ctx()


def test_bodies_inside_bodies_find_their_own(world: World) -> None:
    outer, inner = world.host().lock("outer"), world.host().lock("inner")

    def body(ctx: Ctx) -> None:
        assert inner.do(lambda inside: current_ctx() is inside)
        assert current_ctx() is ctx
        with pytest.raises(ZeroDivisionError):
            inner.do(lambda inside: 1 / 0)
        assert current_ctx() is ctx
        with inner.hold() as inside:
            assert current_ctx() is inside
        assert current_ctx() is ctx

    outer.do(body)


def test_a_thread_that_a_body_starts_finds_no_ctx_unless_it_is_carried(world: World) -> None:
    lock = world.host().lock()

    def find() -> object:
        try:
            return current_ctx()
        except UsageError as error:
            return error

    def body(ctx: Ctx) -> None:
        with ThreadPoolExecutor(1) as pool:
            if not getattr(__import__("sys").flags, "thread_inherit_context", False):
                assert isinstance(pool.submit(find).result(), UsageError)
            assert pool.submit(ctx.wrap(find)).result() is ctx
            child = ctx.child()
            assert pool.submit(child.wrap(find)).result() is child
            if not getattr(__import__("sys").flags, "thread_inherit_context", False):
                assert isinstance(pool.submit(find).result(), UsageError), "nothing stays behind"
            assert list(pool.map(ctx.wrap(lambda number: (number, find())), [1, 2])) == [
                (1, ctx),
                (2, ctx),
            ]

    lock.do(body)


def test_wrap_keeps_name_arguments_value_and_error(clock: FakeClock) -> None:
    ctx = Ctx.background(clock)

    def add(a: int, *, b: int = 2) -> int:
        """Adds."""
        return a + b

    wrapped = ctx.wrap(add)
    assert (wrapped.__name__, wrapped.__doc__) == ("add", "Adds.")
    assert inspect.signature(wrapped) == inspect.signature(add)
    assert wrapped(1, b=5) == 6
    with pytest.raises(TypeError):
        wrapped("1")
    with pytest.raises(UsageError, match=NONE_HERE):
        current_ctx()


def test_what_is_wrapped_inside_a_body_and_called_after_it_finds_the_ended_ctx(
    world: World,
) -> None:
    late = world.host().lock().do(lambda ctx: ctx.wrap(lambda: current_ctx().cancelled))
    assert late() is True


def test_the_ctx_follows_asyncio_to_thread(world: World) -> None:
    """to_thread copies the context; so do the frameworks that carry context variables."""
    ctx = Ctx.background(world.clock)

    async def main() -> Ctx:
        with ctx.entered():
            return await asyncio.to_thread(current_ctx)

    assert asyncio.run(main()) is ctx


def test_entered_makes_a_ctx_current_for_a_block(clock: FakeClock) -> None:
    ctx = Ctx.background(clock)
    with ctx.entered() as entered:
        assert entered is ctx
        assert current_ctx() is ctx
        with ctx.child().entered() as child:
            assert current_ctx() is child
        assert current_ctx() is ctx
    with pytest.raises(UsageError, match=NONE_HERE):
        current_ctx()


def test_a_generator_made_in_a_body_and_consumed_after_it_finds_no_ctx(world: World) -> None:
    """It runs where it is consumed: there, nothing is held any more."""

    def rows() -> Generator[object, None, None]:
        try:
            yield current_ctx()
        except UsageError as error:
            yield error

    first, _count = world.host().lock().do(lambda ctx: (rows(), 1))
    assert isinstance(next(first), UsageError)
    first.close()


def test_a_generator_that_holds_ends_its_hold_wherever_it_is_closed(world: World) -> None:
    """The end of its with block may come in another context, or thread, than its beginning."""
    lock = world.host().lock()

    def rows() -> Generator[Ctx, None, None]:
        with lock.hold() as ctx:
            yield ctx

    def elsewhere(fn: Callable[[], object]) -> object:
        return contextvars.copy_context().run(fn)

    def in_a_thread(fn: Callable[[], object]) -> object:
        return world.start(fn).result()

    def here(fn: Callable[[], object]) -> object:
        return fn()

    places = (here, elsewhere, in_a_thread)
    for opens, closes in itertools.product(places, places):
        contextvars.copy_context().run(opens_and_closes, rows(), opens, closes)
        assert lock.holder() is None
    assert lock.do(lambda ctx: "again") == "again"
    with pytest.raises(UsageError, match=NONE_HERE):
        current_ctx()


def opens_and_closes(
    generator: Generator[Ctx, None, None],
    opens: Callable[[Callable[[], object]], object],
    closes: Callable[[Callable[[], object]], object],
) -> None:
    seen: list[Ctx] = []
    opens(lambda: seen.append(next(generator)))
    (ctx,) = seen
    assert not ctx.cancelled
    closes(generator.close)
    assert ctx.cancelled
    try:  # opened here and closed elsewhere, it cannot be undone here; but it does not lie
        assert current_ctx().cancelled
    except UsageError:
        pass


def test_a_hold_that_ends_in_another_bodys_thread_does_not_disturb_that_bodys_ctx(
    world: World,
) -> None:
    """A collector of garbage, or a consumer, may close a generator anywhere."""
    host = world.host()

    def rows() -> Generator[Ctx, None, None]:
        with host.lock("rows").hold() as ctx:
            yield ctx

    generator = rows()
    contextvars.copy_context().run(next, generator)

    def body(ctx: Ctx) -> None:
        generator.close()
        assert current_ctx() is ctx
        with pytest.raises(NotReentrantError):
            host.lock().do(lambda ctx: None)

    world.start(lambda: host.lock().do(body)).result()
    assert host.lock("rows").holder() is None
