"""The file behind ``SqliteLease``: its connections, its making, and what can be wrong with it."""

from __future__ import annotations

import errno
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tako_sync import fork
from tako_sync.errors import (
    BackendDeniedError,
    BackendError,
    BackendUnavailableError,
    ConfigurationError,
    VersionConflictError,
)

_APPLICATION: Final = 0x74616B6F  # "tako": what makes a file ours
_SCHEMA: Final = 1
_CREATE: Final = f"""
CREATE TABLE lease (
    key TEXT PRIMARY KEY, body BLOB NOT NULL, version TEXT NOT NULL, clock TEXT, at REAL
) WITHOUT ROWID;
CREATE TABLE counter (last INTEGER NOT NULL);
INSERT INTO counter VALUES (0);
CREATE TABLE clock (id TEXT PRIMARY KEY, anchor REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE seen (
    key TEXT, version TEXT, clock TEXT, at REAL NOT NULL, PRIMARY KEY (key, version, clock)
) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_SCHEMA};
"""  # noqa: S608 - two numbers of ours
_PERMANENT: Final = {
    "not a database": "is no SQLite database (any more): move it away, a new one will be made",
    "malformed": "is damaged: move it away, a new one will be made",
    "no such table": "has lost its tables: move it away, a new one will be made",
    "attempt to write a readonly": "cannot be written by this user",
    "unable to open": "cannot be opened by this user",
}
"""What SQLite says, and what it means for whoever has to mend it."""

_PASSING: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EIO, errno.EINTR}
"""Errors of the system that may pass; others need somebody to change something."""

Inode = tuple[int, int]


