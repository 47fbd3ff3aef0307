"""``SqliteLease``: one file, for all processes of one machine."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from tako_sync import fork
from tako_sync.abc import (
    ABSENT,
    BODY_LIMIT,
    Absent,
    Interval,
    LeaseBackend,
    Snapshot,
    Version,
)
from tako_sync.errors import (
    BackendDeniedError,
    BackendError,
    BackendUnavailableError,
    ConfigurationError,
    VersionConflictError,
)

T = TypeVar("T")

_APPLICATION: Final = 0x74616B6F  # "tako": what makes a file ours
_SCHEMA: Final = 1
_POOL: Final = 4
_CREATE: Final = (
    (
        "CREATE TABLE lease (key TEXT PRIMARY KEY, body BLOB NOT NULL, version TEXT NOT NULL,"
        " clock TEXT, at REAL) WITHOUT ROWID"
    ),
    "CREATE TABLE counter (last INTEGER NOT NULL)",
    "INSERT INTO counter VALUES (0)",
    "CREATE TABLE clock (id TEXT PRIMARY KEY, anchor REAL NOT NULL) WITHOUT ROWID",
    (
        "CREATE TABLE seen (key TEXT, version TEXT, clock TEXT, at REAL NOT NULL,"
        " PRIMARY KEY (key, version, clock)) WITHOUT ROWID"
    ),
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_SCHEMA}",
)


class BootClock(Protocol):
    """The machine's clock since its boot, and which boot that is."""

    def identity(self) -> str | None:
        """Return what is equal in two processes exactly if their clocks are one; or None."""

    def since_boot(self) -> float: ...

    def wall(self) -> float: ...


