"""One worker process of the demo: takes orders on standard input, reports on standard output.

``python -m tako_sync.demo.worker NAME LEASES INDEX FOLDER TTL POLL``
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tako_sync.backends.sqlite import SqliteLease
from tako_sync.clock import SystemClock
from tako_sync.ctx import Ctx
from tako_sync.demo.index import Index, StaleFenceError, chunks, sources
from tako_sync.errors import LeaseLostError
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime


class Worker:
    """Rebuilds the index under ``Lock("reindex")``, and tells the director of each step."""

    def __init__(self, name: str, runtime: Runtime, index: Index, folder: Path) -> None:
        self._name = name
        self._clock = runtime.clock
        self._lock = Lock("reindex").bound_to(runtime)
        self._index = index
        self._folder = folder
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._go_on = Flag()

    def serve(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        self._report("ready")
        while (order := self._orders.get()) != "leave":
            self._go_on = Flag()
            try:
                if order == "try":
                    if not self._lock.try_do(self._rebuild):
                        self._report("collapsed")
                else:
                    self._lock.do(self._rebuild)
            except LeaseLostError as loss:
                self._report("lost", fence=loss.fence, reason=loss.reason.value)

    def _rebuild(self, ctx: Ctx) -> None:
        self._report("begin", ctx)
        paths = sources(self._folder)
        pieces = list(chunks(paths))
        self._index.begin(ctx.fence)
        for number, piece in enumerate(pieces):
            if number == len(pieces) // 2:
                self._report("midway", ctx)
                self._wait_for_the_director(ctx)
            try:
                self._index.add(piece, ctx.fence)
            except StaleFenceError:
                self._report("refused", fence=ctx.fence)
            ctx.check()  # raises the loss
            self._report("step", ctx)
        self._report("end", ctx, pages=self._index.count())

    def _wait_for_the_director(self, ctx: Ctx) -> None:
        forget = ctx.on_cancel(self._go_on.set)
        self._clock.wait(self._go_on)
        forget()

    def _listen(self) -> None:
        for line in sys.stdin:
            order = line.strip()
            if order == "go on":
                self._go_on.set()
            else:
                self._orders.put(order)
        os._exit(0)  # the director is gone: nobody waits for a report

    def _report(self, what: str, ctx: Ctx | None = None, **facts: Any) -> None:
        now = self._clock.monotonic()
        if ctx is not None:
            facts.update(fence=ctx.fence, deadline=now + ctx.remaining())
        print(json.dumps({"at": now, "who": self._name, "what": what, **facts}), flush=True)


def main(arguments: list[str]) -> None:
    logging.getLogger("tako_sync").addHandler(logging.NullHandler())  # the reports say it all
    name, leases, index, folder, ttl, poll = arguments
    policy = LeasePolicy(ttl=float(ttl), poll=float(poll))
    runtime = Runtime(
        SqliteLease(leases), app="gallery", env="demo", policy=policy, clock=SystemClock()
    )
    Worker(name, runtime, Index(Path(index)), Path(folder)).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
