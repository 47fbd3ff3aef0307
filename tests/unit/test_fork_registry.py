"""The one fork hook: who is called in a forked child, and what the child knows of itself."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest

from tako_sync import fork

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Thing:
    def __init__(self) -> None:
        self.resets = 0
        self.lock = threading.Lock()
        fork.reset_in_child(self)

    def after_fork_in_child(self) -> None:
        self.resets += 1
        self.lock = threading.Lock()


def holds_in_child(check: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_generation_differs_in_a_child_and_in_a_grandchild() -> None:
    mine = fork.generation()
    assert fork.generation() == mine

    def child() -> bool:
        childs = fork.generation()
        return childs != mine and holds_in_child(lambda: fork.generation() not in (mine, childs))

    assert holds_in_child(child)
    assert fork.generation() == mine


def test_a_thing_is_reset_once_in_the_child_and_never_in_the_parent() -> None:
    thing, another = Thing(), Thing()
    assert holds_in_child(lambda: (thing.resets, another.resets) == (1, 1))
    assert (thing.resets, another.resets) == (0, 0)


def test_a_thing_whose_reset_asks_as_anybody_does_is_reset_once() -> None:
    class Asking(Thing):
        def after_fork_in_child(self) -> None:
            super().after_fork_in_child()
            self.generation = fork.generation()

    before, asking, behind = Thing(), Asking(), Thing()
    assert holds_in_child(
        lambda: (
            [thing.resets for thing in (before, asking, behind)] == [1, 1, 1]
            and asking.generation == fork.generation()
        )
    )


def test_what_cuts_a_reset_off_has_it_done_once_more() -> None:
    class Struck(Thing):
        def after_fork_in_child(self) -> None:
            super().after_fork_in_child()
            if self.resets == 1:
                raise KeyboardInterrupt

    struck, behind = Struck(), Thing()
    assert holds_in_child(lambda: struck.resets == 2 and behind.resets == 1)


def test_a_lock_held_by_a_thread_of_the_parent_is_usable_in_the_child() -> None:
    thing, taken, done = Thing(), threading.Event(), threading.Event()

    def holder() -> None:
        with thing.lock:
            taken.set()
            done.wait(30)

    thread = threading.Thread(target=holder, daemon=True)
    thread.start()
    assert taken.wait(30)
    try:
        assert holds_in_child(lambda: thing.lock.acquire(timeout=1))
    finally:
        done.set()
        thread.join(30)


def test_a_thing_made_in_the_child_is_reset_in_the_grandchild_only() -> None:
    def child() -> bool:
        thing = Thing()
        return thing.resets == 0 and holds_in_child(lambda: thing.resets == 1)

    assert holds_in_child(child)


def test_a_thing_that_is_gone_is_forgotten() -> None:
    gc.collect()  # what other tests left is not to go in between
    before = len(fork._resettable)
    things = [Thing() for _ in range(5)]
    assert len(fork._resettable) == before + 5
    del things
    gc.collect()
    assert len(fork._resettable) == before


def test_things_come_and_go_in_threads_while_others_fork() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            [Thing() for _ in range(10)]

    threads = [threading.Thread(target=churn, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        kept = Thing()
        assert all(holds_in_child(lambda: kept.resets == 1) for _ in range(10))
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