class LinuxBootClock:
    """``CLOCK_BOOTTIME`` under the kernel's boot id and the process's time namespace."""

    def __init__(self) -> None:
        self._identity = self._find()

    @staticmethod
    def _find() -> str | None:
        if not hasattr(time, "CLOCK_BOOTTIME"):
            return None
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        try:
            namespace = os.readlink("/proc/self/ns/time")
        except OSError:
            namespace = ""
        return f"{boot} {namespace}"

    def identity(self) -> str | None:
        return self._identity

    def since_boot(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.clock_gettime(time.CLOCK_REALTIME)


class SqliteLease(LeaseBackend):
    """Leases in one SQLite file: excludes all processes of one machine that name it.

    A version that was acknowledged is on the disk: no fence is handed out twice, not even
    after a power loss. The storage clock is the machine's clock since boot, so setting the wall
    clock does nothing. After a reboot, a record left behind ages its ttl from the first look.

    Limits: one machine (no network file systems: their locks are not to be relied on). Where
    the system has no clock since boot with the boot's identity (Linux has), ages are unknown
    and each process's own observation decides; a one-shot ``try_do`` then cannot take over
    from a dead holder. A process that is stopped in mid-transaction keeps the file locked
    until it goes on.

    Args:
        path: the file; it and its folder are made at first use, for this user only.

    Raises:
        ConfigurationError: the path cannot name a file.
    """

    def __init__(self, path: str | os.PathLike[str], *, _clock: BootClock | None = None) -> None:
        self._path = _checked(path)
        self._clock = _clock or LinuxBootClock()
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        fork.reset_in_child(self)

    # --- The register

    def read(self, key: str, *, timeout: float) -> Snapshot:
        return self._run(timeout, lambda file: self._read(file, key))

    def _read(self, file: _Connection, key: str) -> Snapshot:
        row = file.one(
            "SELECT substr(body, 1, ?), version, clock, at FROM lease WHERE key = ?",
            (BODY_LIMIT + 1, key),
        )
        identity = self._clock.identity()
        now = None if identity is None else self._now(file, identity)
        moment = None if now is None else Interval.exactly(now)
        if row is None:
            return Snapshot(b"", ABSENT, None, moment)
        body, version, clock, at = row
        if identity is None or now is None:
            return Snapshot(bytes(body), version)
        if clock == identity:
            return Snapshot(bytes(body), version, Interval.exactly(at), moment)
        # Written under another clock: before a reboot, or in another time namespace. All that
        # is known is that it stood there when it was first seen under this one.
        seen = self._first_sighting(file, key, version, identity, now)
        return Snapshot(bytes(body), version, Interval(-math.inf, seen), moment)

    def _first_sighting(
        self, file: _Connection, key: str, version: str, clock: str, now: float
    ) -> float:
        query = "SELECT at FROM seen WHERE key = ? AND version = ? AND clock = ?"
        row = file.one(query, (key, version, clock))
        if row is None:
            with file.writing():
                file.run(
                    "INSERT OR IGNORE INTO seen VALUES (?, ?, ?, ?)", (key, version, clock, now)
                )
                row = file.one(query, (key, version, clock))
        return float(row[0]) if row else now

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        return self._run(timeout, lambda file: self._write(file, key, body, expect))

    def _write(self, file: _Connection, key: str, body: bytes, expect: Version | Absent) -> Version:
        identity = self._clock.identity()
        if identity is not None:
            self._now(file, identity)  # learns the anchor, in a transaction of its own
        with file.writing():
            row = file.one("SELECT version FROM lease WHERE key = ?", (key,))
            current: Version | Absent = row[0] if row else ABSENT
            if current != expect:
                raise VersionConflictError(f"{key} is at {current!r}, not at {expect!r}")
            file.run("UPDATE counter SET last = last + 1")
            (number,) = file.one("SELECT last FROM counter") or (0,)
            # The counter alone would come again where the file is replaced by an older copy:
            # a holder at 5 in the old one, another's record at 5 in the new one, and the
            # first one's renewal, expecting 5, would be applied to it.
            version = f"{number}-{os.urandom(8).hex()}"
            at = None if identity is None else self._now(file, identity)
            file.run(
                "INSERT OR REPLACE INTO lease VALUES (?, ?, ?, ?, ?)",
                (key, body, version, identity, at),
            )
            file.run("DELETE FROM seen WHERE key = ?", (key,))
        return version

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        query = "SELECT key FROM lease WHERE substr(key, 1, ?) = ?"
        return self._run(
            timeout, lambda file: [key for (key,) in file.all(query, (len(prefix), prefix))]
        )

    def describe(self) -> str:
        return f"sqlite:///{self._path.as_posix().lstrip('/')}"

    # --- The clock

    def _now(self, file: _Connection, identity: str) -> float:
        """Return the storage's time: the clock since boot plus an anchor kept in the file.

        The anchor of a boot is fixed when the file first meets it, no earlier than the latest
        time in the file. So the fences that are made from this time rise over reboots, while
        ages, which are differences under one anchor, never touch a wall clock.
        """
        if file.anchor is None:
            file.anchor = self._anchor(file, identity)
        return file.anchor + self._clock.since_boot()

    def _anchor(self, file: _Connection, identity: str) -> float:
        query = "SELECT anchor FROM clock WHERE id = ?"
        row = file.one(query, (identity,))
        if row is None and not file.in_transaction:
            with file.writing():
                (latest,) = file.one("SELECT max(at) FROM lease") or (None,)
                anchor = max(latest or 0.0, self._clock.wall()) - self._clock.since_boot()
                file.run("INSERT OR IGNORE INTO clock VALUES (?, ?)", (identity, anchor))
                row = file.one(query, (identity,))
        if row is None:
            raise BackendUnavailableError(f"{self._path} was replaced in mid-transaction")
        return float(row[0])

    # --- Connections

    def _run(self, timeout: float, work: Callable[[_Connection], T]) -> T:
        file: _Connection | None = None
        try:
            file = self._take(timeout)
            answer = work(file)
        except VersionConflictError:
            self._give_back(file)
            raise
        except BaseException as error:
            self._drop(file)  # and with it whatever was not committed
            if isinstance(error, sqlite3.Error):
                raise self._translated(error, timeout) from error
            raise
        self._give_back(file)
        return answer

    def _take(self, timeout: float) -> _Connection:
        inode = self._inode()
        with self._lock:
            stale = [file for file in self._idle if file.inode != inode]
            self._idle = [file for file in self._idle if file.inode == inode]
            file = self._idle.pop() if self._idle else None
            if file is not None:
                self._busy.add(file)
        for old in stale:
            old.close()
        if file is None:
            file = self._open(timeout)
        file.allow(timeout)
        return file

    def _open(self, timeout: float) -> _Connection:
        self._create_file()
        raw = sqlite3.connect(
            self._path, timeout=timeout, isolation_level=None, check_same_thread=False
        )
        file = _Connection(raw, self._inode() or (0, 0))
        with self._lock:
            self._busy.add(file)
        try:
            file.allow(timeout)
            self._make_ours(file)
        except BaseException:
            self._drop(file)
            raise
        return file

    def _create_file(self) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Only if it is missing: to open and close a file that a connection of this process
            # has open would drop that one's locks (POSIX), in mid-transaction.
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            raise self._denied(f"cannot be made: {error.strerror}") from error
        if self._path.is_dir():
            raise self._denied("is a folder")

    def _make_ours(self, file: _Connection) -> None:
        # DELETE: one file, nothing beside it between transactions, so that a copy of it, or one
        # put in its place, never meets a stale -wal. EXTRA: also the removal of the journal is
        # on the disk before a write is acknowledged, or a power loss could undo it.
        file.run("PRAGMA synchronous = EXTRA")
        with file.transaction("DEFERRED"):  # looks at one state of the file, changes nothing
            if self._is_ours(file):
                return
        with file.writing():
            if not self._is_ours(file):
                for statement in _CREATE:
                    file.run(statement)

    def _is_ours(self, file: _Connection) -> bool:
        """Say whether the file has our tables; False if it is empty.

        Raises:
            BackendDeniedError: it is another program's, or a later version's.
        """
        (application,) = file.one("PRAGMA application_id") or (0,)
        (schema,) = file.one("PRAGMA user_version") or (0,)
        if application == _APPLICATION and schema == _SCHEMA:
            return True
        if application == _APPLICATION:
            raise self._denied(f"has the format {schema} of another version of tako_sync")
        if application or schema or file.one("SELECT 1 FROM sqlite_master"):
            raise self._denied("is another program's database; name a file of its own")
        return False

    def _inode(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._denied(f"cannot be reached: {error.strerror}") from error
        return found.st_dev, found.st_ino

    def _give_back(self, file: _Connection | None) -> None:
        if file is None:
            return
        with self._lock:
            self._busy.discard(file)
            keep = len(self._idle) < _POOL
            if keep:
                self._idle.append(file)
        if not keep:
            file.close()

    def _drop(self, file: _Connection | None) -> None:
        if file is not None:
            file.close()
            with self._lock:
                self._busy.discard(file)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for file in idle:
            file.close()

    def after_fork_in_child(self) -> None:
        # The parent's connections are neither used nor closed here, not even by the collector:
        # SQLite would roll the parent's transaction back, on the disk, under its feet.
        for file in (*self._idle, *self._busy):
            file.leak()
        self._lock = threading.Lock()
        self._idle = []
        self._busy = set()

    # --- Faults

    def _denied(self, what: str) -> BackendDeniedError:
        return BackendDeniedError(f"the lease file {self._path} {what}")

    def _translated(self, error: sqlite3.Error, timeout: float) -> BackendError:
        """Say in the terms of the four kinds what SQLite says."""
        text = str(error)
        if "locked" in text:
            return BackendUnavailableError(
                f"the lease file {self._path} was locked for {timeout:.3g} s: another process "
                "is in a transaction, or was stopped in one"
            )
        for word, meaning in _FAULTS.items():
            if word in text:
                return self._denied(meaning)
        return BackendUnavailableError(f"the lease file {self._path}: {text}")


_FAULTS: Final = {
    "not a database": "is no SQLite database (any more): move it away, a new one will be made",
    "malformed": "is damaged: move it away, a new one will be made",
    "readonly": "cannot be written by this user",
    "unable to open": "cannot be opened by this user",
    "no such table": "has lost its tables: move it away, a new one will be made",
}


class _Connection:
    """One connection; at any time, one thread's."""

    def __init__(self, raw: sqlite3.Connection, inode: tuple[int, int]) -> None:
        self.inode = inode
        self.anchor: float | None = None
        self._raw = raw
        self._until = 0.0

    def allow(self, timeout: float) -> None:
        """Let the next statements take ``timeout`` seconds in all to wait for the lock."""
        self._until = _monotonic() + timeout
        self._set_patience()

    def _set_patience(self) -> None:
        left = max(0.0, self._until - _monotonic())
        self._raw.execute(f"PRAGMA busy_timeout = {math.ceil(left * 1000)}")

    @property
    def in_transaction(self) -> bool:
        return self._raw.in_transaction

    def writing(self) -> AbstractContextManager[None]:
        """A transaction that takes the file's write lock at its beginning."""
        # Not later: two readers that both want to write would wait for each other.
        return self.transaction("IMMEDIATE")

    @contextmanager
    def transaction(self, kind: str) -> Iterator[None]:
        self._raw.execute(f"BEGIN {kind}")
        try:
            yield
            self._set_patience()  # a commit may wait for readers
            self._raw.execute("COMMIT")
        except BaseException:
            if self._raw.in_transaction:
                self._raw.execute("ROLLBACK")
            raise

    def run(self, statement: str, values: Sequence[object] = ()) -> None:
        self._raw.execute(statement, values)

    def one(self, query: str, values: Sequence[object] = ()) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._raw.execute(query, values).fetchone()
        return row

    def all(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return self._raw.execute(query, values).fetchall()

    def close(self) -> None:
        try:
            self._raw.close()
        except sqlite3.Error:
            pass

    def leak(self) -> None:
        """Keep the connection alive beyond everything, also the end of the interpreter."""
        try:
            import ctypes

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._raw))
        except (ImportError, AttributeError):  # an interpreter without: do what is left
            _LEAKED.append(self._raw)


_LEAKED: Final[list[sqlite3.Connection]] = []


def _monotonic() -> float:
    # Not time.monotonic: freezegun would stop it.
    if hasattr(time, "CLOCK_MONOTONIC"):
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()


def _checked(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError(f"the lease file is a path, not {path!r}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text or text == ":memory:":
        raise ConfigurationError(
            f"{text!r} names no file; for leases in memory, write memory: or MemoryLease()"
        )
    if os.path.isdir(text):
        raise ConfigurationError(f"the lease file {text!r} is a folder: name a file in it")
    return Path(text).expanduser().absolute()
