"""What a user writes: each method of Lock, what it answers, and what it says to other attempts."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import gc
import inspect
import json
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tako_sync as tako
from kit import World
from tako_sync import errors, tenure
from tako_sync import runtime as binding
from tako_sync.ctx import Ctx, current_ctx
from tako_sync.errors import (
    BackendUnavailableError,
    CampaignTimeoutError,
    EventLoopWarning,
    LeaseBusyError,
    LeaseLostError,
    LossReason,
    NotReentrantError,
    TakoError,
    UsageError,
)
from tako_sync.events import Released
from tako_sync.flag import Flag
from tako_sync.lock import Lock, TryResult
from tako_sync.record import Holder
from tako_sync.runtime import Runtime
from tako_sync.testing import FakeClock, Occupation, plugin

tako_clock = plugin.tako_clock
tako_runtime = plugin.tako_runtime
occupy = plugin.occupy

Occupy = Callable[[str], Occupation]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(60)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


def in_thread(clock: FakeClock, fn: Callable[[], object]) -> list[object]:
    """Run ``fn`` in a thread of the clock; the list receives its value or its error."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(fn())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            outcome.append(error)

    clock.spawn(run, "caller")
    clock.advance(0)
    return outcome


# --- The seed's own test -----------------------------------------------------------------------


class Gallery:
    """The seed's example: an endpoint that collapses into a rebuild that runs already."""

    def __init__(self) -> None:
        self.relock = tako.Lock("reindex")
        self.ledger: list[str] = []

    def rebuild(self, ctx: Ctx) -> str:
        self.ledger.append(f"run under fence {ctx.fence}")
        return f"run {len(self.ledger)}"

    def reindex(self) -> dict[str, object]:
        ran, run = self.relock.try_do(self.rebuild)
        return {"started": ran, "run": run}


@pytest.mark.usefixtures("tako_runtime")
def test_reindex_collapses_while_held(tako_clock: FakeClock) -> None:
    gallery, finish = Gallery(), Flag()
    held = in_thread(
        tako_clock, lambda: tako.Lock("reindex").do(lambda ctx: tako_clock.wait(finish))
    )
    assert gallery.reindex() == {"started": False, "run": None}
    assert gallery.ledger == []
    finish.set()
    tako_clock.advance(0)
    assert held == [True]
    assert gallery.reindex() == {"started": True, "run": "run 1"}
    assert len(gallery.ledger) == 1


@pytest.mark.usefixtures("tako_runtime")
def test_reindex_collapses_while_occupied(occupy: Occupy) -> None:
    gallery = Gallery()
    with occupy("reindex") as other:
        assert gallery.reindex() == {"started": False, "run": None}
        assert gallery.ledger == []
    assert gallery.reindex() == {"started": True, "run": "run 1"}
    assert int(gallery.ledger[0].split()[-1]) > other.fence


# --- do ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tako_runtime")
def test_do_runs_the_body_with_a_ctx_and_returns_its_value() -> None:
    value = object()

    def body(ctx: Ctx) -> object:
        assert isinstance(ctx, tako.Ctx)
        assert not ctx.cancelled
        return value

    assert Lock("reindex").do(body) is value
    assert Lock("reindex").do(lambda ctx: None) is None


@pytest.mark.usefixtures("tako_runtime")
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_do_raises_what_the_body_raised_itself_and_frees_the_lease(error: BaseException) -> None:
    def body(ctx: Ctx) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        Lock("reindex").do(body)
    assert caught.value is error
    assert not getattr(error, "__notes__", [])
    assert Lock("reindex").holder() is None


def test_do_waits_for_the_other_host_and_runs_after_it(world: World) -> None:
    a, b, go, order = world.host("a"), world.host("b"), Flag(), list[str]()

    def first(ctx: Ctx) -> None:
        with world.meter.running(ctx):
            order.append("a begins")
            world.clock.wait(go)
            order.append("a ends")

    def second(ctx: Ctx) -> str:
        with world.meter.running(ctx):
            order.append("b begins")
            return "b"

    running = world.start(lambda: a.lock().do(first))
    waiting = world.start(lambda: b.lock().do(second))
    world.advance(100)
    assert order == ["a begins"]
    go.set()
    world.advance(2.5)
    assert order == ["a begins", "a ends", "b begins"]
    assert waiting.result() == "b"
    running.result()


@pytest.mark.usefixtures("tako_runtime")
def test_do_in_one_process_hands_over_to_a_waiting_thread_at_once(tako_clock: FakeClock) -> None:
    go = Flag()
    first = in_thread(tako_clock, lambda: Lock("reindex").do(lambda ctx: tako_clock.wait(go)))
    second = in_thread(tako_clock, lambda: Lock("reindex").do(lambda ctx: tako_clock.monotonic()))
    tako_clock.advance(5)
    freed = tako_clock.monotonic()
    go.set()
    tako_clock.advance(0)
    assert (first, second) == ([True], [freed])


@pytest.mark.usefixtures("tako_runtime")
@pytest.mark.parametrize("timeout", [5, 0.5, 10.25])
def test_do_gives_up_at_its_timeout_and_names_the_holder(
    tako_clock: FakeClock, occupy: Occupy, timeout: float
) -> None:
    occupy("reindex")
    begun = tako_clock.monotonic()
    outcome = in_thread(
        tako_clock, lambda: Lock("reindex").do(lambda ctx: pytest.fail("ran"), timeout=timeout)
    )
    tako_clock.advance(timeout - 0.01)
    assert not outcome
    tako_clock.advance(0.02)
    (error,) = outcome
    assert isinstance(error, CampaignTimeoutError)
    assert isinstance(error, LeaseBusyError)
    assert isinstance(error, TimeoutError)
    holder = Lock("reindex").holder()
    assert holder is not None
    assert error.holder is not None
    assert (error.lease, error.timeout) == ("reindex", timeout)
    assert error.holder.owner == holder.owner
    assert str(error).startswith(
        f'lease "reindex" was not free within {timeout:g} s: held by {holder.owner} (since '
    )
    assert tako_clock.monotonic() - begun == pytest.approx(timeout + 0.01)


