"""Nothing grows with use: threads, descriptors, memory. And nothing is left when `do` returns."""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tako_sync import alarm
from tako_sync.backends.memory import MemoryLease
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.ctx import Ctx
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

NEVER = 40.0


def count(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except FileNotFoundError:
        return 0  # not Linux: the other counts must do


def threads() -> int:
    return max(_thread._count() + 1, count("/proc/self/task"))


def descriptors() -> int:
    return count("/proc/self/fd")


def settle(wanted: int) -> None:
    """Wait for the bare threads of the alarms, which end by themselves."""
    until = time.monotonic() + NEVER
    while threads() > wanted:
        assert time.monotonic() < until, f"{threads()} threads, not {wanted}: they do not end"
        time.sleep(0.002)


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Give a function that says how many bytes are in use that were allocated in here."""
    gc.collect()
    tracemalloc.start()

    def in_use() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    try:
        yield in_use
    finally:
        tracemalloc.stop()


def memory(policy: LeasePolicy | None = None) -> Runtime:
    return Runtime(MemoryLease(), app="shop", env="test", policy=policy)


# --- What is left when a call returns ----------------------------------------------------------


@pytest.mark.parametrize("way", ["do", "hold", "try_do", "raises", "renewed", "busy", "waits"])
@pytest.mark.parametrize("storage", ["memory", "sqlite"])
def test_after_a_call_exactly_those_threads_run_that_ran_before(
    storage: str, way: str, tmp_path: Path
) -> None:
    store = MemoryLease() if storage == "memory" else SqliteLease(tmp_path / "leases")
    policy = LeasePolicy(ttl=0.6 if way == "renewed" else 30, poll=0.05)
    runtime = Runtime(store, app="shop", env="test", policy=policy)
    relock = Lock("reindex").bound_to(runtime)
    bare = threads()
    relock.do(lambda ctx: None)  # opens what is opened once
    settle(bare)
    before, fds = threading.enumerate(), descriptors()

    if way == "do":
        relock.do(lambda ctx: None)
    elif way == "hold":
        with relock.hold():
            pass
    elif way == "try_do":
        relock.try_do(lambda ctx: None)
    elif way == "raises":
        with pytest.raises(ValueError):
            relock.do(lambda ctx: int("x"))
    elif way == "renewed":
        relock.do(lambda ctx: ctx.wait(0.5))
    elif way == "busy":
        relock.do(lambda ctx: relock.try_do(lambda inner: None))
    else:
        other = Lock("reindex").bound_to(Runtime(store, app="shop", env="test", policy=policy))
        with other.hold(), pytest.raises(TimeoutError):
            relock.do(lambda ctx: None, timeout=0.2)

    if storage == "memory":
        assert threading.enumerate() == before, "at once, without a moment of grace"
    # A request's thread has answered before it ends; a slow release goes on in its own.
    until = time.monotonic() + NEVER
    while set(threading.enumerate()) - set(before):
        assert time.monotonic() < until
        time.sleep(0.002)
    settle(bare)
    assert descriptors() == fds
    store.close()


def test_the_bare_thread_that_sleeps_for_the_next_hold_ends_by_itself_within_a_moment() -> None:
    before = threads()
    runtime = memory()
    Lock("reindex").bound_to(runtime).do(lambda ctx: None)
    begun = time.monotonic()
    settle(before)
    # A twentieth of a second on an idle machine; the bound is for one that is not.
    assert time.monotonic() - begun < alarm._IDLE + 10


def test_holds_in_a_row_share_one_bare_thread() -> None:
    before, most = threads(), 0
    relock = Lock("reindex").bound_to(memory())
    for _ in range(500):
        relock.do(lambda ctx: None)
        most = max(most, threads() - before)
    assert most <= 2, "one, or one that is about to end and the next"
    settle(before)


# --- Many --------------------------------------------------------------------------------------


@pytest.mark.timeout(200)  # a dozen seconds each, on a machine that has nothing else to do
@pytest.mark.parametrize(("names", "rounds"), [(10_000, 5), (1_000, 50)])
def test_a_hundred_thousand_holds_over_ten_thousand_names_leave_nothing_behind(
    names: int, rounds: int
) -> None:
    """The table of the memory keeps its records for two hours: it is warm after one round."""
    runtime = memory()
    locks = [Lock(f"name-{number}").bound_to(runtime) for number in range(names)]
    quarter = locks[: names // 4]
    before = threads(), descriptors()

    def a_round() -> None:
        for lock in locks:
            lock.do(_nothing)

    a_round()
    a_round()
    resident = resident_bytes()
    fences: list[int] = []
    for _ in range(rounds - 2):
        a_round()
        fences.append(locks[0].do(lambda ctx: ctx.fence))
    assert resident_bytes() - resident < 10_000_000, "over tens of thousands of holds"
    with traced() as in_use:
        for lock in quarter:
            lock.do(_nothing)  # what takes the place of something older counts as new
        warm = in_use()
        for lock in quarter:
            lock.do(_nothing)
        assert in_use() - warm < 500_000, "at next to nothing each"
    assert fences == sorted(set(fences))
    settle(before[0])
    assert descriptors() == before[1]
    assert len(runtime._known) <= 1024, "names are forgotten"
    assert not gc.garbage


def resident_bytes() -> int:
    gc.collect()
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def _nothing(ctx: Ctx) -> None:
    pass


@pytest.mark.parametrize("storage", ["memory", "sqlite"])
def test_memory_is_flat_over_many_holds_of_one_name(storage: str, tmp_path: Path) -> None:
    store = MemoryLease() if storage == "memory" else SqliteLease(tmp_path / "leases")
    relock = Lock("reindex").bound_to(Runtime(store, app="shop", env="test"))
    several = 600 if storage == "memory" else 60
    for _ in range(several // 2):
        relock.do(_nothing)
    with traced() as in_use:
        for _ in range(several // 2):
            relock.do(_nothing)
        warm = in_use()
        for _ in range(several):
            relock.do(_nothing)
        assert in_use() - warm < 60_000
    store.close()


def test_holds_leave_no_cycles_for_the_collector() -> None:
    """Where the collector is turned off, or comes late, they would pile up all the same."""
    relock = Lock("reindex").bound_to(memory())
    for _ in range(50):
        relock.do(_nothing)
    gc.collect()
    gc.disable()
    try:
        for _ in range(200):
            relock.do(_nothing)
        left = gc.collect()
    finally:
        gc.enable()
    assert left < 200, f"{left} objects were left to the collector by 200 holds"


def test_a_thousand_holds_at_once_end_without_a_trace() -> None:
    runtime = memory(LeasePolicy(ttl=60))
    before, fds = threads(), descriptors()
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            ctxs = [
                stack.enter_context(Lock(f"name-{number}").bound_to(runtime).hold())
                for number in range(1000)
            ]
            assert not any(ctx.cancelled for ctx in ctxs)
            assert len({ctx.lease.owner for ctx in ctxs}) == 1000
        settle(before)
    assert descriptors() == fds
    for number in range(1000):
        assert runtime.known(runtime.identity(f"name-{number}").key).lease is None


def test_ten_thousand_busy_answers_leave_nothing_behind() -> None:
    runtime = memory()
    relock = Lock("reindex").bound_to(runtime)
    other = Lock("reindex").bound_to(Runtime(runtime.backend, app="shop", env="test"))
    with other.hold():
        assert not any(relock.try_do(_nothing) for _ in range(500))
        before, fds, resident = threads(), descriptors(), resident_bytes()
        assert not any(relock.try_do(_nothing) for _ in range(8500))
        assert resident_bytes() - resident < 5_000_000
        with traced() as in_use:
            assert not any(relock.try_do(_nothing) for _ in range(100))
            warm = in_use()
            assert not any(relock.try_do(_nothing) for _ in range(900))
            assert in_use() - warm < 60_000
        assert threads() <= before
        assert descriptors() == fds


def test_waiters_that_give_up_leave_nothing_behind() -> None:
    runtime = memory(LeasePolicy(ttl=30, poll=0.01))
    relock = Lock("reindex").bound_to(runtime)
    may_end, held = Flag(), Flag()
    holder = threading.Thread(
        target=relock.do, args=(lambda ctx: (held.set(), may_end.wait()),), daemon=True
    )
    holder.start()
    assert held.wait(NEVER)

    def wait_in_vain(times: int) -> None:
        for _ in range(times):
            with pytest.raises(TimeoutError):
                relock.do(_nothing, timeout=0.001)

    wait_in_vain(50)
    known = runtime.known(runtime.identity("reindex").key)
    with traced() as in_use:
        wait_in_vain(100)
        warm = in_use()
        wait_in_vain(300)
        assert in_use() - warm < 60_000
    assert not known.line
    assert known.lease is not None
    assert len(known.lease.freed._watchers) == 0, "nobody waits for it any more"
    may_end.set()
    holder.join(NEVER)


def test_a_ctx_that_lives_for_long_does_not_collect_its_children() -> None:
    parent = Ctx.background()
    runtime = memory()
    relock = Lock("reindex").bound_to(runtime)
    for _ in range(100):
        relock.do(_nothing, ctx=parent)
    watchers = len(parent.flag._watchers)
    for _ in range(1000):
        relock.do(_nothing, ctx=parent)
        parent.child().on_cancel(int)()
        parent.child(timeout=10).remaining()
    gc.collect()
    assert len(parent.flag._watchers) <= watchers


# --- SQLite ------------------------------------------------------------------------------------


def test_descriptors_and_threads_are_flat_over_many_holds_on_a_file(tmp_path: Path) -> None:
    store = SqliteLease(tmp_path / "leases")
    runtime = Runtime(store, app="shop", env="test")
    before = threads()

    def work(names: range) -> None:
        for number in names:
            Lock(f"name-{number % 50}").bound_to(runtime).do(_nothing)

    work(range(20))
    fds = descriptors()
    workers = [
        threading.Thread(target=partial(work, range(start, start + 50)), daemon=True)
        for start in (0, 50, 100, 150)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(NEVER)
        assert not worker.is_alive()
    assert descriptors() == fds
    settle(before)
    store.close()
    assert descriptors() <= fds
