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
        self._faults: list[tuple[Fault, list[int]]] = []
        self._held: dict[threading.Event, int] = {}
        self._closed = False

    def add(self, *faults: Fault) -> None:
        """Add them behind those that are there: what stands first is used up first."""
        with self._lock:
            self._faults += [(fault, [0]) for fault in faults]

    def clear(self) -> None:
        """Forget all faults; requests that stand in one stay there."""
        with self._lock:
            self._faults.clear()

    def release(self) -> None:
        """Clear, and let every request go on that stands in a fault now."""
        with self._lock:
            self._faults.clear()
            held = tuple(self._held)
        for event in held:
            event.set()

    @property
    def left(self) -> Sequence[Fault]:
        """Those that will still meet a request."""
        with self._lock:
            return [fault for fault, used in self._faults if not _spent(fault, used)]

    def take(self, request: Request) -> Fault | None:
        """Return the fault that meets ``request``."""
        with self._lock:
            for fault, used in self._faults:
                fits = request.matches(fault.on, fault.name) and not _spent(fault, used)
                if fits and fault.when(request):
                    used[0] += 1
                    return fault
        return None

    def hold(self, until: threading.Event, seconds: float | None) -> bool:
        """Wait for ``until``; return whether the server goes on."""
        with self._lock:
            if self._closed:
                return False
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


def _spent(fault: Fault, used: list[int]) -> bool:
    return fault.times is not None and used[0] >= fault.times