@pytest.mark.usefixtures("tako_runtime")
def test_do_with_no_time_is_one_attempt(occupy: Occupy) -> None:
    assert Lock("reindex").do(lambda ctx: 7, timeout=0) == 7
    other = occupy("reindex")
    with pytest.raises(CampaignTimeoutError, match=r"was not free within 0 s: held by ") as caught:
        Lock("reindex").do(lambda ctx: 7, timeout=0)
    assert caught.value.holder is not None
    assert caught.value.holder.fence == other.fence


@pytest.mark.usefixtures("tako_runtime")
def test_do_under_a_cancelled_parent_raises_its_cause_and_runs_nothing() -> None:
    parent = Ctx.background(FakeClock())
    parent.cancel("shutting down")
    for call in (
        lambda: Lock("reindex").do(lambda ctx: pytest.fail("ran"), ctx=parent),
        lambda: Lock("reindex").try_do(lambda ctx: pytest.fail("ran"), ctx=parent),
        lambda: Lock("reindex").hold(ctx=parent).__enter__(),
    ):
        with pytest.raises(tako.CtxCancelledError, match=r"^shutting down$"):
            call()
    assert Lock("reindex").holder() is None


# --- try_do ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tako_runtime")
def test_try_do_answers_with_a_pair_whose_truth_is_that_the_body_ran(occupy: Occupy) -> None:
    result = Lock("reindex").try_do(lambda ctx: "value")
    ran, value = result
    assert (ran, value) == (True, "value")
    assert tuple(result) == (True, "value")
    assert (result.ran, result.value, result.holder) == (True, "value", None)
    assert result
    assert isinstance(result, tuple)
    assert len(result) == 2
    assert repr(result) == "TryResult(ran=True, value='value')"

    other = occupy("reindex")
    result = Lock("reindex").try_do(lambda ctx: "value")
    assert tuple(result) == (False, None)
    assert (result.ran, result.value) == (False, None)
    assert not result
    assert result.holder is not None
    assert result.holder.fence == other.fence


@pytest.mark.usefixtures("tako_runtime")
@pytest.mark.parametrize("value", [None, False, 0, "", []])
def test_a_body_that_returns_something_false_ran_all_the_same(value: object) -> None:
    result = Lock("reindex").try_do(lambda ctx: value)
    assert bool(result) is True
    assert result == (True, value)


@pytest.mark.usefixtures("tako_runtime")
@pytest.mark.parametrize(
    "again", [lambda r: pickle.loads(pickle.dumps(r)), copy.copy, copy.deepcopy]
)
def test_a_result_survives_pickling_with_its_holder(
    occupy: Occupy, again: Callable[[Any], Any]
) -> None:
    """multiprocessing and Celery send it from process to process."""
    ran = again(Lock("reindex").try_do(lambda ctx: {"rows": 3}))
    assert (type(ran), ran, ran.ran, ran.holder) == (TryResult, (True, {"rows": 3}), True, None)
    occupy("reindex")
    busy = again(result := Lock("reindex").try_do(lambda ctx: 1))
    assert (type(busy), busy, bool(busy)) == (TryResult, (False, None), False)
    assert busy.holder == result.holder


@pytest.mark.usefixtures("tako_runtime")
def test_try_do_raises_what_the_body_raised(occupy: Occupy) -> None:
    with pytest.raises(ZeroDivisionError):
        Lock("reindex").try_do(lambda ctx: 1 / 0)
    assert Lock("reindex").holder() is None


def test_a_body_that_raises_busy_of_another_lock_is_not_taken_for_busy(world: World) -> None:
    """An inner name that is busy is the body's business; "ran" must not be a lie."""
    a, b = world.host("a"), world.host("b")
    go = Flag()
    running = world.start(lambda: b.lock("inner").do(lambda ctx: world.clock.wait(go)))

    def body(ctx: Ctx) -> None:
        with a.lock("inner").hold(timeout=0):
            pytest.fail("busy")

    with pytest.raises(CampaignTimeoutError, match=r'^lease "inner" was not free'):
        a.lock("outer").try_do(body)
    with pytest.raises(CampaignTimeoutError, match=r'^lease "inner" was not free'):
        a.lock("outer").guard(busy="skip")(lambda: body(current_ctx()))()
    go.set()
    world.advance(1)
    running.result()


def test_try_do_that_cannot_settle_raises_and_does_not_say_busy(world: World) -> None:
    host = world.host()
    host.storage.always(
        "*", lambda call, proceed: (_ for _ in ()).throw(BackendUnavailableError("503"))
    )
    running = world.start(lambda: host.lock().try_do(lambda ctx: pytest.fail("ran")))
    world.advance(10)
    with pytest.raises(BackendUnavailableError, match=r"^503$"):
        running.result()


# --- hold --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tako_runtime")
def test_a_block_holds_the_lease_and_frees_it_at_its_end() -> None:
    lock = Lock("reindex")
    with lock.hold() as ctx:
        holder = lock.holder()
        assert holder is not None
        assert holder.fence == ctx.fence
        assert current_ctx() is ctx
    assert lock.holder() is None
    assert ctx.cancelled


