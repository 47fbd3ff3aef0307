"""The door for implementers: a storage backend, a clock, a listener.

A backend moves bytes under compare-and-swap and knows nothing of leases; everything about
leases is above it and is shared. ``tako_sync.testing.conformance`` checks all that is asked
for here, and docs/how-to/write-a-backend.md walks through one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from tako_sync.events import Event
from tako_sync.findings import Finding
from tako_sync.policy import LeasePolicy
from tako_sync.snapshot import ABSENT, BODY_LIMIT, Absent, Interval, Snapshot, Version

if TYPE_CHECKING:
    import threading

__all__ = [
    "ABSENT",
    "BODY_LIMIT",
    "Absent",
    "Clock",
    "Interval",
    "LeaseBackend",
    "Listener",
    "Snapshot",
    "Task",
    "Version",
]

Listener = Callable[[Event], object]
"""Told of each event of a binding, in the thread where it happens. What it raises is logged."""


class LeaseBackend(abc.ABC):
    """A compare-and-swap register of bytes, one per key.

    Promises that an implementation keeps:

    * ``write`` is atomic: of any number of writes with the same ``expect``, one at most is
      applied. A version is never used twice for a key, not even after a deletion.
    * It never retries, never waits beyond ``timeout``, never interprets the bytes.
    * All methods may be called from any thread, and in a forked child, also where another
      thread was inside a call at the fork (open connections afresh there).
    * Faults are raised as one of three kinds: :class:`~tako_sync.errors.VersionConflictError`
      (not applied; also for an ``expect`` that it never handed out),
      :class:`~tako_sync.errors.BackendUnavailableError` (transient; a write may have been
      applied, or may be applied later), :class:`~tako_sync.errors.BackendDeniedError`
      (permanent). Anything else is a bug.
    """

    clock_skew: float = 0.0
    """Seconds by which two parts of the storage's own clock may differ."""

    prompt: bool = False
    """True if every call answers at once, in-process. Others are called in a thread of their
    own, so that one which outlasts its timeout cannot hold up a holder."""

    @abc.abstractmethod
    def read(self, key: str, *, timeout: float) -> Snapshot:
        """Return what is stored under ``key``; a snapshot with ``ABSENT`` if nothing is.

        Without a record the body is empty and ``written`` None. ``written.latest`` is not after
        ``now.latest``; ``written.earliest`` may be minus infinity.

        Args:
            key: a name of at most 400 characters from ``[a-z0-9._-]``, never one of dots alone.
            timeout: seconds within which to answer or raise ``BackendUnavailableError``.
        """

    @abc.abstractmethod
    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        """Store ``body`` if the current version is ``expect``; return the new version.

        Args:
            key: as in :meth:`read`.
            body: at most ``BODY_LIMIT`` bytes.
            expect: the version that must be current, or ``ABSENT`` if none may be.
            timeout: as in :meth:`read`.
        """

    def written(self, key: str, version: Version, *, timeout: float) -> Interval | None:
        """Return when ``version`` of ``key`` was written, where :meth:`read` could not tell.

        For storages where that costs a request more. It is asked where a takeover hangs on it,
        and only if ``now`` of the read is known.

        Returns:
            as ``written`` of a snapshot; None if unknown, or if another version stands there.
        """
        return None

    @abc.abstractmethod
    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        """Return the keys that begin with ``prefix``, in no particular order.

        A lazy answer is exhausted within ``timeout``, and may raise while it is.
        """

    @abc.abstractmethod
    def describe(self) -> str:
        """Return where the records are, for people: ``memory:``, ``sqlite:///…``, ``gs://…``."""

    def examine(self, policy: LeasePolicy, *, timeout: float) -> Iterable[Finding]:
        """Look at what only this storage has: settings, permissions, cost. For ``doctor``.

        Raises nothing: what cannot be looked at is a finding, too.

        Args:
            policy: the timings of the leases that are to be kept there.
            timeout: seconds for each request.
        """
        return ()

    def close(self) -> None:  # noqa: B027 - most backends have nothing to close
        """Free what is open. May be called again, and the backend used again, afterwards."""


class Task(Protocol):
    """A thread started by a clock."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for ``timeout`` seconds of the clock at most."""

    def is_alive(self) -> bool: ...


class Clock(abc.ABC):
    """Time, waiting, threads and chance: everything that makes a run differ from the last.

    Nothing in tako_sync asks the operating system for any of these but through a clock.
    """

    @abc.abstractmethod
    def monotonic(self) -> float:
        """Return seconds that never step back and go on while the machine is suspended."""

    @abc.abstractmethod
    def wall(self) -> datetime:
        """Return the time of day, in UTC. For people to read; no decision rests on it."""

    @abc.abstractmethod
    def random(self) -> float:
        """Return a number from [0, 1), for jitter."""

    @abc.abstractmethod
    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        """Wait until ``event`` is set or ``timeout`` seconds have passed; return ``is_set``."""

    @abc.abstractmethod
    def spawn(self, target: Callable[[], object], name: str) -> Task:
        """Run ``target`` in a new daemon thread."""

    def after(
        self, seconds: float, target: Callable[[], object], name: str, unless: threading.Event
    ) -> Task:
        """Run ``target`` in a thread of its own in ``seconds``, unless ``unless`` is set before.

        Returns:
            a task that ends when ``target`` has ended, or will not be run.
        """

        def wait_and_run() -> None:
            if not self.wait(unless, seconds):
                target()

        return self.spawn(wait_and_run, name)
