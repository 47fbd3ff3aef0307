"""Flag: one way, each watcher called once, and no lock that an interrupt could leave taken."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import Counter

import pytest

from tako_sync.flag import Flag

NEVER = 30.0


def test_a_flag_is_a_threading_event() -> None:
    assert isinstance(Flag(), threading.Event)


def test_a_flag_is_set_once_and_stays_set() -> None:
    flag = Flag()
    assert not flag.is_set()
    flag.set()
    flag.set()
    assert flag.is_set()


def test_it_says_in_its_repr_whether_it_is_set() -> None:
    flag = Flag()
    assert repr(flag) == "<Flag not set>"
    flag.set()
    assert repr(flag) == "<Flag set>"


def test_clear_is_refused() -> None:
    flag = Flag()
    flag.set()
    with pytest.raises(RuntimeError, match="never cleared"):
        flag.clear()
    assert flag.is_set()


def test_the_watchers_are_called_once_in_the_order_in_which_they_came() -> None:
    flag, called = Flag(), []
    for number in range(5):
        flag.watch(lambda number=number: called.append(number))
    flag.set()
    flag.set()
    assert called == [0, 1, 2, 3, 4]


def test_a_watcher_of_a_set_flag_is_called_at_once() -> None:
    flag, called = Flag(), []
    flag.set()
    flag.watch(lambda: called.append(flag.is_set()))
    assert called == [True]


def test_a_watcher_that_has_been_withdrawn_is_not_called() -> None:
    flag, called = Flag(), []

    def watcher() -> None:
        called.append("called")

    flag.watch(watcher)
    flag.unwatch(watcher)
    flag.unwatch(watcher)  # and a second time does no harm
    flag.set()
    assert called == []


def test_a_watcher_may_add_and_withdraw_watchers() -> None:
    flag, called = Flag(), []

    def withdrawn() -> None:
        called.append("withdrawn")

    def first() -> None:
        flag.unwatch(withdrawn)
        flag.watch(lambda: called.append("added"))
        called.append("first")

    flag.watch(first)
    flag.watch(withdrawn)
    flag.set()
    assert called == ["added", "first"]


@pytest.mark.parametrize("timeout", [0, -1, 0.01])
def test_a_wait_that_is_over_says_that_the_flag_is_not_set(timeout: float) -> None:
    begun = time.perf_counter()
    assert Flag().wait(timeout) is False
    assert time.perf_counter() - begun >= timeout


@pytest.mark.parametrize("timeout", [None, 0, 1, 1e12, float(threading.TIMEOUT_MAX)])
def test_a_wait_for_a_set_flag_returns_at_once(timeout: float | None) -> None:
    flag = Flag()
    flag.set()
    assert flag.wait(timeout) is True


@pytest.mark.parametrize("timeout", [None, NEVER, 1e12])
def test_a_waiter_wakes_when_the_flag_is_set(timeout: float | None) -> None:
    flag, answers = Flag(), []
    waiting = threading.Thread(target=lambda: answers.append(flag.wait(timeout)), daemon=True)
    waiting.start()
    while not flag._watchers:
        time.sleep(0.001)
    flag.set()
    waiting.join(NEVER)
    assert answers == [True]


def test_a_wait_leaves_no_watcher_behind() -> None:
    flag = Flag()
    for _ in range(3):
        flag.wait(0.001)
    assert flag._watchers == []


def test_each_watcher_is_called_exactly_once_however_set_and_watch_race() -> None:
    for round_ in range(60):
        flag, calls = Flag(), Counter[tuple[int, int]]()
        lock = threading.Lock()
        begin = threading.Barrier(8)

        def note(who: tuple[int, int], calls=calls, lock=lock) -> None:
            with lock:
                calls[who] += 1

        def watcher(thread: int, flag=flag, begin=begin, note=note) -> None:
            begin.wait(NEVER)
            for number in range(20):
                flag.watch(lambda who=(thread, number): note(who))

        def setter(flag=flag, begin=begin, pause=round_ * 5e-6) -> None:
            begin.wait(NEVER)
            time.sleep(pause)
            flag.set()

        threads = [threading.Thread(target=watcher, args=(n,), daemon=True) for n in range(6)]
        threads += [threading.Thread(target=setter, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(NEVER)
        assert calls == Counter({(t, n): 1 for t in range(6) for n in range(20)})


def test_every_one_of_many_waiters_wakes() -> None:
    flag, answers = Flag(), []
    threads = [
        threading.Thread(target=lambda: answers.append(flag.wait(NEVER)), daemon=True)
        for _ in range(100)
    ]
    for thread in threads:
        thread.start()
    flag.set()
    for thread in threads:
        thread.join(NEVER)
    assert answers == [True] * 100


@pytest.mark.skipif(sys.platform == "win32", reason="no interval timer there")
def test_an_interrupt_at_any_moment_leaves_no_lock_taken() -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        for attempt in range(400):
            flag = Flag()
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + attempt % 100))
                for _ in range(20):
                    flag.wait(1e-5)
                flag.set()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            # Whatever was cut short: another thread's set and wait go through.
            other = threading.Thread(target=lambda flag=flag: (flag.set(), flag.wait()))
            other.daemon = True
            other.start()
            other.join(NEVER)
            assert not other.is_alive()
            assert flag.wait(NEVER)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 100
