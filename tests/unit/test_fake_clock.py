"""FakeClock: the order of wake-ups, settling, threads it does not own, events that do not tell."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest
from freezegun import freeze_time

from tako_sync.abc import Task
from tako_sync.flag import Flag
from tako_sync.testing import clock as module
from tako_sync.testing.clock import FakeClock

NEVER = 30.0  # real seconds: only a broken test waits for so long
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture
def stop() -> Iterator[Flag]:
    flag = Flag()
    yield flag
    flag.set()


def started(target, name="own") -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def finish(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(NEVER)
        assert not thread.is_alive(), thread.name


# --- Time ------------------------------------------------------------------------------


def test_time_stands_still_until_it_is_advanced() -> None:
    clock = FakeClock(start=50.0)
    assert clock.monotonic() == clock.monotonic() == 50.0
    clock.advance(2.5)
    assert clock.monotonic() == 52.5


def test_the_time_of_day_moves_with_the_clock_and_by_steps() -> None:
    clock = FakeClock()
    assert clock.wall() == datetime(2026, 1, 1, tzinfo=timezone.utc)
    clock.advance(90)
    clock.step_wall(-3600)
    assert clock.wall() == datetime(2025, 12, 31, 23, 1, 30, tzinfo=timezone.utc)
    assert clock.monotonic() == 1_000_090.0


def test_chance_repeats_itself_for_a_seed() -> None:
    one, same, other = FakeClock(seed=7), FakeClock(seed=7), FakeClock(seed=8)
    draws = [one.random() for _ in range(5)]
    assert draws == [same.random() for _ in range(5)]
    assert draws != [other.random() for _ in range(5)]
    assert all(0 <= draw < 1 for draw in draws)


@pytest.mark.parametrize("seconds", [-1, -1e-9, math.nan, math.inf, -math.inf, True, False])
def test_an_advance_that_is_no_step_forward_is_refused(seconds: float) -> None:
    clock = FakeClock()
    with pytest.raises(ValueError, match="from 0 up"):
        clock.advance(seconds)
    assert clock.monotonic() == 1_000_000.0


def test_a_second_advance_at_the_same_time_is_refused(stop: Flag) -> None:
    clock = FakeClock()
    errors: list[str] = []

    def greedy() -> None:
        clock.wait(stop, 1)
        try:
            clock.advance(1)
        except RuntimeError as error:
            errors.append(str(error))

    clock.spawn(greedy, "greedy")
    clock.advance(5)
    assert errors == [f"{threading.current_thread().name} is advancing this clock already"]
    clock.advance(1)  # and the refusal left nothing behind


# --- Waiting ---------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, -1, -math.inf, math.nan])
@pytest.mark.parametrize("event", [Flag(), threading.Event()], ids=["flag", "event"])
def test_a_wait_without_time_returns_at_once(event: threading.Event, timeout: float) -> None:
    assert FakeClock().wait(event, timeout) is False


@pytest.mark.parametrize("kind", [Flag, threading.Event])
def test_a_wait_for_a_set_event_returns_at_once(kind: type[threading.Event]) -> None:
    event = kind()
    event.set()
    assert FakeClock().wait(event) is True
    assert FakeClock().wait(event, 0) is True


@pytest.mark.parametrize("kind", [Flag, threading.Event])
def test_a_timeout_ends_with_time_and_not_before(kind: type[threading.Event]) -> None:
    clock = FakeClock()
    answers: list[tuple[bool, float]] = []
    clock.spawn(lambda: answers.append((clock.wait(kind(), 10), clock.monotonic())), "waiter")
    clock.advance(9.999)
    assert answers == []
    clock.advance(0.001)
    assert answers == [(False, 1_000_010.0)]


@pytest.mark.parametrize("kind", [Flag, threading.Event])
def test_setting_an_event_wakes_its_waiter_without_an_advance(
    kind: type[threading.Event],
) -> None:
    clock, event = FakeClock(), kind()
    answers: list[bool] = []
    task = clock.spawn(lambda: answers.append(clock.wait(event)), "waiter")
    clock.wait_for_waiters(1)
    event.set()
    finish(task.thread)  # type: ignore[attr-defined]
    assert answers == [True]


@pytest.mark.parametrize("kind", [Flag, threading.Event])
def test_an_advance_first_settles_who_has_been_woken_before_it(
    kind: type[threading.Event],
) -> None:
    clock, event, noted = FakeClock(), kind(), []

    def waiter() -> None:
        clock.wait(event, 10)
        time.sleep(0.02)
        noted.append(clock.monotonic())

    clock.spawn(waiter, "waiter")
    clock.wait_for_waiters(1)
    event.set()
    clock.advance(100)
    assert noted == [1_000_000.0]


def test_an_event_set_by_a_woken_thread_wakes_its_waiter_within_the_instant() -> None:
    clock, noted = FakeClock(), []
    relay = [Flag(), threading.Event(), Flag(), threading.Event()]

    def runner(mine: threading.Event, theirs: threading.Event | None) -> None:
        clock.wait(mine)
        noted.append(clock.monotonic())
        if theirs is not None:
            theirs.set()

    for mine, theirs in zip(relay, [*relay[1:], None], strict=True):
        clock.spawn(lambda mine=mine, theirs=theirs: runner(mine, theirs), "runner")
    clock.spawn(lambda: (clock.wait(Flag(), 3), relay[0].set()), "start")
    clock.advance(10)
    assert noted == [1_000_003.0] * 4


def test_a_flag_whose_answer_depends_on_the_time_is_seen_at_the_next_instant() -> None:
    clock = FakeClock()
    deadline = clock.monotonic() + 5

    class Deadline(Flag):
        def is_set(self) -> bool:
            return super().is_set() or clock.monotonic() >= deadline

    noted: list[tuple[bool, float]] = []
    clock.spawn(lambda: noted.append((clock.wait(Deadline()), clock.monotonic())), "waiter")
    clock.spawn(lambda: clock.wait(Flag(), 6), "another")
    clock.advance(4)
    assert noted == []
    clock.advance(10)
    assert noted == [(True, 1_000_006.0)]


def test_ten_waits_of_a_tenth_end_within_a_second() -> None:
    clock = FakeClock()
    count: list[float] = []

    def waiter() -> None:
        while len(count) < 10 and not clock.wait(Flag(), 0.1):
            count.append(clock.monotonic())

    clock.spawn(waiter, "waiter")
    clock.advance(1)
    assert len(count) == 10
    assert clock.monotonic() == pytest.approx(1_000_001, abs=1e-6)


def test_a_loop_that_waits_for_what_is_left_of_a_deadline_ends_there() -> None:
    clock, ends = FakeClock(start=1e6 + 1 / 3), []

    def waiter(seconds: float) -> None:
        until = clock.monotonic() + seconds
        while clock.monotonic() < until:
            clock.wait(Flag(), (until - clock.monotonic()) / 3 if seconds < 1 else seconds / 7)
        ends.append(seconds)

    for seconds in (0.1, 0.7, 1.1, 2.3):
        clock.spawn(lambda seconds=seconds: waiter(seconds), "waiter")
    clock.advance(3)
    assert ends == [0.1, 0.7, 1.1, 2.3]


# --- Order -----------------------------------------------------------------------------


def test_who_is_due_wakes_in_order_of_time_then_of_arrival() -> None:
    clock, woken = FakeClock(), []
    for name, seconds in [("c", 3), ("a", 1), ("d", 3), ("b", 2), ("e", 3)]:
        clock.spawn(
            lambda name=name, seconds=seconds: (
                clock.wait(Flag(), seconds),
                woken.append((name, clock.monotonic() - 1_000_000)),
            ),
            name,
        )
    clock.advance(10)
    assert woken == [("a", 1), ("b", 2), ("c", 3), ("d", 3), ("e", 3)]


def test_a_woken_thread_settles_before_the_next_one_is_woken() -> None:
    clock, steps = FakeClock(), []

    def slow(name: str) -> None:
        clock.wait(Flag(), 1)
        steps.append(f"{name} woken")
        time.sleep(0.01)
        steps.append(f"{name} done")

    clock.spawn(lambda: slow("a"), "a")
    clock.spawn(lambda: slow("b"), "b")
    clock.advance(1)
    assert steps == ["a woken", "a done", "b woken", "b done"]


def test_a_thread_spawned_in_an_advance_runs_when_its_turn_comes() -> None:
    clock, steps = FakeClock(), []

    def parent() -> None:
        clock.wait(Flag(), 1)
        clock.spawn(lambda: steps.append("child"), "child")
        time.sleep(0.01)
        steps.append("parent")

    clock.spawn(parent, "parent")
    clock.advance(1)
    assert steps == ["parent", "child"]


def test_a_slow_start_of_a_thread_does_not_disturb_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, steps, start = FakeClock(patience=0.1), [], threading.Thread.start

    def slow_start(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(0.15)

    def parent() -> None:
        clock.wait(Flag(), 1)
        clock.spawn(lambda: steps.append("child"), "child")
        steps.append("parent")

    clock.spawn(parent, "parent")
    monkeypatch.setattr(threading.Thread, "start", slow_start)
    clock.advance(1)
    assert steps == ["parent", "child"]


def test_a_thread_that_cannot_be_started_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stop, errors = FakeClock(), Flag(), []

    def no_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def parent() -> None:
        clock.wait(stop, 1)
        try:
            clock.spawn(lambda: None, "child")
        except RuntimeError as error:
            errors.append(str(error))

    clock.spawn(parent, "parent")
    monkeypatch.setattr(threading.Thread, "start", no_start)
    with pytest.raises(RuntimeError, match="start new thread"):
        clock.spawn(lambda: None, "child")
    clock.advance(1)
    assert errors == ["can't start new thread"]
    assert clock.waiters == ()


def play(seed: int) -> list[str]:
    """Run a small crowd that waits, wakes and spawns by chance; return what it did."""
    clock, steps = FakeClock(seed=seed), []
    flags = [Flag() for _ in range(40)]

    def member(number: int) -> None:
        for turn in range(5):
            clock.wait(flags[number], round(clock.random() * 3, 1) + 0.1)
            steps.append(f"{number}.{turn} {clock.monotonic():.3f}")
            flags[int(clock.random() * 20)].set()
            if clock.random() < 0.2 and number < 20:
                clock.spawn(lambda: member(number + 20), f"m{number + 20}")

    for number in range(20):
        clock.spawn(lambda number=number: member(number), f"m{number}")
        clock.wait_for_waiters(number + 1)
    clock.advance(60)
    assert clock.waiters == ()
    return steps


def test_the_same_program_makes_the_same_steps_at_each_run() -> None:
    first = play(3)
    assert len(first) >= 100
    assert all(play(3) == first for _ in range(5))
    assert play(4) != first


# --- Settling --------------------------------------------------------------------------


def test_an_advance_returns_when_the_threads_have_ended() -> None:
    clock = FakeClock()
    tasks = [clock.spawn(lambda: clock.wait(Flag(), 1), f"t{n}") for n in range(10)]
    clock.advance(1)
    assert not any(task.is_alive() for task in tasks)
    assert not any(task.thread.is_alive() for task in tasks)  # type: ignore[attr-defined]


def test_a_thread_that_raises_has_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = FakeClock(), Flag()
    monkeypatch.setattr(threading, "excepthook", lambda args: told.set())
    task = clock.spawn(lambda: [][clock.wait(Flag(), 1)], "raises")
    clock.spawn(lambda: clock.wait(told), "waits for the hook")
    clock.advance(1)
    assert not task.is_alive()
    assert told.is_set()
    assert clock.waiters == ()


def test_a_user_s_own_thread_is_waited_for_after_its_first_wait() -> None:
    clock, steps = FakeClock(), []

    def own() -> None:
        clock.wait(Flag(), 1)
        time.sleep(0.02)
        steps.append("woken")
        clock.wait(Flag(), 1)
        time.sleep(0.02)
        steps.append("ended")

    thread = started(own)
    clock.wait_for_waiters(1)
    clock.advance(1)
    assert steps == ["woken"]
    clock.advance(1)
    assert steps == ["woken", "ended"]
    finish(thread)


def test_a_thread_blocked_in_something_else_does_not_hang_an_advance() -> None:
    clock, real = FakeClock(patience=0.1), threading.Event()
    steps: list[str] = []

    def blocked() -> None:
        clock.wait(Flag(), 1)
        real.wait(NEVER)
        steps.append("unblocked")
        clock.wait(Flag(), 1)
        steps.append("back")

    task = clock.spawn(blocked, "blocked")
    begun = time.perf_counter()
    clock.advance(5)
    assert 0.1 <= time.perf_counter() - begun < 5
    assert steps == []
    begun = time.perf_counter()
    for _ in range(50):  # and the patience is spent once, not at each advance
        clock.advance(1)
    assert time.perf_counter() - begun < 1
    real.set()
    clock.wait_for_waiters(1)
    clock.advance(1)
    assert steps == ["unblocked", "back"]
    assert not task.is_alive()


def test_a_thread_that_works_for_longer_than_the_patience_is_waited_for() -> None:
    clock, done = FakeClock(patience=0.05), []

    def work() -> None:
        clock.wait(Flag(), 1)
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            sum(str(n).count("1") for n in range(50))
        done.append(clock.monotonic())

    clock.spawn(work, "works")
    clock.advance(100)
    assert done == [1_000_001.0]


def test_a_thread_that_joins_one_it_has_woken_costs_a_tenth_of_the_patience() -> None:
    clock, go, steps = FakeClock(patience=5), Flag(), []

    def other() -> None:
        clock.wait(go)
        steps.append("other")

    thread = started(other)
    clock.wait_for_waiters(1)

    def joins() -> None:
        clock.wait(Flag(), 1)
        go.set()
        thread.join(NEVER)
        steps.append("joined")

    clock.spawn(joins, "joins")
    begun = time.perf_counter()
    clock.advance(1)
    assert steps == ["other", "joined"]
    assert time.perf_counter() - begun < 4


def test_the_join_of_a_task_waits_on_the_clock() -> None:
    clock, stop, answers = FakeClock(), Flag(), []
    task = clock.spawn(lambda: clock.wait(stop), "slow to stop")

    def joins() -> None:
        task.join(5)
        answers.append((task.is_alive(), clock.monotonic()))
        stop.set()
        task.join()
        answers.append((task.is_alive(), clock.monotonic()))

    clock.spawn(joins, "joins")
    clock.advance(60)
    assert answers == [(True, 1_000_005.0), (False, 1_000_005.0)]


def test_a_task_cannot_join_itself() -> None:
    clock, errors = FakeClock(), []
    tasks: list[Task] = []

    def itself() -> None:
        clock.wait(Flag(), 1)
        try:
            tasks[0].join()
        except RuntimeError as error:
            errors.append(str(error))

    tasks.append(clock.spawn(itself, "itself"))
    clock.advance(1)
    assert errors == ["cannot join current thread"]


def test_a_thread_that_neither_waits_nor_ends_fails_the_advance_and_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LIMIT", 0.3)
    clock, enough = FakeClock(), threading.Event()

    def spins_for_ever() -> None:
        clock.wait(Flag(), 1)
        while not enough.is_set():
            sum(str(n).count("1") for n in range(50))

    task = clock.spawn(spins_for_ever, "spinner")
    with pytest.raises(AssertionError, match=r"(?s)spinner neither waits.*spins_for_ever"):
        clock.advance(1)
    enough.set()
    finish(task.thread)  # type: ignore[attr-defined]


def test_after_a_failed_advance_events_wake_their_waiters_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LIMIT", 0.3)
    clock, enough, go = FakeClock(patience=60), threading.Event(), Flag()

    def spins() -> None:
        clock.wait(Flag(), 1)
        go.set()
        while not enough.is_set():
            sum(str(n).count("1") for n in range(50))

    waiter = clock.spawn(lambda: clock.wait(go), "waiter")
    spinner = clock.spawn(spins, "spinner")
    with pytest.raises(AssertionError):
        clock.advance(1)
    finish(waiter.thread)  # type: ignore[attr-defined]
    enough.set()
    finish(spinner.thread)  # type: ignore[attr-defined]


def test_the_main_thread_may_wait_while_another_advances() -> None:
    clock, done = FakeClock(), threading.Event()

    def hand() -> None:
        clock.wait_for_waiters(1)
        clock.advance(10)
        done.set()

    thread = started(hand)
    assert clock.wait(Flag(), 5) is False
    assert clock.monotonic() == 1_000_005.0
    done.wait(NEVER)  # blocked in something else: the patience ends the advance
    finish(thread)
    assert clock.monotonic() == 1_000_010.0


def test_a_thread_that_advances_is_not_waited_for_by_itself() -> None:
    clock, over = FakeClock(patience=60), Flag()

    def hand() -> None:
        clock.wait_for_waiters(1)
        clock.advance(1)
        over.set()

    thread = started(hand)
    clock.wait(Flag(), 1)
    clock.wait(over)  # from here on this thread is known to the clock, and runs
    clock.advance(1)
    assert clock.monotonic() == 1_000_002.0
    finish(thread)


# --- Failure messages ------------------------------------------------------------------


def test_too_few_waiters_are_listed() -> None:
    clock, stop = FakeClock(), Flag()
    clock.spawn(lambda: clock.wait(stop), "patient")
    clock.spawn(lambda: clock.wait(stop, 2.5), "hasty")
    clock.wait_for_waiters(2)
    with pytest.raises(AssertionError, match=r"3 threads .* 0\.01 s: ") as caught:
        clock.wait_for_waiters(3, timeout=0.01)
    assert "patient (no timeout)" in str(caught.value)
    assert "hasty (2.5 s)" in str(caught.value)
    assert {(waiting.name, waiting.left) for waiting in clock.waiters} == {
        ("patient", None),
        ("hasty", 2.5),
    }
    assert repr(clock) == "<FakeClock at 1e+06, 2 waiting>"
    stop.set()
    clock.advance(0)
    assert clock.waiters == ()
    with pytest.raises(AssertionError, match="nobody"):
        clock.wait_for_waiters(1, timeout=0)


# --- Views -----------------------------------------------------------------------------


def test_views_share_the_time_line_and_differ_in_offset_rate_and_time_of_day() -> None:
    clock = FakeClock(start=1000.0)
    ahead, fast = clock.view(offset=500.0, wall_offset=-60.0), clock.view(rate=1.25)
    assert (ahead.monotonic(), fast.monotonic()) == (1500.0, 1250.0)
    assert clock.wall() - ahead.wall() == timedelta(seconds=60)
    woken: list[str] = []
    ahead.spawn(lambda: (ahead.wait(Flag(), 10), woken.append("ahead")), "ahead")
    fast.spawn(lambda: (fast.wait(Flag(), 10), woken.append("fast")), "fast")
    clock.advance(8)
    assert woken == ["fast"]
    assert fast.monotonic() == 1260.0
    clock.advance(2)
    assert woken == ["fast", "ahead"]


def test_a_view_waits_for_events_and_draws_from_the_shared_chance() -> None:
    clock, same, event = FakeClock(seed=1), FakeClock(seed=1), Flag()
    view, answers = clock.view(rate=2), []
    clock.spawn(lambda: answers.append(view.wait(event)), "waiter")
    clock.advance(1)
    event.set()
    clock.advance(0)
    assert answers == [True]
    assert view.random() == same.random()


# --- Surroundings ----------------------------------------------------------------------


def test_it_works_while_freezegun_stops_the_world() -> None:
    with freeze_time("2020-02-02"):
        clock, real, steps = FakeClock(patience=0.1), threading.Event(), []

        def blocked() -> None:
            clock.wait(Flag(), 1)
            real.wait(NEVER)

        thread = started(blocked)
        clock.wait_for_waiters(1)
        clock.spawn(lambda: (clock.wait(threading.Event(), 2), steps.append("woken")), "waiter")
        clock.advance(2)
        assert steps == ["woken"]
        assert clock.wall() == datetime(2026, 1, 1, 0, 0, 2, tzinfo=timezone.utc)
        with pytest.raises(AssertionError):
            clock.wait_for_waiters(1, timeout=0.05)
        real.set()
        finish(thread)


@pytest.mark.skipif(sys.platform == "win32", reason="no interval timer there")
def test_a_keyboard_interrupt_leaves_a_wait_and_the_clock_usable() -> None:
    clock = FakeClock()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for kind in (Flag, threading.Event):
            event = kind()
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            with pytest.raises(KeyboardInterrupt):
                clock.wait(event, 10)
            assert clock.waiters == ()
            clock.spawn(lambda event=event: clock.wait(event, 10), "waiter")
            clock.wait_for_waiters(1)
            event.set()
            clock.advance(20)
            assert clock.waiters == ()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(sys.platform == "win32", reason="no interval timer there")
def test_a_signal_handler_may_set_a_flag_whatever_it_interrupts() -> None:
    clock, flag, woken = FakeClock(), Flag(), []
    clock.spawn(lambda: woken.append(clock.wait(flag)), "waiter")
    clock.wait_for_waiters(1)
    before = signal.signal(signal.SIGALRM, lambda *_: flag.set())
    try:
        with clock._lock:  # where it hurts most: in the midst of the clock's own work
            signal.raise_signal(signal.SIGALRM)
        clock.advance(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert woken == [True]


@needs_fork
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_clock_of_its_own_without_the_parent_s_threads() -> None:
    clock, stop = FakeClock(), Flag()
    clock.spawn(lambda: clock.wait(stop, 10), "parent's")
    clock.wait_for_waiters(1)
    with clock._lock:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                woken: list[bool] = []
                assert clock.waiters == ()
                clock.spawn(lambda: woken.append(clock.wait(Flag(), 1)), "child's")
                clock.advance(1)
                assert woken == [False]
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(clock.waiters) == 1
    stop.set()
    clock.advance(0)


# --- Size ------------------------------------------------------------------------------


def test_600_heartbeats_take_well_under_two_seconds(stop: Flag) -> None:
    clock, beats = FakeClock(), []

    def heart() -> None:
        while not clock.wait(stop, 10):
            beats.append(clock.monotonic())

    clock.spawn(heart, "heart")
    begun = time.perf_counter()
    clock.advance(6000)
    assert time.perf_counter() - begun < 2
    assert beats == [1_000_000.0 + 10 * n for n in range(1, 601)]


@pytest.mark.parametrize("kind", [Flag, threading.Event])
def test_a_thousand_threads_may_wait(kind: type[threading.Event]) -> None:
    clock, stop, beats = FakeClock(), kind(), []

    def heart(number: int) -> None:
        while not clock.wait(stop, 10):
            beats.append(number)

    for number in range(1000):
        clock.spawn(lambda number=number: heart(number), f"heart {number}")
    clock.wait_for_waiters(1000)
    clock.advance(10)
    assert sorted(beats) == list(range(1000))
    stop.set()
    clock.advance(0)
    assert clock.waiters == ()
