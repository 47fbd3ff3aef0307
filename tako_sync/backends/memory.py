"""``MemoryLease``: a table in this process, for tests, development and one-process programs."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from tako_sync import fork
from tako_sync.abc import ABSENT, Absent, Clock, Interval, LeaseBackend, Snapshot, Version
from tako_sync.clock import SystemClock
from tako_sync.errors import VersionConflictError
from tako_sync.findings import NOTE, Finding
from tako_sync.policy import LeasePolicy
from tako_sync.record import MAX_TTL

_FORGET_AFTER: Final = 2 * MAX_TTL
"""Seconds. What stood unchanged for so long is free for everybody, whatever it says."""

_Entry = tuple[bytes, Version, Interval]


class MemoryLease(LeaseBackend):
    """Leases in a table of this process: excludes its threads from each other, and nobody else.

    Memory stays bounded: a key that was not written for two hours is forgotten by a later
    write of any key. Its versions do not come again, and fences go on rising with the clock.

    Limits: one process. A forked child goes on with a copy of the table that nobody shares.

    Args:
        clock: whose monotonic time is the storage's; the system's if None.
    """

    prompt = True

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock if clock is not None else SystemClock()
        # Reentrant: a collection of garbage or a signal's handler may strike in any call made
        # while the lock is held, and release a hold of this thread through this very table.
        self._lock = threading.RLock()
        # In the order of the last write. An OrderedDict: the front of a plain dict is found by
        # walking over all that was removed before it.
        self._table: OrderedDict[str, _Entry] = OrderedDict()
        self._numbers = itertools.count(1)
        fork.reset_in_child(self)

    def read(self, key: str, *, timeout: float) -> Snapshot:
        with self._lock:
            entry = self._table.get(key)
            now = self._clock.monotonic()
        moment = Interval(now, now)
        if entry is None:
            return Snapshot(b"", ABSENT, None, moment)
        body, version, written = entry
        return Snapshot(body, version, written, moment)

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        table = self._table
        version = str(next(self._numbers))
        with self._lock:
            now = self._clock.monotonic()
            entry = (body, version, Interval(now, now))
            # No call from here to the assignment, so that nothing strikes in between: see the
            # lock. What struck before has either changed the version or done no harm.
            current = table[key][1] if key in table else ABSENT
            if current == expect:
                table[key] = entry
                table.move_to_end(key)
                self._forget(now)
                return version
        raise VersionConflictError(f"{key} is at {current!r}, not at {expect!r}")

    def _forget(self, now: float) -> None:
        """Drop from the front what is old. Each write adds one key at most: cheap on average."""
        table = self._table
        while True:  # ends at the latest with what was just written
            for oldest in table:
                # No call from the look to the removal, as above.
                if now - table[oldest][2].latest <= _FORGET_AFTER:
                    return
                del table[oldest]
                break

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        with self._lock:
            return [key for key in list(self._table) if key.startswith(prefix)]

    def describe(self) -> str:
        return "memory:"

    def examine(self, policy: LeasePolicy, *, timeout: float) -> Iterable[Finding]:
        several = _several_workers()
        yield Finding(
            "reach",
            NOTE,
            "a table of this process: it excludes its threads from each other, and nobody else"
            + (f"; but {several}, and each of them has a table of its own" if several else ""),
            "for several processes, name a storage that they share: TAKO_BACKEND=sqlite:///path "
            "on one machine, gs://bucket on several",
        )

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()


def _several_workers() -> str:
    """Say what tells that this process is one of several; empty if nothing does."""
    count = os.environ.get("WEB_CONCURRENCY", "")
    if count.isdecimal() and int(count) > 1:
        return f"WEB_CONCURRENCY={count} asks for {count} workers"
    for module, server in (("gunicorn", "gunicorn"), ("uwsgi", "uWSGI"), ("celery", "Celery")):
        if module in sys.modules:
            return f"{server} is loaded, which mostly runs several workers"
    return ""
