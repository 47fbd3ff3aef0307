"""``SqliteLease``: one file, for all processes of one machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Final

from tako_sync.abc import ABSENT, BODY_LIMIT, Absent, Interval, LeaseBackend, Snapshot, Version
from tako_sync.backends.sqlite.boot_clock import BootClock, SystemBootClock
from tako_sync.backends.sqlite.file import LeaseFile, Session
from tako_sync.errors import VersionConflictError
from tako_sync.findings import Finding
from tako_sync.policy import LeasePolicy

__all__ = ["SqliteLease"]

_READ: Final = "SELECT substr(body, 1, ?), version, clock, at FROM lease WHERE key = ?"
_ANCHOR: Final = "SELECT anchor FROM clock WHERE id = ?"
_SEEN: Final = "SELECT at FROM seen WHERE key = ? AND version = ? AND clock = ?"


class SqliteLease(LeaseBackend):
    """Leases in one SQLite file: excludes all processes of one machine that name it.

    A write that was acknowledged is on the disk: no fence is handed out twice, not even after
    a power loss. The storage clock is the machine's clock since boot, so setting the wall clock
    does nothing. After a reboot, a record left behind ages its ttl from the first look.

    Limits: one machine. Network file systems are not supported: their locks are not to be
    relied on. Where the system has no clock since boot with the boot's identity (Linux has),
    ages are unknown and each process's own observation decides; a one-shot ``try_do`` of a new
    process then cannot take over from a dead holder. A process that is stopped in the midst of
    a transaction keeps the file locked until it goes on or dies.

    Args:
        path: the file; it and its folder are made at first use, for this user only.

    Raises:
        ConfigurationError: the path cannot name a file.
    """

    def __init__(self, path: str | os.PathLike[str], *, _clock: BootClock | None = None) -> None:
        self._file = LeaseFile(path)
        self._clock = _clock or SystemBootClock()

    def read(self, key: str, *, timeout: float) -> Snapshot:
        with self._file.session(timeout) as session:
            row = session.one(_READ, (BODY_LIMIT + 1, key))
            now = self._now(session)
            moment = None if now is None else Interval.exactly(now)
            if row is None:
                return Snapshot(b"", ABSENT, None, moment)
            body, version, clock, at = row
            written = self._written(session, key, version, clock, at, now)
            return Snapshot(
                bytes(body or b""), version, written, moment
            )  # substr of nothing is NULL

    def _written(
        self,
        session: Session,
        key: str,
        version: str,
        clock: str | None,
        at: float | None,
        now: float | None,
    ) -> Interval | None:
        if now is None:
            return None
        identity = self._clock.identity()
        if clock == identity and at is not None:
            return Interval.exactly(at)
        # Written under another clock: before a reboot, in another time namespace. All that is
        # known is that it stood there when it was first seen under this one. That sighting is
        # kept in the file, so that the record ages also for processes that look only once.
        row = session.one(_SEEN, (key, version, identity))
        if row is None:
            with session.writing():
                session.run(
                    "INSERT OR IGNORE INTO seen VALUES (?, ?, ?, ?)", (key, version, identity, now)
                )
                row = session.one(_SEEN, (key, version, identity))
        return Interval(-math.inf, row[0]) if row is not None else None

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        with self._file.session(timeout) as session:
            with session.writing():
                row = session.one("SELECT version FROM lease WHERE key = ?", (key,))
                current: Version | Absent = row[0] if row is not None else ABSENT
                if current != expect:
                    raise VersionConflictError(f"{key} is at {current!r}, not at {expect!r}")
                version = self._next_version(session)
                session.run(
                    "INSERT OR REPLACE INTO lease VALUES (?, ?, ?, ?, ?)",
                    (key, body, version, self._clock.identity(), self._now(session)),
                )
                session.run("DELETE FROM seen WHERE key = ?", (key,))
            session.check_still_there()
            return version

    def _next_version(self, session: Session) -> Version:
        session.run("UPDATE counter SET last = last + 1")
        row = session.one("SELECT last FROM counter")
        assert row is not None
        # The counter alone would come again where the file is replaced by an older copy: a
        # holder is at 5 in the one, another's record comes to 5 in the other, and the first
        # one's renewal, which expects 5, would be applied to it.
        return f"{row[0]}-{os.urandom(8).hex()}"

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        query = "SELECT key FROM lease WHERE substr(key, 1, ?) = ?"
        with self._file.session(timeout) as session:
            return [key for (key,) in session.all(query, (len(prefix), prefix))]

    def examine(self, policy: LeasePolicy, *, timeout: float) -> Iterable[Finding]:
        from tako_sync.backends.sqlite.examination import examine

        return examine(self._file, self._clock.identity() is not None, timeout)

    def describe(self) -> str:
        return f"sqlite:///{self._file.path.as_posix().lstrip('/')}"

    def close(self) -> None:
        self._file.close()

    def _now(self, session: Session) -> float | None:
        """Return the storage's time: the clock since boot, plus an anchor kept in the file.

        The anchor of a boot is fixed when the file first meets it, no earlier than the latest
        time in the file. So the fences that are made from this time rise over reboots, while
        ages, which are differences under one anchor, never touch a wall clock.
        """
        identity = self._clock.identity()
        if identity is None:
            return None
        row = session.one(_ANCHOR, (identity,))  # each time: the file may be another by now
        if row is None:
            with session.writing():
                (latest,) = session.one("SELECT coalesce(max(at), 0) FROM lease") or (0.0,)
                now = max(float(latest), self._clock.wall())
                values = (identity, now - self._clock.since_boot())
                session.run("INSERT OR IGNORE INTO clock VALUES (?, ?)", values)
                row = session.one(_ANCHOR, (identity,))
        assert row is not None
        return float(row[0]) + self._clock.since_boot()
