"""An overlap meter: did two bodies of one name ever run with un-cancelled contexts?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tako_sync.ctx import Ctx

CLEAN: Final = "no overlap"


class OverlapMeter:
    """Watches the bodies of one lease, in one process, and finds every overlap.

    A cancelled ctx stays cancelled. So two bodies overlap if and only if one of them is still
    un-cancelled at the very moment when the other begins, and looking then finds them all.

    Attributes:
        fences: of all bodies, in the order in which they began.
        overlaps: a sentence for each pair that overlapped.
    """

    def __init__(self) -> None:
        self.fences: list[int] = []
        self.overlaps: list[str] = []
        self._running: list[Ctx] = []
        self._lock = threading.Lock()

    @contextmanager
    def running(self, ctx: Ctx) -> Iterator[Ctx]:
        """Wrap a body: ``with meter.running(ctx): ...``."""
        with self._lock:
            self._begin(ctx)
        try:
            yield ctx
        finally:
            with self._lock:
                self._running.remove(ctx)

    def _begin(self, ctx: Ctx) -> None:
        if not ctx.cancelled:  # a body that begins cancelled has not begun, for our purpose
            for other in self._running:
                if not other.cancelled:
                    self.overlaps.append(f"fence {ctx.fence} began under fence {other.fence}")
            if self.fences and ctx.fence <= max(self.fences):
                self.overlaps.append(f"fence {ctx.fence} came after {max(self.fences)}")
        self.fences.append(ctx.fence)
        self._running.append(ctx)

    def check(self) -> None:
        """Raise AssertionError if any two bodies overlapped or a fence did not rise."""
        assert not self.overlaps, "; ".join(self.overlaps)