class LeaseFile:
    """One file and this process's one connection to it, lent to one thread at a time.

    One connection costs no concurrency: SQLite lets one writer at a file anyway. And it lets a
    fork wait until nobody is inside SQLite. The child would inherit SQLite's own mutexes as they
    are, and what SQLite believes of its locks on the file: that is stuck, or worse.

    Args:
        path: the file; made at first use.

    Raises:
        ConfigurationError: the path cannot name a file.
    """

    _open: Session | None = None  # also where the path was refused, for the finalizer

    def __init__(self, path: object) -> None:
        self.path = _checked(path)
        self._lock = threading.Lock()
        fork.stand_still_for(self)

    @contextmanager
    def session(self, timeout: float) -> Iterator[Session]:
        """Lend the connection for ``timeout`` seconds' worth of waiting for locks.

        Raises:
            BackendUnavailableError: locked for that long, or the disk fails or is full.
            BackendDeniedError: the file cannot be used at all; the message says why.
        """
        fork.settle()
        until = _monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise self._locked(timeout)
        try:
            yield self._session(until)
        except VersionConflictError:
            raise  # rolled back: the connection is fit for the next
        except sqlite3.Error as error:
            session = self._open
            self._close()
            raise self._translated(error, timeout, session) from error
        except BaseException:
            self._close()  # and with it goes whatever was not committed
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        fork.settle()
        with self._lock:
            self._close()

    def __del__(self) -> None:
        fork.settle()
        self._close()

    def locks_for_fork(self) -> Iterator[threading.Lock]:
        yield self._lock

    def after_fork_in_child(self) -> None:
        # The parent's connection is neither used nor closed here, not even by the collector.
        if self._open is not None:
            self._open.leak()
        self._open = None
        self._lock = threading.Lock()

    # --- The connection

    def _session(self, until: float) -> Session:
        session = self._open
        if session is not None and session.inode != self.inode():
            self._close()  # the file that it is of was replaced or deleted
            session = None
        if session is None:
            self._create()
            inode = self.inode() or (0, 0)
            raw = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            session = self._open = Session(self, raw, inode)
            session.check_still_there()
            session.allow(until)
            self._make_ours(session)
        session.allow(until)
        return session

    def _close(self) -> None:
        session, self._open = self._open, None
        if session is not None:
            session.close()

    # --- The file

    def inode(self) -> Inode | None:
        """Return which file stands at the path now; None if there is none."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._fault("reached", error) from error
        return found.st_dev, found.st_ino

    def denied(self, what: str) -> BackendDeniedError:
        return BackendDeniedError(f"the lease file {self.path} {what}")

    def _create(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Only if it is missing: to open and close a file that a connection of this process
            # has open would drop that one's locks (POSIX), in mid-transaction.
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            if not self.path.is_file():
                raise self.denied("is not a file, or its folder is not a folder") from None
        except OSError as error:
            raise self._fault("made", error) from error

    def _make_ours(self, session: Session) -> None:
        # DELETE, the default journal: one file, nothing beside it between transactions, so that
        # a copy, or one put in its place, never meets a stale journal. EXTRA: the removal of the
        # journal, too, is on the disk before a write is acknowledged; else a power loss could
        # undo an acknowledged write.
        session.run("PRAGMA synchronous = EXTRA")
        with session.transaction("DEFERRED"):  # looks at one state of the file, changes nothing
            ours = self._is_ours(session)
        if not ours:
            with session.writing():
                if not self._is_ours(session):
                    for statement in _CREATE.split(";"):
                        session.run(statement)
        if session.one("PRAGMA journal_mode") != ("delete",):  # another program's doing
            session.run("PRAGMA journal_mode = DELETE")

    def _is_ours(self, session: Session) -> bool:
        """Say whether the file has our tables; False if it is empty.

        Raises:
            BackendDeniedError: it is another program's, or a later version's.
        """
        (application,) = session.one("PRAGMA application_id") or (0,)
        (schema,) = session.one("PRAGMA user_version") or (0,)
        if application == _APPLICATION:
            if schema != _SCHEMA:
                raise self.denied(f"has the format {schema} of another version of tako_sync")
            return True
        if application or schema or session.one("SELECT 1 FROM sqlite_master"):
            raise self.denied("is another program's database: name a file of its own")
        return False

    def _fault(self, verb: str, error: OSError) -> BackendError:
        text = f"the lease file {self.path} cannot be {verb}: {error.strerror}"
        return (BackendUnavailableError if error.errno in _PASSING else BackendDeniedError)(text)

    def _locked(self, timeout: float) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"the lease file {self.path} was locked for {timeout:.3g} s: another process is in a "
            "transaction, or was stopped in one"
        )

    def replaced(self) -> BackendUnavailableError:
        return BackendUnavailableError(f"the lease file {self.path} was just replaced")

    def _translated(
        self, error: sqlite3.Error, timeout: float, session: Session | None
    ) -> BackendError:
        """Say in the terms of the four kinds what SQLite says."""
        text = str(error)
        if "locked" in text:
            return self._locked(timeout)
        if session is not None and session.inode != self.inode():
            return self.replaced()  # which SQLite calls read-only, or cannot open any more
        for phrase, meaning in _PERMANENT.items():
            if phrase in text and not (phrase == "unable to open" and self._may_be_opened()):
                return self.denied(meaning)
        return BackendUnavailableError(f"the lease file {self.path}: {text}")

    def _may_be_opened(self) -> bool:
        """Say whether file and journal may be: then descriptors are short, and that passes."""
        folder = self.path.parent
        try:
            os.stat(f"{self.path}-journal")
        except FileNotFoundError:
            pass
        except OSError:  # such as a name that is too long
            return False
        return os.access(self.path, os.R_OK | os.W_OK) and os.access(folder, os.W_OK | os.X_OK)


class Session:
    """The connection, as one request has it.

    Attributes:
        inode: the file that it is of.
    """

    def __init__(self, file: LeaseFile, raw: sqlite3.Connection, inode: Inode) -> None:
        self.inode = inode
        self._file = file
        self._raw = raw
        self._until = 0.0

    def allow(self, until: float) -> None:
        """Let the next statements wait for locks until then, in all."""
        self._until = until
        self._set_patience()

    def _set_patience(self) -> None:
        left = max(0.0, self._until - _monotonic())
        self._raw.execute(f"PRAGMA busy_timeout = {math.ceil(left * 1000)}")

    @contextmanager
    def transaction(self, kind: str) -> Iterator[None]:
        self._set_patience()
        self._raw.execute(f"BEGIN {kind}")
        try:
            yield
            self._set_patience()  # a commit waits for readers
            self._raw.execute("COMMIT")
        except BaseException:
            if self._raw.in_transaction:
                self._raw.execute("ROLLBACK")
            raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction that takes the file's write lock at its beginning; or part of one."""
        if self._raw.in_transaction:
            yield
            return
        # Not later: two readers that both want to write would wait for each other.
        with self.transaction("IMMEDIATE"):
            yield

    def run(self, statement: str, values: Sequence[Any] = ()) -> None:
        self._raw.execute(statement, values)

    def one(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._raw.execute(query, values).fetchone()
        return row

    def all(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._raw.execute(query, values).fetchall()

    def check_still_there(self) -> None:
        """Raise if another file stands at the path now: what was written is out of sight."""
        if self._file.inode() != self.inode:
            raise self._file.replaced()

    def close(self) -> None:
        try:
            self._raw.close()
        except sqlite3.Error:
            pass

    def leak(self) -> None:
        """Keep the connection alive beyond everything, also beyond the interpreter's end."""
        try:
            import ctypes

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._raw))
        except (ImportError, AttributeError):  # an interpreter without: do what is left
            _LEAKED.append(self._raw)


_LEAKED: Final[list[sqlite3.Connection]] = []


def _monotonic() -> float:
    if hasattr(time, "CLOCK_MONOTONIC"):  # not time.monotonic: freezegun would stop it
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
    try:
        os.fsencode(text)
        path = Path(text).expanduser().absolute()
    except (ValueError, RuntimeError, OSError) as error:  # half a character, nobody's home, …
        raise ConfigurationError(f"the lease file {text!r} cannot be named: {error}") from error
    if os.path.isdir(path):
        raise ConfigurationError(f"the lease file {text!r} is a folder: name a file in it")
    return path
