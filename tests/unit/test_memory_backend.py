"""MemoryLease beyond the conformance suite: what it forgets, and who may call it when."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from tako_sync.abc import ABSENT, Interval, Version
from tako_sync.backends.memory import MemoryLease
from tako_sync.clock import SystemClock
from tako_sync.errors import VersionConflictError
from tako_sync.record import MAX_TTL
from tako_sync.testing import FakeClock

FORGOTTEN_AFTER = 2 * MAX_TTL


def write(store: MemoryLease, key: str, expect: object = ABSENT, body: bytes = b"x") -> Version:
    return store.write(key, body, expect=expect, timeout=1)  # type: ignore[arg-type]


def keys(store: MemoryLease) -> list[str]:
    return sorted(store.list("", timeout=1))


class StrikingClock(SystemClock):
    """Does something in the midst of a call, as a signal's handler or a finalizer would."""

    strike: Callable[[], object] | None = None

    def monotonic(self) -> float:
        strike, self.strike = self.strike, None
        if strike is not None:
            strike()
        return super().monotonic()


def test_it_is_prompt_and_its_clock_is_one() -> None:
    assert MemoryLease.prompt is True
    assert MemoryLease().clock_skew == 0.0
    assert MemoryLease().describe() == "memory:"


def test_its_time_is_the_clocks() -> None:
    clock = FakeClock()
    store = MemoryLease(clock)
    begun = clock.monotonic()
    clock.advance(3)
    write(store, "a")
    clock.advance(4)
    seen = store.read("a", timeout=1)
    assert seen.written == Interval.exactly(begun + 3)
    assert seen.now == Interval.exactly(begun + 7)
    assert store.read("b", timeout=1).now == Interval.exactly(begun + 7)


def test_two_stores_know_nothing_of_each_other() -> None:
    one, another = MemoryLease(), MemoryLease()
    write(one, "a")
    assert keys(another) == []


def test_versions_rise_over_the_whole_store_and_are_never_used_twice() -> None:
    store = MemoryLease()
    versions = [write(store, f"key-{number}") for number in range(5)]
    versions.append(write(store, "key-0", versions[0]))
    assert [int(version) for version in versions] == sorted({int(v) for v in versions})


def test_what_was_not_written_for_two_hours_is_forgotten() -> None:
    clock = FakeClock()
    store = MemoryLease(clock)
    write(store, "idle")
    clock.advance(FORGOTTEN_AFTER)
    write(store, "busy")
    assert keys(store) == ["busy", "idle"], "not yet: it is only just two hours"
    clock.advance(1)
    write(store, "another")
    assert keys(store) == ["another", "busy"]
    assert store.read("idle", timeout=1).version is ABSENT


def test_what_is_renewed_is_not_forgotten_and_holds_up_nothing_behind_it() -> None:
    clock = FakeClock()
    store = MemoryLease(clock)
    version = write(store, "renewed")
    for number in range(100):
        write(store, f"idle-{number}")
    for _ in range(3):
        clock.advance(FORGOTTEN_AFTER / 2)
        version = write(store, "renewed", version)
    assert keys(store) == ["renewed"]


def test_reading_keeps_nothing_alive() -> None:
    clock = FakeClock()
    store = MemoryLease(clock)
    write(store, "idle")
    for _ in range(4):
        clock.advance(FORGOTTEN_AFTER / 3)
        store.read("idle", timeout=1)
    write(store, "another")
    assert keys(store) == ["another"]


def test_the_versions_of_a_forgotten_key_do_not_come_again() -> None:
    """A holder that slept through it must not find its version valid for another's record."""
    clock = FakeClock()
    store = MemoryLease(clock)
    old = write(store, "idle")
    clock.advance(FORGOTTEN_AFTER + 1)
    write(store, "another")
    with pytest.raises(VersionConflictError):
        write(store, "idle", old)
    assert write(store, "idle") != old
    with pytest.raises(VersionConflictError):
        write(store, "idle", old)


def test_a_refused_write_does_not_keep_a_key_alive() -> None:
    clock = FakeClock()
    store = MemoryLease(clock)
    write(store, "idle")
    clock.advance(FORGOTTEN_AFTER)
    with pytest.raises(VersionConflictError):
        write(store, "idle")
    clock.advance(1)
    write(store, "another")
    assert keys(store) == ["another"]


def test_its_size_follows_the_keys_in_use_not_those_ever_used() -> None:
    clock = FakeClock()
    store = MemoryLease(clock)
    for number in range(500):
        write(store, f"once-{number}")
        clock.advance(MAX_TTL / 10)
        assert len(store._table) <= 21


def test_a_handler_that_strikes_inside_a_read_may_use_the_store() -> None:
    """Its lock is reentrant: else Ctrl-C at the wrong moment would lock it up for ever."""
    clock = StrikingClock()
    store = MemoryLease(clock)
    version = write(store, "a")
    clock.strike = lambda: write(store, "a", version, b"by the handler")
    seen = store.read("a", timeout=1)
    assert seen.version == version  # the state before: one consistent moment
    assert store.read("a", timeout=1).body == b"by the handler"


@pytest.mark.parametrize("create", [True, False])
def test_of_a_write_and_the_one_that_struck_inside_it_one_is_applied(create: bool) -> None:
    clock = StrikingClock()
    store = MemoryLease(clock)
    expect = ABSENT if create else write(store, "a")
    clock.strike = lambda: write(store, "a", expect, b"by the handler")
    with pytest.raises(VersionConflictError):
        write(store, "a", expect, b"by the interrupted")
    assert store.read("a", timeout=1).body == b"by the handler"


def test_a_handler_that_raises_inside_leaves_the_store_usable_by_others() -> None:
    clock = StrikingClock()
    store = MemoryLease(clock)

    def interrupt() -> None:
        raise KeyboardInterrupt

    clock.strike = interrupt
    with pytest.raises(KeyboardInterrupt):
        write(store, "a", body=b"never")
    thread = threading.Thread(target=lambda: write(store, "a"), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert store.read("a", timeout=1).body == b"x"


def test_increments_of_many_threads_are_all_there() -> None:
    store, threads, each = MemoryLease(), 8, 200
    write(store, "sum", body=b"0")

    def add() -> None:
        done = 0
        while done < each:
            seen = store.read("sum", timeout=1)
            try:
                write(store, "sum", seen.version, b"%d" % (int(seen.body) + 1))
                done += 1
            except VersionConflictError:
                pass

    workers = [threading.Thread(target=add, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(50)
    assert store.read("sum", timeout=1).body == b"%d" % (threads * each)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_goes_on_with_a_copy_though_a_thread_of_the_parent_was_inside() -> None:
    clock = StrikingClock()
    store = MemoryLease(clock)
    version = write(store, "a")
    inside, leave = threading.Event(), threading.Event()

    def stay_inside() -> None:
        clock.strike = lambda: (inside.set(), leave.wait(30))
        store.read("a", timeout=1)

    thread = threading.Thread(target=stay_inside, daemon=True)
    thread.start()
    assert inside.wait(30)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(15)
        status = 1
        try:
            write(store, "a", version, b"the child's")
            status = 0
        finally:
            os._exit(status)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        leave.set()
        thread.join(30)
    assert store.read("a", timeout=1).body == b"x"
