"""Whether a Singleton's loop runs: here, or, by what its campaign sees, anywhere.

A lease that is held is not yet a loop that runs: one that fails at once is held for a moment each
time. So a loop counts as running once it has outlasted the pause before a restart.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from tako_sync.ctx import Ctx
from tako_sync.events import SingletonDown, SingletonUp
from tako_sync.flag import Flag
from tako_sync.record import Identity, printable
from tako_sync.runtime import Runtime

HEALTHY: Final = "healthy"
STANDBY: Final = "standby"
DOWN: Final = "down"


@frozen
class Health:
    """How a Singleton does, as seen from one process.

    Attributes:
        state: ``healthy``: its loop runs here; ``standby``: this process is ready to take over, or
            about to restart it; ``down``: it has not been running anywhere for ``down_after``.
        reason: why, for people.
        alive: whether this process does its part. False: it does not campaign, or its loop was
            cancelled and has not ended for ``down_after``; only a new process helps.
    """

    state: str
    reason: str
    alive: bool = True

    def __bool__(self) -> bool:
        return self.state != DOWN

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}"


class Vigil:
    """Watches one Singleton for as long as this process campaigns for it.

    Args:
        name: the Singleton's.
        runtime, identity: its lease.
        down_after: seconds without a running loop after which it is down.
    """

    def __init__(self, name: str, runtime: Runtime, identity: Identity, down_after: float) -> None:
        self._name = name
        self._runtime = runtime
        self._clock = runtime.clock
        self._identity = identity
        self._down_after = down_after
        self._stop = Flag()
        self._ctx: Ctx | None = None
        self._began = 0.0
        self._cancelled: float | None = None  # when that was first seen of the loop that runs here
        self._ran = self._clock.monotonic()  # when the loop was last known to run
        self._why = "it has just been started"
        self._fence: int | None = None
        self._fence_since = 0.0
        self._down = False

    def start(self) -> None:
        """Tell events from now on, in a thread."""
        self._clock.spawn(self._watch, f"tako-vigil-{self._identity.name}")

    def stop(self) -> None:
        self._stop.set()

    def begins(self, ctx: Ctx) -> None:
        """Take in that the body begins here."""
        self._began = self._clock.monotonic()
        self._cancelled = None
        self._ctx = ctx

    def ends(self, why: str) -> None:
        """Take in that the body has ended here, or did not begin."""
        self._see()
        self._ctx = None
        self._why = why

    def health(self) -> Health:
        """Say how it does, from what is known; no request is sent."""
        self._see()
        if self._stop.is_set():
            return Health(DOWN, f"it is not run by this process any more: {self._why}", False)
        ctx, now = self._ctx, self._clock.monotonic()
        if ctx is not None and not ctx.cancelled:
            return Health(HEALTHY, f"its loop runs here, under fence {ctx.fence}")
        since = self._cancelled if ctx is not None else None
        alive = since is None or now - since < self._down_after
        if now - self._ran >= self._down_after:
            return Health(DOWN, self._reason(), alive)
        if ctx is not None:
            return Health(STANDBY, self._to_end(ctx), alive)
        holder = self._runtime.known(self._identity.key).holder
        if holder is not None and holder.fence == self._fence:
            return Health(STANDBY, f"held by {printable(holder.owner)}")
        return Health(STANDBY, self._why)

    def _reason(self) -> str:
        silent = self._clock.monotonic() - self._ran
        ctx = self._ctx
        here = self._why if ctx is None else self._to_end(ctx)
        return f"its loop has not been running anywhere for {silent:.0f} s; here: {here}"

    def _to_end(self, ctx: Ctx) -> str:
        return f"its loop is to end, and has not: {ctx.cause}"

    def _see(self) -> None:
        now, restart = self._clock.monotonic(), self._runtime.policy.restart
        ctx = self._ctx
        if ctx is not None:
            if ctx.cancelled:
                self._cancelled = now if self._cancelled is None else self._cancelled
            elif now - self._began >= restart:
                self._ran = now
            return
        known = self._runtime.known(self._identity.key)
        holder, looked = known.holder, known.looked
        if holder is None or looked <= self._ran:
            return
        if holder.fence != self._fence:
            self._fence, self._fence_since = holder.fence, looked
        elif looked - self._fence_since >= restart:
            self._ran = looked

    def _watch(self) -> None:
        while not self._clock.wait(self._stop, self._down_after / 4):
            down = self.health().state == DOWN
            if down and not self._down:
                self._runtime.tell(SingletonDown(self._identity.name, self._name, self._reason()))
            elif self._down and not down:
                self._runtime.tell(SingletonUp(self._identity.name, self._name))
            self._down = down