@pytest.mark.usefixtures("tako_runtime")
def test_a_block_that_raises_frees_the_lease_and_swallows_nothing() -> None:
    lock = Lock("reindex")
    with pytest.raises(ZeroDivisionError) as caught, lock.hold():
        1 / 0  # noqa: B018
    assert not getattr(caught.value, "__notes__", [])
    assert lock.holder() is None
    for _ in range(2):
        with lock.hold():
            break  # leaving by break, continue or return is an end like any other
    assert lock.holder() is None


@pytest.mark.usefixtures("tako_runtime")
def test_a_hold_is_used_once_and_a_second_use_says_what_to_do() -> None:
    lock = Lock("reindex")
    hold = lock.hold()
    with hold:
        pass
    expected = r'^this hold of lease "reindex" was used: call hold\(\) anew$'
    with pytest.raises(UsageError, match=expected):
        hold.__enter__()
    fresh = lock.hold()
    with fresh, pytest.raises(UsageError, match=expected):
        fresh.__enter__()
    assert lock.holder() is None, "the refusal has not disturbed the end of the hold"


@pytest.mark.usefixtures("tako_runtime")
def test_a_hold_that_failed_to_be_acquired_was_used_too(occupy: Occupy) -> None:
    other = occupy("reindex")
    hold = Lock("reindex").hold(timeout=0)
    with pytest.raises(LeaseBusyError):
        hold.__enter__()
    other.release()
    with pytest.raises(UsageError, match="was used"):
        hold.__enter__()


@pytest.mark.usefixtures("tako_runtime")
def test_holds_live_in_an_exit_stack() -> None:
    names = ["one", "two", "three"]
    with contextlib.ExitStack() as stack:
        ctxs = [stack.enter_context(Lock(name).hold(timeout=1)) for name in names]
        assert all(Lock(name).holder() for name in names)
        assert current_ctx() is ctxs[-1]
    assert not any(Lock(name).holder() for name in names)
    with pytest.raises(UsageError):
        current_ctx()


@pytest.mark.usefixtures("tako_runtime")
def test_an_exit_stack_that_fails_half_way_gives_back_what_it_had(occupy: Occupy) -> None:
    occupy("three")

    def enter_all() -> None:
        with contextlib.ExitStack() as stack:
            for name in ("one", "two", "three"):
                stack.enter_context(Lock(name).hold(timeout=0))

    with pytest.raises(CampaignTimeoutError, match='lease "three"'):
        enter_all()
    assert Lock("one").holder() is None
    assert Lock("two").holder() is None


def test_a_hold_that_is_never_entered_asks_nothing(world: World) -> None:
    host = world.host()
    host.lock().hold()
    host.lock().hold(timeout=5)
    gc.collect()
    assert host.requests() == []


def test_a_hold_that_is_entered_and_dropped_ends(world: World) -> None:
    """Nobody is left to end it; without this it would be renewed for as long as the process."""
    host = world.host()
    hold = host.lock().hold()
    ctx = contextvars.copy_context().run(hold.__enter__)  # nobody will leave it here
    del hold
    gc.collect()
    world.advance(0)
    assert ctx.cancelled
    assert host.lock().holder() is None
    assert len(host.told(Released)) == 1
    world.advance(60)
    assert host.requests().count("write") == 2, "the grant and the release, no renewal"


def test_a_block_that_ends_normally_after_a_loss_raises_it_at_its_end(world: World) -> None:
    host, seen = world.host(), list[str]()

    def block() -> None:
        with host.lock().hold() as ctx:
            ctx.wait(600)
            seen.append("the block went on to its end")

    host.storage.always("write", unavailable, when=lambda call: call.number > 2)
    running = world.start(block)
    world.advance(60)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.UNREACHABLE
    assert caught.value.value is None
    assert seen == ["the block went on to its end"]


def test_a_block_that_raises_after_a_loss_raises_its_own_with_a_note(world: World) -> None:
    host = world.host()

    def block() -> None:
        with host.lock().hold() as ctx:
            ctx.wait(600)
            raise ValueError("mine")

    host.storage.always("write", unavailable, when=lambda call: call.number > 2)
    running = world.start(block)
    world.advance(60)
    with pytest.raises(ValueError) as caught:
        running.result()
    assert str(caught.value) == "mine"
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    assert note.startswith('lease "reindex" was lost while held (ttl expired or forcibly taken)')
    assert "(reason: unreachable, fence: " in note


def unavailable(call: object, proceed: object) -> None:
    raise BackendUnavailableError("503 service unavailable")


# --- guard -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tako_runtime")
def test_a_guarded_function_keeps_its_arguments_value_and_name() -> None:
    lock = Lock("reindex")

    @lock.guard()
    def refresh(shelf: str, *, deep: bool = False) -> tuple[str, bool, int]:
        """Refreshes."""
        assert lock.holder() is not None
        return shelf, deep, current_ctx().fence

    first = refresh("a", deep=True)
    assert first[:2] == ("a", True)
    assert refresh("b")[2] > first[2]
    assert (refresh.__name__, refresh.__doc__) == ("refresh", "Refreshes.")
    assert list(inspect.signature(refresh).parameters) == ["shelf", "deep"]
    assert lock.holder() is None
    with pytest.raises(TypeError):
        refresh()  # type: ignore[call-arg]
    assert lock.holder() is None


