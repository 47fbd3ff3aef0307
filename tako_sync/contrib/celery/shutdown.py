"""How a running task hears that its worker is shutting down, in whatever process it runs.

Celery tells the main process; in a prefork pool tasks run in its children, which hear nothing of
a warm shutdown. One byte of memory that they share with it since the fork is enough.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from celery.signals import worker_shutting_down

from tako_sync.clock import SystemClock
from tako_sync.ctx import Ctx
from tako_sync.errors import ShutdownError
from tako_sync.flag import Flag

_LOOK: Final = 0.5
"""Seconds between two looks."""
_CLOCK: Final = SystemClock()

_told: Final = mmap.mmap(-1, 1)


@worker_shutting_down.connect(weak=False)
def tell(**_kwargs: Any) -> None:
    """Note that this worker is shutting down. Called in a signal handler."""
    _told[0] = 1


@contextmanager
def cancelled_by_shutdown() -> Iterator[Ctx]:
    """Yield a ctx that is cancelled with a ``ShutdownError`` once the worker shuts down."""
    ctx, over = Ctx.background(_CLOCK), Flag()

    def watch() -> None:
        while not _told[0]:
            if _CLOCK.wait(over, _LOOK):
                return
        ctx.cancel(ShutdownError("the worker is shutting down"))

    _CLOCK.spawn(watch, "tako-celery-shutdown")
    try:
        yield ctx
    finally:
        over.set()
