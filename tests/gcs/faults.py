"""Faults as values: which requests they meet, and how often. What happens is in ``gcs.actions``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from .actions import Action
from .log import Predicate, Request


@dataclass(frozen=True)
class Fault:
    """An action, and the requests that it is for.

    Attributes:
        on: the kind of request, as the log has it; ``*`` is any.
        action: what happens.
        name: a pattern for the object's name.
        times: how many requests it meets; None is all, until the faults are cleared.
        when: what else must be true of the request.
    """

    on: str
    action: Action
    name: str = "*"
    times: int | None = 1
    when: Predicate = field(default=lambda request: True, repr=False)


class Faults:
    """The faults of a server: each request meets the first that is for it, if any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[_Entry] = []
        self._held: dict[threading.Event, int] = {}
        self._met: set[int] = set()  # the requests under way that have met a fault
        self._freed: set[int] = set()  # those of them that nothing holds up any more
        self._closed = False

    def add(self, *faults: Fault) -> None:
        """Add them behind those that are there: what stands first is used up first."""
        with self._lock:
            self._faults += map(_Entry, faults)

    def clear(self) -> None:
        """Forget all faults; requests that stand in one stay there."""
        with self._lock:
            self._faults.clear()

    def release(self) -> None:
        """Clear, and let every request go on that stands in a fault now, or is about to."""
        with self._lock:
            self._faults.clear()
            self._freed |= self._met
            held = tuple(self._held)
        for event in held:
            event.set()

    @property
    def left(self) -> Sequence[Fault]:
        """Those that will still meet a request."""
        with self._lock:
            return [entry.fault for entry in self._faults if not entry.spent]

    # --- For the server ------------------------------------------------------------------

    def take(self, request: Request) -> Fault | None:
        """Return the fault that meets ``request``; :meth:`done` is owed afterwards."""
        with self._lock:
            entries = tuple(self._faults)
        for entry in entries:
            fault = entry.fault
            # ``when`` is anyone's code, which may ask the log: not in the lock.
            if not request.matches(fault.on, fault.name) or not fault.when(request):
                continue
            with self._lock:
                if not entry.spent and entry in self._faults:
                    entry.used += 1
                    self._met.add(request.number)
                    return fault
        return None

    def done(self, request: Request) -> None:
        """Note that a request has ended."""
        with self._lock:
            self._met.discard(request.number)
            self._freed.discard(request.number)

    def hold(self, request: Request, until: threading.Event, seconds: float | None) -> bool:
        """Wait for ``until``; return whether the server goes on."""
        with self._lock:
            if self._closed or request.number in self._freed:
                return not self._closed
            self._held[until] = self._held.get(until, 0) + 1
        try:
            until.wait(seconds)
        finally:
            with self._lock:
                self._held[until] -= 1
                if not self._held[until]:
                    del self._held[until]
        return not self._closed

    def close(self) -> None:
        """Release all, now and henceforth; nothing is applied any more."""
        with self._lock:
            self._closed = True
        self.release()


@dataclass(eq=False)
class _Entry:
    """A fault, and how many requests it has met."""

    fault: Fault
    used: int = 0

    @property
    def spent(self) -> bool:
        return self.fault.times is not None and self.used >= self.fault.times
