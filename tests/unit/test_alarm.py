"""Alarms: no call is missed, none is made that was taken back, and no thread stays."""

from __future__ import annotations

import _thread
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tako_sync import alarm, fork
from tako_sync.alarm import Alarms
from tako_sync.clock import SystemClock
from tako_sync.flag import Flag

NEVER = 30.0


class Range:
    """Alarms on the real clock, and how many bare threads they have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = SystemClock().monotonic
        self.alarms = Alarms(self.now)
        self._living: list[int] = []  # append and pop are atomic
        monkeypatch.setattr(alarm, "_thread", self)

    def start_new_thread(self, run: Callable[[], object], arguments: tuple[()]) -> None:
        def counted() -> None:
            try:
                run()
            finally:
                self._living.pop()

        self._living.append(1)
        _thread.start_new_thread(counted, arguments)

    def call_in(self, seconds: float, fire: Callable[[], object]) -> alarm.Call:
        return self.alarms.call_at(self.now() + seconds, fire, threading.Event())

    @property
    def threads(self) -> int:
        return len(self._living)

    def wait_until_all_have_ended(self) -> None:
        until = time.monotonic() + NEVER
        while self.threads:
            assert time.monotonic() < until, f"{self.threads} threads are left"
            time.sleep(0.002)


@pytest.fixture
def alarms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Range]:
    here = Range(monkeypatch)
    yield here
    here.wait_until_all_have_ended()


def wait(event: threading.Event) -> None:
    assert event.wait(NEVER)


# --- One at a time -------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [-1.0, 0.0, 0.01, 0.049, 0.051, 0.2])
def test_a_call_is_made_once_and_not_before_it_is_due(alarms: Range, delay: float) -> None:
    made: list[float] = []
    fired = Flag()
    due = alarms.now() + delay
    call = alarms.alarms.call_at(
        due, lambda: (made.append(alarms.now()), fired.set()), threading.Event()
    )
    wait(fired)
    assert alarms.alarms.take_back(call) is False, "it has been made"
    alarms.wait_until_all_have_ended()
    assert len(made) == 1
    assert made[0] >= due


@pytest.mark.parametrize("after", [0.0, 0.02, 0.09])
def test_a_call_that_was_taken_back_is_not_made(alarms: Range, after: float) -> None:
    made: list[str] = []
    call = alarms.call_in(0.1, lambda: made.append("made"))
    time.sleep(after)
    if alarms.alarms.take_back(call):
        alarms.wait_until_all_have_ended()
        assert made == []
    assert alarms.alarms.take_back(call) is False, "a second time there is nothing to take back"


def test_a_call_that_is_being_made_cannot_be_taken_back(alarms: Range) -> None:
    inside, over = Flag(), Flag()
    call = alarms.call_in(0, lambda: (inside.set(), over.wait(NEVER)))
    wait(inside)
    assert alarms.alarms.take_back(call) is False
    over.set()


def test_a_sleeper_serves_one_after_the_other_while_it_is_needed(alarms: Range) -> None:
    for _ in range(200):
        assert alarms.alarms.take_back(alarms.call_in(10, pytest.fail))
        assert alarms.threads <= 1
    assert len(alarms.alarms._spare) == 1


def test_a_sleeper_that_sleeps_deeply_is_woken_for_another_call(alarms: Range) -> None:
    call = alarms.call_in(10, pytest.fail)
    until = time.monotonic() + NEVER
    while not call.sleeper._deep:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert alarms.alarms.take_back(call)
    fired = Flag()
    again = alarms.call_in(0.001, fired.set)
    assert again.sleeper is call.sleeper
    assert fired.wait(1.5), "it slept on for the call that was taken back"


def test_a_sleeper_that_nobody_needs_ends_by_itself_at_once(alarms: Range) -> None:
    calls = [alarms.call_in(10, pytest.fail) for _ in range(20)]
    assert alarms.threads == 20
    for call in calls:
        assert alarms.alarms.take_back(call)
    begun = time.monotonic()
    alarms.wait_until_all_have_ended()
    assert time.monotonic() - begun < 10, "a twentieth of a second, on a machine that has time"
    assert alarms.alarms._spare == []


def test_a_sleeper_that_has_ended_leaves_nothing_behind_and_another_comes(alarms: Range) -> None:
    for _ in range(3):
        fired = Flag()
        alarms.call_in(0, fired.set)
        wait(fired)
        alarms.wait_until_all_have_ended()
        assert alarms.alarms._spare == []


def test_a_call_that_could_not_be_made_is_made_later(alarms: Range) -> None:
    made: list[str] = []
    fired = Flag()

    def fire() -> None:
        made.append("tried")
        if len(made) < 3:
            raise MemoryError
        fired.set()

    alarms.call_in(0, fire)
    wait(fired)
    assert made == ["tried"] * 3


# --- What is cut short -----------------------------------------------------------------------


def test_an_interrupt_before_it_is_armed_leaves_no_thread_behind(
    alarms: Range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the choice of a sleeper: nobody knows of that one any more."""

    def strike(self: object, call: object) -> None:
        raise KeyboardInterrupt

    alarms.alarms.take_back(alarms.call_in(10, pytest.fail))
    with monkeypatch.context() as patch:
        patch.setattr(alarm._Sleeper, "arm", strike)
        for _ in range(2):  # one that is there, one that is made
            with pytest.raises(KeyboardInterrupt):
                alarms.call_in(10, pytest.fail)
    alarms.wait_until_all_have_ended()


