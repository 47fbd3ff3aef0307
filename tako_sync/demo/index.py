"""A full-text index in a SQLite file that refuses the writes of a stale holder."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

SUFFIXES = frozenset({".py", ".md", ".rst", ".txt"})
_SKIPPED = frozenset({"site-packages", "test", "tests", "__pycache__"})


class StaleFenceError(Exception):
    """A write came with a fence below the largest that the index has seen."""


def sources(folder: Path, most: int = 400) -> list[Path]:
    """Return the files below ``folder`` that are worth an index, at most ``most``, in order."""
    return list(islice(_walk(folder), most))


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED)
        for name in sorted(files):
            if Path(name).suffix in SUFFIXES:
                yield Path(place, name)


def chunks(paths: Sequence[Path], size: int = 40) -> Iterator[Sequence[Path]]:
    """Cut ``paths`` into pieces; at least two, so that there is a middle."""
    size = max(1, min(size, len(paths) // 2))
    for start in range(0, len(paths), size):
        yield paths[start : start + size]


class Index:
    """The index, and the receiving half of fencing: each write brings its fence.

    The largest fence seen stands in the same file and is compared and raised in the same
    transaction as the write, so that there is no moment in between.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def create(self) -> None:
        with closing(self._open()) as connection, connection:
            connection.execute("CREATE TABLE guard (fence INTEGER NOT NULL)")
            connection.execute("INSERT INTO guard VALUES (0)")
            connection.execute("CREATE VIRTUAL TABLE page USING fts5(path, text)")

    def begin(self, fence: int) -> None:
        """Empty the index for a rebuild."""
        with closing(self._open()) as connection, connection:
            self._admit(connection, fence)
            connection.execute("DELETE FROM page")

    def add(self, paths: Sequence[Path], fence: int) -> None:
        """Index some files.

        Raises:
            StaleFenceError: a later holder has written already.
        """
        pages = [(str(path), path.read_text(errors="replace")) for path in paths]
        with closing(self._open()) as connection, connection:
            self._admit(connection, fence)
            connection.executemany("INSERT INTO page VALUES (?, ?)", pages)

    def count(self, word: str = "") -> int:
        """Return in how many pages ``word`` stands; how many pages there are without one."""
        query = "SELECT count(*) FROM page" + (" WHERE page MATCH ?" if word else "")
        with closing(self._open()) as connection:
            (count,) = connection.execute(query, (word,) if word else ()).fetchone()
        return int(count)

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._file, timeout=30)
        connection.execute("PRAGMA synchronous = OFF")  # it is thrown away after the demo
        return connection

    def _admit(self, connection: sqlite3.Connection, fence: int) -> None:
        admitted = connection.execute("UPDATE guard SET fence = ?1 WHERE fence <= ?1", (fence,))
        if admitted.rowcount == 0:
            raise StaleFenceError(f"fence {fence} is older than the largest seen")