@pytest.mark.usefixtures("tako_runtime")
def test_guard_works_bare_and_on_methods() -> None:
    lock = Lock("reindex")

    class Shop:
        @lock.guard
        def refresh(self, shelf: str) -> tuple[Shop, str]:
            assert lock.holder() is not None
            return self, shelf

        @staticmethod
        @lock.guard
        def count() -> int:
            return 3

    shop = Shop()
    assert shop.refresh("a") == (shop, "a")
    assert Shop.count() == 3


@pytest.mark.usefixtures("tako_runtime")
def test_a_guard_waits_unless_told_otherwise(tako_clock: FakeClock, occupy: Occupy) -> None:
    other = occupy("reindex")
    refresh = Lock("reindex").guard(lambda: "ran")
    outcome = in_thread(tako_clock, refresh)
    tako_clock.advance(100)
    assert not outcome
    other.release()
    tako_clock.advance(2.5)
    assert outcome == ["ran"]


@pytest.mark.usefixtures("tako_runtime")
@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize("busy", ["wait", "skip", "raise"])
def test_what_a_guard_does_while_someone_else_holds(
    tako_clock: FakeClock, occupy: Occupy, busy: Any, timeout: float | None
) -> None:
    other = occupy("reindex")
    refresh = Lock("reindex").guard(busy=busy, timeout=timeout)(lambda: "ran")
    outcome = in_thread(tako_clock, refresh)
    if timeout is not None:
        tako_clock.advance(4.9)
        assert not outcome, "with a timeout each of them waits for so long"
        tako_clock.advance(0.2)
    if busy == "skip":
        assert outcome == [None]
    elif busy == "raise" or timeout is not None:
        (error,) = outcome
        assert isinstance(error, CampaignTimeoutError)
        assert error.timeout == (timeout or 0)
        assert error.holder is not None
    else:
        tako_clock.advance(100)
        assert not outcome, "it waits for ever"
        other.release()
        tako_clock.advance(2.5)
        assert outcome == ["ran"]


@pytest.mark.usefixtures("tako_runtime")
@pytest.mark.parametrize("busy", ["skip", "raise"])
@pytest.mark.parametrize("timeout", [None, 0, 5])
def test_a_guard_runs_at_once_when_the_lease_is_free(busy: Any, timeout: float | None) -> None:
    assert Lock("reindex").guard(busy=busy, timeout=timeout)(lambda: "ran")() == "ran"


@pytest.mark.usefixtures("tako_runtime")
def test_a_guard_that_may_wait_runs_when_it_becomes_free_in_time(
    tako_clock: FakeClock, occupy: Occupy
) -> None:
    other = occupy("reindex")
    outcome = in_thread(tako_clock, Lock("reindex").guard(busy="skip", timeout=5)(lambda: "ran"))
    tako_clock.advance(2)
    other.release()
    tako_clock.advance(2.5)
    assert outcome == ["ran"]


@pytest.mark.usefixtures("tako_runtime")
def test_a_guarded_function_that_calls_itself_never_hangs() -> None:
    lock = Lock("reindex")

    @lock.guard
    def waits(depth: int) -> str:
        return "deep" if depth == 0 else waits(depth - 1)

    @lock.guard(busy="skip")
    def skips(depth: int) -> str | None:
        return "deep" if depth == 0 else skips(depth - 1)

    @lock.guard(busy="raise")
    def raises(depth: int) -> str:
        return "deep" if depth == 0 else raises(depth - 1)

    assert waits(0) == skips(0) == raises(0) == "deep"
    with pytest.raises(NotReentrantError):
        waits(1)
    assert skips(1) is None
    with pytest.raises(LeaseBusyError):
        raises(1)
    assert lock.holder() is None


# --- holder ------------------------------------------------------------------------------------


def test_holder_tells_who_since_when_and_for_how_long(world: World) -> None:
    a, b, go = world.host("a"), world.host("b"), Flag()
    assert b.lock().holder() is None, "no record"
    began, held = world.clock.wall(), list[Ctx]()

    def body(ctx: Ctx) -> None:
        held.append(ctx)
        world.clock.wait(go)

    running = world.start(lambda: a.lock().do(body))
    world.advance(4)
    holder = b.lock().holder()
    assert isinstance(holder, Holder)
    assert holder.owner == held[0].lease.owner
    assert (holder.since, holder.fence, holder.left) == (began, held[0].fence, 26.0)
    assert (holder.state, holder.note) == ("held", "")
    assert f"{holder.host}:{holder.pid}" == holder.owner.rpartition(":")[0]
    assert str(holder) == (
        f"{holder.owner} (since 2026-01-01T00:00:00Z, fence {holder.fence}, at most 26 s left)"
    )
    world.advance(60)
    assert b.lock().holder() is not None, "renewed"
    go.set()
    world.advance(0)
    running.result()
    assert b.lock().holder() is None, "released"
    assert b.requests() == ["read"] * 4, "one request each"


def test_holder_of_a_dead_holders_lease_is_none(world: World) -> None:
    a, b, go = world.host("a"), world.host("b"), Flag()
    running = world.start(lambda: a.lock().do(lambda ctx: world.clock.wait(go)))
    a.storage.always("*", unavailable)
    world.advance(29.9)
    assert b.lock().holder() is not None
    world.advance(0.2)
    assert b.lock().holder() is None
    go.set()
    world.advance(60)
    with pytest.raises(LeaseLostError):
        running.result()


# --- break_ and request_handover ---------------------------------------------------------------


