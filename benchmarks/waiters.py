"""A hundred threads of one process waiting for one name, in virtual time: storage reads."""

from __future__ import annotations

import threading

from tako_sync.backends import MemoryLease
from tako_sync.lock import Lock
from tako_sync.runtime import Runtime
from tako_sync.testing import FakeClock, FaultyBackend, occupy


def run() -> None:
    for threads in (1, 100):
        print(f"{threads:4} waiting for 60 s: {_reads(threads)} reads")


def _reads(threads: int) -> int:
    clock = FakeClock()
    storage = FaultyBackend(MemoryLease(clock), clock, prompt=True)
    runtime = Runtime(storage, clock=clock)
    elsewhere = occupy("bench", Runtime(storage.backend, clock=clock))
    lock = Lock("bench").bound_to(runtime)
    waiting = [
        threading.Thread(target=lock.do, args=(lambda ctx: None,), daemon=True)
        for _ in range(threads)
    ]
    for thread in waiting:
        thread.start()
    clock.wait_for_waiters(threads + 1)
    clock.advance(60)
    reads = storage.count("read")
    elsewhere.release()
    clock.advance(10)
    for thread in waiting:
        thread.join()
    return reads
