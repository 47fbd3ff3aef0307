"""From a release to the next body's begin."""

from __future__ import annotations

import statistics
import threading
import time

from tako_sync.backends import MemoryLease
from tako_sync.ctx import Ctx
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime


def run() -> None:
    store = MemoryLease()
    one = Runtime(store, policy=LeasePolicy(poll=0.5))
    other = Runtime(store, policy=LeasePolicy(poll=0.5))
    _report("in one process", [_once(one, one) for _ in range(30)])
    _report("across processes, poll 0.5 s", [_once(one, other) for _ in range(20)])


def _once(first: Runtime, second: Runtime) -> float:
    held, moments = threading.Event(), []

    def hold(ctx: Ctx) -> None:
        held.set()
        ctx.wait(0.2)
        moments.append(time.perf_counter())

    def follow(ctx: Ctx) -> None:
        moments.append(time.perf_counter())

    holder = threading.Thread(target=Lock("bench").bound_to(first).do, args=(hold,))
    holder.start()
    held.wait()
    Lock("bench").bound_to(second).do(follow)
    holder.join()
    return moments[1] - moments[0]


def _report(name: str, times: list[float]) -> None:
    median, worst = statistics.median(times) * 1e3, max(times) * 1e3
    print(f"{name:32} median {median:8.1f} ms   worst {worst:8.1f} ms")