def test_breaking_cancels_at_the_next_heartbeat_and_frees_when_the_body_returns(
    world: World,
) -> None:
    a, b, seen = world.host("a"), world.host("b"), list[object]()

    def body(ctx: Ctx) -> str:
        with world.meter.running(ctx):
            begun = world.clock.monotonic()
            ctx.wait(600)
            seen.append(world.clock.monotonic() - begun)
            seen.append(ctx.cause)
        return "too late"

    running = world.start(lambda: a.lock().do(body))
    world.advance(3)
    shown = b.lock().holder()
    assert shown is not None
    b.lock().break_(shown, by="ops@shop")
    broken = b.lock().holder()
    assert broken is not None
    assert (broken.state, broken.owner, broken.left) == ("broken", shown.owner, 30.0)
    assert not b.lock().try_do(lambda ctx: pytest.fail("an un-cancelled body overlaps"))
    world.advance(7.1)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert (caught.value.reason, caught.value.value) == (LossReason.BROKEN, "too late")
    assert 9.0 <= seen[0] <= 10.0  # type: ignore[operator]
    assert isinstance(seen[1], LeaseLostError)
    assert b.lock().try_do(lambda ctx: ctx.fence).value > shown.fence  # type: ignore[operator]


def test_breaking_now_frees_at_once(world: World) -> None:
    a, b, go = world.host("a"), world.host("b"), Flag()
    running = world.start(lambda: a.lock().do(lambda ctx: world.clock.wait(go)))
    shown = b.lock().holder()
    assert shown is not None
    b.lock().break_(shown, now=True)
    assert b.lock().holder() is None
    assert b.lock().try_do(lambda ctx: ctx.fence).value > shown.fence  # type: ignore[operator]
    world.advance(10)
    go.set()
    world.advance(1)
    with pytest.raises(LeaseLostError):
        running.result()


def test_breaking_what_has_changed_is_refused_and_names_who_holds_it_now(world: World) -> None:
    """An operator who looked, went for coffee and came back must not break someone else."""
    a, b, go = world.host("a"), world.host("b"), Flag()
    running = world.start(lambda: a.lock().do(lambda ctx: world.clock.wait(go)))
    shown = b.lock().holder()
    assert shown is not None
    world.advance(11)  # a heartbeat
    now = b.lock().holder()
    assert now is not None
    attempts: list[Callable[[], object]] = [
        lambda: b.lock().break_(shown),
        lambda: b.lock().break_(shown, now=True),
        lambda: b.lock().break_(version=shown.version),
        lambda: b.lock().request_handover(shown),
    ]
    for attempt in attempts:
        with pytest.raises(LeaseBusyError) as caught:
            attempt()
        assert str(caught.value) == (
            f'the record of lease "reindex" has changed since it was shown: now held by {now}'
        )
        assert caught.value.holder == now
    go.set()
    world.advance(0)
    running.result()
    with pytest.raises(LeaseBusyError, match=r"has changed since it was shown: it is free$"):
        b.lock().break_(now)


def test_breaking_by_version_alone_works(world: World) -> None:
    a, b, go = world.host("a"), world.host("b"), Flag()
    running = world.start(lambda: a.lock().do(lambda ctx: world.clock.wait(go)))
    shown = b.lock().holder()
    assert shown is not None
    b.lock().break_(version=shown.version, now=True)
    assert b.lock().holder() is None
    world.advance(10)
    go.set()
    world.advance(1)
    with pytest.raises(LeaseLostError):
        running.result()


def test_a_free_lease_cannot_be_broken(world: World) -> None:
    host = world.host()
    host.lock().do(lambda ctx: None)
    version = world.store.read("run-shop-test-reindex", timeout=1).version
    with pytest.raises(UsageError, match=r'^lease "reindex" is free: there is nothing to break$'):
        host.lock().break_(version=version)  # type: ignore[arg-type]


def test_a_hand_over_is_asked_for_once_and_only_of_a_holder(world: World) -> None:
    a, b, go = world.host("a"), world.host("b"), Flag()
    running = world.start(lambda: a.lock().do(lambda ctx: world.clock.wait(go)))
    shown = b.lock().holder()
    assert shown is not None
    b.lock().request_handover(shown, by="deploy 7")
    asked = b.lock().holder()
    assert asked is not None
    assert (asked.owner, asked.fence, asked.state) == (shown.owner, shown.fence, "held")
    with pytest.raises(UsageError, match=r"was asked already, by deploy 7$"):
        b.lock().request_handover(asked, by="deploy 8")
    world.advance(50)
    still = b.lock().holder()
    assert still is not None, "the lease is kept until the body has returned"
    assert still.owner == shown.owner
    go.set()
    world.advance(0)
    assert running.result() is True, "and it is no loss"
    version = world.store.read("run-shop-test-reindex", timeout=1).version
    assert isinstance(version, str)
    dead = Holder("x:1:y", version, "held", None, None, 1.0)
    with pytest.raises(
        UsageError, match=r'^lease "reindex" has no holder that could hand it over$'
    ):
        b.lock().request_handover(dead)


# --- What people try first ---------------------------------------------------------------------


def test_acquire_release_and_locked_say_what_to_write() -> None:
    lock = Lock("reindex")
    calls: list[Callable[[], object]] = [
        lock.acquire,
        lambda: lock.acquire(False),
        lambda: lock.acquire(timeout=5),
    ]
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        assert str(caught.value) == (
            "Lock has no acquire(): write `with lock.hold(timeout=...) as ctx:` or lock.do(fn); "
            "a lease must end with the work it guards"
        )
    with pytest.raises(UsageError) as caught:
        lock.release()
    assert str(caught.value) == (
        "Lock has no release(): the end of `with lock.hold() as ctx:` or of lock.do(fn) is it"
    )
    with pytest.raises(UsageError) as caught:
        lock.locked()
    assert str(caught.value) == (
        "Lock has no locked(): the answer is old when it arrives. To run only if it is free, "
        "write lock.try_do(fn); to see who holds it, lock.holder()"
    )


