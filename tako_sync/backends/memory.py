"""``MemoryLease``: an in-process table, for tests, development and single-process programs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from tako_sync import fork
from tako_sync.abc import ABSENT, Absent, Clock, Interval, LeaseBackend, Snapshot, Version
from tako_sync.clock import SystemClock
from tako_sync.errors import VersionConflictError

_FORGET_AFTER: Final = 2 * 3600.0


class MemoryLease(LeaseBackend):
    """temporary"""

    prompt = True

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._table: OrderedDict[str, tuple[bytes, str, float]] = OrderedDict()
        self._counter = 0
        fork.reset_in_child(self)

    def read(self, key: str, *, timeout: float) -> Snapshot:
        with self._lock:
            now = self._clock.monotonic()
            entry = self._table.get(key)
        if entry is None:
            return Snapshot(b"", ABSENT, None, Interval.exactly(now))
        body, version, written = entry
        return Snapshot(body, version, Interval.exactly(written), Interval.exactly(now))

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        with self._lock:
            entry = self._table.get(key)
            if (entry[1] if entry else ABSENT) != expect:
                raise VersionConflictError(f"{key} is not at {expect}")
            self._counter += 1
            now = self._clock.monotonic()
            self._table[key] = (body, str(self._counter), now)
            self._table.move_to_end(key)
            return str(self._counter)

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        with self._lock:
            return [key for key in self._table if key.startswith(prefix)]

    def describe(self) -> str:
        return "memory:"

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
