"""Nothing grows with use: threads, descriptors, memory."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tako_sync.backends import MemoryLease, SqliteLease
from tako_sync.clock import SystemClock
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.runtime import Runtime
from tako_sync.testing import occupy

NAMES = 10_000
ROUNDS = 10

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def system_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident() -> float:
    """Return megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def do_nothing(ctx: object) -> None:
    pass


@on_linux
@pytest.mark.timeout(300)
def test_a_hundred_thousand_holds_of_ten_thousand_names_leave_nothing_behind() -> None:
    runtime = Runtime(MemoryLease())
    locks = [Lock(f"name-{number}").bound_to(runtime) for number in range(NAMES)]
    threads = threading.enumerate()
    for lock in locks:  # the table itself, one record a name
        lock.try_do(do_nothing)
    memory, open_files, tasks = resident(), descriptors(), system_threads()
    for _ in range(ROUNDS - 1):
        for lock in locks:
            assert lock.try_do(do_nothing)
    assert threading.enumerate() == threads, "right after the last one"
    assert descriptors() == open_files
    assert system_threads() <= tasks
    assert resident() - memory < 5


@on_linux
def test_the_bare_thread_that_served_short_holds_ends_by_itself() -> None:
    tasks = system_threads()
    lock = Lock("reindex").bound_to(Runtime(MemoryLease()))
    assert lock.try_do(do_nothing)
    clock = SystemClock()
    until = clock.monotonic() + 10
    while system_threads() > tasks:
        assert clock.monotonic() < until, "it was to end within a twentieth of a second"
        clock.wait(Flag(), 0.01)


def test_right_after_do_no_thread_is_left() -> None:
    lock = Lock("reindex").bound_to(Runtime(MemoryLease()))
    threads = threading.enumerate()
    for _ in range(50):
        assert lock.do(lambda ctx: 42) == 42
        assert threading.enumerate() == threads


@on_linux
def test_a_thousand_holds_at_once_leave_nothing_behind() -> None:
    runtime = Runtime(MemoryLease())
    locks = [Lock(f"name-{number}").bound_to(runtime) for number in range(1_000)]
    threads, memory, open_files = threading.enumerate(), 0.0, descriptors()
    for round_ in range(4):
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock.hold(timeout=10))
        memory = memory or resident()
        assert threading.enumerate() == threads, round_
    assert descriptors() == open_files
    assert resident() - memory < 10


@on_linux
def test_ten_thousand_busy_answers_leave_nothing_behind() -> None:
    runtime = Runtime(MemoryLease())
    lock = Lock("reindex").bound_to(runtime)
    with occupy("reindex", runtime):
        for _ in range(1_000):
            lock.try_do(do_nothing)
        memory, threads, open_files = resident(), threading.enumerate(), descriptors()
        for _ in range(9_000):
            assert not lock.try_do(do_nothing)
        assert threading.enumerate() == threads
        assert descriptors() == open_files
        assert resident() - memory < 3


@on_linux
def test_holds_on_a_file_leave_no_descriptor_and_no_thread_behind(tmp_path: Path) -> None:
    storage = SqliteLease(tmp_path / "leases.sqlite3")
    runtime = Runtime(storage)
    locks = [Lock(f"name-{number}").bound_to(runtime) for number in range(20)]
    for lock in locks:
        lock.do(do_nothing)
    threads, open_files, memory = threading.enumerate(), descriptors(), resident()
    for _ in range(10):
        for lock in locks:
            lock.do(do_nothing)
            assert threading.enumerate() == threads
    assert descriptors() == open_files
    assert resident() - memory < 5
    storage.close()