def test_a_lock_as_a_block_says_what_to_write() -> None:
    with pytest.raises(UsageError) as caught, Lock("reindex"):
        pytest.fail("entered")
    assert str(caught.value) == "write `with lock.hold() as ctx:` in place of `with lock:`"


# --- Not reentrant -----------------------------------------------------------------------------

ITSELF = (
    r'^lease "reindex" is held by the body that asks for it: it would wait for itself for ever\. '
    "Locks are not reentrant; pass the ctx on instead, or use try_do$"
)

NESTED: dict[str, Callable[[Lock], object]] = {
    "do": lambda lock: lock.do(lambda ctx: None),
    "do with a timeout": lambda lock: lock.do(lambda ctx: None, timeout=5),
    "hold": lambda lock: lock.hold().__enter__(),
    "guard": lambda lock: lock.guard(lambda: None)(),
    "guard that skips after a wait": lambda lock: lock.guard(busy="skip", timeout=5)(
        lambda: None
    )(),
}


@pytest.mark.parametrize("other_object", [False, True])
@pytest.mark.parametrize("inner", NESTED)
def test_nesting_one_name_raises_at_once_in_place_of_waiting_for_itself(
    world: World, inner: str, other_object: bool
) -> None:
    host = world.host()
    lock = host.lock()
    requests: list[int] = []

    def body(ctx: Ctx) -> str:
        requests.append(len(host.requests()))
        with pytest.raises(NotReentrantError, match=ITSELF):
            NESTED[inner](host.lock() if other_object else lock)
        requests.append(len(host.requests()))
        assert not ctx.cancelled, "the outer hold is not disturbed"
        return "outer"

    assert lock.do(body) == "outer"
    assert requests[0] == requests[1], "no request is made for it"
    assert lock.holder() is None


def test_nesting_is_found_below_another_name_and_in_each_kind_of_outer_hold(world: World) -> None:
    host = world.host()
    lock, between = host.lock(), host.lock("between")

    def nested(ctx: Ctx) -> None:
        between.do(lambda ctx: lock.do(lambda ctx: None))

    for outer in (
        lambda: lock.do(nested),
        lambda: lock.try_do(nested),
        lock.guard(lambda: nested(current_ctx())),
    ):
        with pytest.raises(NotReentrantError, match=ITSELF):
            outer()
    with lock.hold(), pytest.raises(NotReentrantError, match=ITSELF):
        nested(current_ctx())
    assert lock.holder() is None
    assert between.holder() is None


def test_nesting_is_found_in_a_thread_that_carries_the_ctx(world: World) -> None:
    host = world.host()

    def body(ctx: Ctx) -> list[object]:
        outcome = in_thread(world.clock, ctx.wrap(lambda: host.lock().do(lambda ctx: None)))
        outcome += in_thread(world.clock, ctx.child().wrap(lambda: host.lock().do(lambda c: None)))
        return outcome

    outcome = host.lock().do(body)
    assert [type(error) for error in outcome] == [NotReentrantError, NotReentrantError]


def test_a_thread_that_does_not_carry_the_ctx_waits_and_its_timeout_names_its_own_process(
    world: World,
) -> None:
    """Nothing tells it apart from any other thread: it queues, visibly, for as long as it may."""
    host = world.host()

    outcome: list[Exception] = []

    def waits() -> None:
        try:
            host.lock().do(lambda ctx: pytest.fail("ran"), timeout=5)
        except CampaignTimeoutError as error:
            outcome.append(error)

    def body(ctx: Ctx) -> str:
        world.clock.spawn(waits, "without ctx")
        ctx.wait(6)
        return ctx.lease.owner

    running = world.start(lambda: host.lock().do(body))
    world.advance(7)
    owner = running.result()
    (error,) = outcome
    assert isinstance(error, CampaignTimeoutError)
    assert error.holder is not None
    assert error.holder.owner == owner


def test_try_do_inside_do_is_busy_like_anyone_elses(world: World) -> None:
    host = world.host()

    def body(ctx: Ctx) -> object:
        result = host.lock().try_do(lambda ctx: pytest.fail("ran"))
        with pytest.raises(LeaseBusyError):
            host.lock().do(lambda ctx: pytest.fail("ran"), timeout=0)
        assert result.holder is not None
        assert result.holder.owner == ctx.lease.owner
        return result

    assert host.lock().do(body) == (False, None)


def test_other_names_nest_and_the_same_name_of_another_binding_does_too(world: World) -> None:
    host = world.host()
    elsewhere = Runtime("memory:", app="shop", env="test", clock=world.clock)
    outer = host.lock()
    assert outer.do(lambda ctx: host.lock("inner").do(lambda ctx: "inner")) == "inner"
    other = Lock("reindex").bound_to(elsewhere)
    assert outer.do(lambda ctx: other.do(lambda ctx: "elsewhere")) == "elsewhere"


def test_after_the_outer_hold_is_lost_the_body_may_campaign_again(world: World) -> None:
    """It does not wait for itself then: the lease may be anyone's."""
    host = world.host()
    host.storage.script("write", None, *[unavailable] * 30)

    def body(ctx: Ctx) -> str:
        ctx.wait(600)
        host.storage.heal()
        return host.lock().do(lambda ctx: "again")

    running = world.start(lambda: host.lock().do(body))
    world.advance(120)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.value == "again"


# --- Bodies that would run after the lease has been given back -----------------------------------


async def coroutine(ctx: Ctx) -> None: ...


async def async_generator(ctx: Ctx) -> Any:
    yield


