"""A thousand campaigners started at one instant, in virtual time: how their requests spread."""

from __future__ import annotations

import threading
from collections import Counter

from tako_sync.backends import MemoryLease
from tako_sync.lock import Lock
from tako_sync.runtime import Runtime
from tako_sync.testing import FakeClock, FaultyBackend, occupy

CAMPAIGNERS = 1000
SECONDS = 30


def run() -> None:
    clock = FakeClock()
    storage = FaultyBackend(MemoryLease(clock), clock, prompt=True)
    elsewhere = occupy("bench", Runtime(storage.backend, clock=clock))
    locks = [Lock("bench").bound_to(Runtime(storage, clock=clock)) for _ in range(CAMPAIGNERS)]
    waiting = [
        threading.Thread(target=lock.do, args=(lambda ctx: None,), daemon=True) for lock in locks
    ]
    began = clock.monotonic()
    for thread in waiting:
        thread.start()
    clock.wait_for_waiters(CAMPAIGNERS + 1)
    first_looks = storage.count("read")
    storage.clear()
    clock.advance(SECONDS)
    buckets = Counter(int((call.at - began) * 10) for call in storage.calls)
    mean = sum(buckets.values()) / (SECONDS * 10)
    print(f"{CAMPAIGNERS} campaigners, {first_looks} first looks at once; then for {SECONDS} s:")
    print(f"requests in 100 ms: mean {mean:.1f}, most {max(buckets.values())}")
    storage.clear()
    elsewhere.release()
    clock.advance(3)
    writes, reads = storage.count("write"), storage.count("read")
    print(f"first 3 s after the release: {writes} writes, {reads} reads")
    for _ in range(CAMPAIGNERS):
        if not any(thread.is_alive() for thread in waiting):
            break
        clock.advance(10)
