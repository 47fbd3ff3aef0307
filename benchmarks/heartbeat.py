"""A thousand leases in one process: how late their renewals are, and what one costs."""

from __future__ import annotations

import resource
from contextlib import ExitStack

from benchmarks.measure import percentile
from tako_sync.backends import MemoryLease
from tako_sync.clock import SystemClock
from tako_sync.events import Event, Lost, Renewed
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

LEASES = 1000


def run() -> None:
    late: list[float] = []
    lost: list[Event] = []

    def listen(event: Event) -> None:
        if isinstance(event, Renewed):
            late.append(event.late)
        elif isinstance(event, Lost):
            lost.append(event)

    runtime = Runtime(MemoryLease(), policy=LeasePolicy(ttl=15), listeners=[listen])
    with Lock("warm-up").bound_to(runtime).hold():
        pass
    before = _resident()
    with ExitStack() as stack:
        for number in range(LEASES):
            stack.enter_context(Lock(f"bench-{number}").bound_to(runtime).hold())
        after = _resident()
        SystemClock().wait(Flag(), 20)
    each = (after - before) / LEASES
    print(f"{LEASES} leases held for 20 s at ttl 15 s: {len(late)} renewals, {len(lost)} lost")
    print(f"late: median {percentile(late, 0.5):.3f} s, p99 {percentile(late, 0.99):.3f} s")
    print(f"resident memory: {each / 1024:.1f} KB each, thread included")


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