def generator(ctx: Ctx) -> Any:
    yield


class AsyncJob:
    async def __call__(self, ctx: Ctx) -> None: ...

    async def run(self, ctx: Ctx) -> None: ...


class GeneratorJob:
    def __call__(self, ctx: Ctx) -> Any:
        yield


async def two(ctx: Ctx, other: int) -> None: ...


ASYNC: dict[str, tuple[Any, str]] = {
    "function": (coroutine, "coroutine"),
    "async generator": (async_generator, "async_generator"),
    "method": (AsyncJob().run, "AsyncJob.run"),
    "callable": (AsyncJob(), "AsyncJob"),
    "partial": (functools.partial(two, other=1), "two"),
}
GENERATORS: dict[str, tuple[Any, str]] = {
    "function": (generator, "generator"),
    "callable": (GeneratorJob(), "GeneratorJob"),
    "lambda": (lambda ctx: (yield ctx), "<lambda>"),
    "partial": (functools.partial(generator), "generator"),
}
CALLS: dict[str, Callable[[Any], object]] = {
    "do": lambda fn: Lock("reindex").do(fn),
    "try_do": lambda fn: Lock("reindex").try_do(fn),
    "guard": Lock("reindex").guard,
    "guard with options": Lock("reindex").guard(busy="skip"),
}


@pytest.mark.parametrize("case", ASYNC)
@pytest.mark.parametrize("call", CALLS)
def test_an_asynchronous_body_is_refused_with_what_to_write(call: str, case: str) -> None:
    fn, name = ASYNC[case]
    with pytest.raises(UsageError) as caught:
        CALLS[call](fn)
    text = str(caught.value)
    assert name in text
    assert text.endswith(
        " is asynchronous: the lease would be given back before it runs. "
        "Write a plain function; a coroutine writes await asyncio.to_thread(lock.do, body)"
    )


@pytest.mark.parametrize("case", GENERATORS)
@pytest.mark.parametrize("call", CALLS)
def test_a_generator_as_body_is_refused_with_what_to_write(call: str, case: str) -> None:
    fn, name = GENERATORS[case]
    with pytest.raises(UsageError) as caught:
        CALLS[call](fn)
    text = str(caught.value)
    assert name in text
    assert text.endswith(
        " is a generator: the lease would be given back before it runs. "
        "Write a plain function, or `with lock.hold() as ctx:` inside it"
    )


# --- Event loops -------------------------------------------------------------------------------


def call_do(lock: Lock) -> None:
    lock.do(lambda ctx: None)


def call_do_with_no_time(lock: Lock) -> None:
    lock.do(lambda ctx: None, timeout=0)


def call_try_do(lock: Lock) -> None:
    lock.try_do(lambda ctx: None)


def call_hold(lock: Lock) -> None:
    with lock.hold():
        pass


def call_hold_with_no_time(lock: Lock) -> None:
    with lock.hold(timeout=0):
        pass


def call_guarded(lock: Lock) -> None:
    lock.guard(lambda: None)()


def call_guarded_that_skips(lock: Lock) -> None:
    lock.guard(busy="skip")(lambda: None)()


@pytest.mark.usefixtures("tako_runtime")
@pytest.mark.parametrize(
    "call",
    [
        call_do,
        call_do_with_no_time,
        call_try_do,
        call_hold,
        call_hold_with_no_time,
        call_guarded,
        call_guarded_that_skips,
    ],
)
def test_where_an_event_loop_runs_it_warns_once_and_names_to_thread(
    call: Callable[[Lock], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenure, "_warned", False)

    async def main() -> None:
        call(Lock("reindex"))
        call(Lock("reindex"))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
    (warning,) = [w for w in caught if w.category is EventLoopWarning]
    assert str(warning.message) == (
        "tako_sync blocks the thread that calls it, and an event loop is running in this one; "
        "write: await asyncio.to_thread(relock.do, body)"
    )
    lines, first = inspect.getsourcelines(call)
    assert warning.filename == __file__
    assert first < warning.lineno < first + len(lines), "it points at the user's own call"
    assert issubclass(EventLoopWarning, RuntimeWarning)


@pytest.mark.usefixtures("tako_runtime")
def test_what_the_warning_names_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenure, "_warned", False)

    async def main() -> object:
        return await asyncio.to_thread(Lock("reindex").do, lambda ctx: "in a thread")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(main()) == "in a thread"
        Lock("reindex").do(lambda ctx: "no loop here")


# --- Locks as values ---------------------------------------------------------------------------


@pytest.mark.usefixtures("tako_runtime")
def test_a_lock_is_its_name_when_pickled_copied_or_shown(occupy: Occupy) -> None:
    lock = Lock("reindex")
    assert repr(lock) == "Lock('reindex')"
    for same in (pickle.loads(pickle.dumps(lock)), copy.copy(lock), copy.deepcopy(lock)):
        assert type(same) is Lock
        assert same.name == "reindex"
        with lock.hold():
            assert not same.try_do(lambda ctx: None), "two locks of one name are the same lock"
    with pytest.raises(AttributeError):
        lock.name = "other"  # type: ignore[misc, unused-ignore]