def test_an_interrupt_between_taking_back_and_putting_aside_leaves_no_thread_behind(
    alarms: Range,
) -> None:
    call = alarms.call_in(10, pytest.fail)
    assert call.sleeper.disarm(call)
    alarms.wait_until_all_have_ended()
    fired = Flag()
    call.sleeper.arm(alarm.Call(alarms.now(), fired.set, threading.Event(), call.sleeper))
    wait(fired)


def test_who_is_slow_to_arm_its_sleeper_finds_it_awake(alarms: Range) -> None:
    """Chosen, and then not heard of for longer than it waits: it has gone, and comes back."""
    alarms.alarms.take_back(alarms.call_in(10, pytest.fail))
    sleeper = alarms.alarms._spare.pop()
    time.sleep(3 * alarm._IDLE)
    fired = Flag()
    sleeper.arm(alarm.Call(alarms.now() + 0.01, fired.set, threading.Event(), sleeper))
    wait(fired)


def test_no_thread_to_be_had_is_told_to_who_asks(
    alarms: Range, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(alarms, "start_new_thread", refuse)
        with pytest.raises(RuntimeError):
            alarms.call_in(0, pytest.fail)
    fired = Flag()
    alarms.call_in(0, fired.set)
    wait(fired)


# --- Processes ---------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_does_not_count_on_the_sleepers_of_its_parent(alarms: Range) -> None:
    assert alarms.alarms.take_back(alarms.call_in(10, pytest.fail))
    assert alarms.alarms._spare
    pid = os.fork()
    if pid == 0:
        fired = Flag()
        alarms.call_in(0.01, fired.set)
        os._exit(0 if fired.wait(NEVER) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert fork.generation() >= 0


def test_alarms_that_nobody_has_any_more_are_forgotten(alarms: Range) -> None:
    gc.collect()
    before = len(fork._resettable)
    for _ in range(10):
        here = Alarms(alarms.now)
        here.take_back(here.call_at(alarms.now() + 10, pytest.fail, threading.Event()))
    del here
    alarms.wait_until_all_have_ended()
    gc.collect()
    assert len(fork._resettable) <= before


# --- Under stress --------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", [alarm._IDLE, 0.0005])  # the shorter, the more come and go
@pytest.mark.parametrize("hurry", [True, False])
def test_of_a_hundred_thousand_calls_none_is_missed_and_none_is_made_that_was_taken_back(
    alarms: Range, hurry: bool, idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is made exactly once or taken back with success: never both, never neither."""
    monkeypatch.setattr(alarm, "_IDLE", idle)
    rounds = 90_000 // 8 if hurry else 10_000 // 8
    wrong: list[str] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        kept: list[tuple[alarm.Call, list[int], float]] = []

        def settle(call: alarm.Call, fired: list[int]) -> None:
            if alarms.alarms.take_back(call):
                if fired:
                    wrong.append("made and taken back")
                taken_back.append(fired)
            else:
                results.append(fired)

        results: list[list[int]] = []
        taken_back: list[list[int]] = []
        for _ in range(rounds):
            fired: list[int] = []
            due = alarms.now() + chance.random() * chance.choice([0.0001, 0.001, 0.1])

            def fire(fired: list[int] = fired, due: float = due) -> None:
                fired.append(1)
                if alarms.now() < due:
                    wrong.append("too early")

            call = alarms.alarms.call_at(due, fire, threading.Event())
            if not hurry or chance.random() < 0.02:
                kept.append((call, fired, due))
                if len(kept) > 20:
                    settle(*kept.pop(chance.randrange(len(kept)))[:2])
            else:
                settle(call, fired)
            if not hurry and chance.random() < 0.2:
                time.sleep(chance.random() * 0.002)
        while kept:  # these are left to be made
            _, fired, _ = kept.pop()
            results.append(fired)
        until = time.monotonic() + NEVER
        while any(not fired for fired in results) and time.monotonic() < until:
            time.sleep(0.005)
        if any(taken_back):
            wrong.append("made after it was taken back")
        if any(len(fired) != 1 for fired in results):
            wrong.append(f"of {len(results)}: {[f for f in results if len(f) != 1][:5]}")

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(55)
        assert not thread.is_alive()
    assert wrong == []


def test_a_call_that_nobody_wants_any_more_is_made_soon_rather_than_slept_for(
    alarms: Range,
) -> None:
    unwanted, made = threading.Event(), threading.Event()
    unwanted.set()
    alarms.alarms.call_at(alarms.now() + 3600, made.set, unwanted)
    assert made.wait(20)