def test_a_lock_follows_the_binding_of_its_process_unless_it_is_bound(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    lock = Lock("reindex")
    with binding.rebound(a.runtime):
        lock.do(lambda ctx: None)
    with binding.rebound(b.runtime):
        lock.do(lambda ctx: None)
        lock.bound_to(a.runtime).holder()
    assert a.requests() == ["read", "write", "write", "read"]
    assert b.requests() == ["read", "write", "write"]


# --- Errors as values --------------------------------------------------------------------------

SOMEONE = Holder("host:7:abc", "12", "held", None, 5, 21.0, "pod 7")

SAMPLES: dict[type[TakoError], TakoError] = {
    errors.TakoError: errors.TakoError("base"),
    errors.ConfigurationError: errors.ConfigurationError("wrong name"),
    errors.UsageError: errors.UsageError("wrong call"),
    errors.NotReentrantError: errors.NotReentrantError("itself"),
    errors.LeaseBusyError: errors.LeaseBusyError("reindex", SOMEONE),
    errors.CampaignTimeoutError: errors.CampaignTimeoutError("reindex", 2.5, SOMEONE),
    errors.LeaseLostError: errors.LeaseLostError("reindex", LossReason.TAKEN, 5, {"rows": 3}),
    errors.CtxCancelledError: errors.CtxCancelledError("over"),
    errors.CtxDeadlineError: errors.CtxDeadlineError("late"),
    errors.HandoverRequestedError: errors.HandoverRequestedError("deploy 7"),
    errors.ShutdownError: errors.ShutdownError("the process was sent SIGTERM"),
    errors.NotAssuredError: errors.NotAssuredError(5.0, 3.25),
    errors.NameCollisionError: errors.NameCollisionError("run-a-b-c", "a/b/c", "a-b/c/d"),
    errors.RecordUnreadableError: errors.RecordUnreadableError("reindex", "run", "empty", "9"),
    errors.BackendError: errors.BackendError("base"),
    errors.VersionConflictError: errors.VersionConflictError("412"),
    errors.BackendUnavailableError: errors.BackendUnavailableError("429", retry_after=1.5),
    errors.BackendDeniedError: errors.BackendDeniedError("403"),
}

KINDS = [
    kind
    for _name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, TakoError) and kind.__module__ == errors.__name__
]


def again_by_pickle(protocol: int, value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, protocol))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "again",
    [*(functools.partial(again_by_pickle, n) for n in range(6)), copy.copy, copy.deepcopy],
    ids=[*(f"pickle {n}" for n in range(6)), "copy", "deepcopy"],
)
def test_every_error_survives_the_way_to_another_process(
    kind: type[TakoError], again: Callable[[TakoError], TakoError]
) -> None:
    error = SAMPLES[kind]  # a new error needs a sample here
    same = again(error)
    assert type(same) is kind
    assert str(same) == str(error)
    assert same.args == error.args
    assert vars(same) == vars(error)
    assert isinstance(same, Exception)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_made_anew_from_its_args_as_json_keeps_them(kind: type[TakoError]) -> None:
    """Celery's results are JSON unless told otherwise."""
    error = SAMPLES[kind]
    same = kind(*json.loads(json.dumps(error.args)))
    assert str(same) == str(error)
    lost = {"holder": None, "value": None}
    assert {**vars(same), **lost} == {**vars(error), **lost}
    again = kind(*same.args)
    assert (str(again), vars(again)) == (str(same), vars(same))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_found_at_the_top_of_the_package(kind: type[TakoError]) -> None:
    assert getattr(tako, kind.__name__) is kind
    assert kind.__name__ in tako.__all__
    assert kind.__doc__


def test_what_a_backend_has_caught_will_do_as_its_message() -> None:
    caught: Any = OSError(5, "input/output error")
    assert str(errors.BackendUnavailableError(caught)) == str(caught)


def test_an_error_of_a_users_own_survives_as_those_of_ours() -> None:
    error = OfAUser("reindex", 7)
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(same), str(same), same.shop, same.lease) == (OfAUser, str(error), 7, "reindex")


class OfAUser(LeaseBusyError):
    def __init__(self, lease: str, shop: int) -> None:
        super().__init__(lease)
        self.shop = shop


def test_a_note_survives_the_way_to_another_process() -> None:
    error = errors.LeaseLostError("reindex", LossReason.TAKEN, 5)
    tenure.note_loss(error, errors.LeaseLostError("other", LossReason.EXPIRED, 3))
    same = pickle.loads(pickle.dumps(error))
    assert same.__notes__ == error.__notes__  # type: ignore[attr-defined]
    assert "(reason: expired, fence: 3)" in same.__notes__[0]


def test_the_kinds_of_errors_are_told_apart_by_type() -> None:
    """Lost, busy, out of time, wrong settings, unreachable: no caller compares messages."""
    families = [
        errors.LeaseLostError,
        errors.LeaseBusyError,
        errors.ConfigurationError,
        errors.UsageError,
        errors.CtxCancelledError,
        errors.BackendUnavailableError,
        errors.BackendDeniedError,
        errors.VersionConflictError,
    ]
    for kind in families:
        others = [other for other in families if other is not kind]
        assert not issubclass(kind, tuple(others))
    assert LossReason.TAKEN == "taken"
    assert f"{LossReason.TAKEN}" == "taken"
    assert str(errors.LeaseLostError("reindex", LossReason.TAKEN, 5)) == (
        'lease "reindex" was lost while held (ttl expired or forcibly taken) — work after the '
        "loss point may not have run"
    )


def test_thirty_two_threads_on_one_lock_never_meet(world: World) -> None:
    lock, inside, most = world.host().lock(), [0], [0]

    def body(ctx: Ctx) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        with world.meter.running(ctx):
            ctx.wait(0.01)
        inside[0] -= 1

    running = [world.start(lambda: [lock.do(body) for _ in range(5)]) for _ in range(32)]
    world.advance(60)
    for one in running:
        one.result()
    assert most == [1]
    assert len(world.meter.fences) == 160
    assert threading.active_count() < 20
