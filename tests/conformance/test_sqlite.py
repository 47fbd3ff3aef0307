"""SqliteLease keeps what is asked of a backend."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tako_sync.abc import LeaseBackend
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.testing.conformance import BackendConformance


def path_of(backend: LeaseBackend) -> Path:
    return Path("/", backend.describe().removeprefix("sqlite:///"))


class TestSqliteLease(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[SqliteLease]:
        backend = SqliteLease(tmp_path / "leases.sqlite3")
        yield backend
        backend.close()

    def reopen(self, backend: LeaseBackend) -> SqliteLease:
        return SqliteLease(path_of(backend))

    def forget(self, backend: LeaseBackend, key: str) -> None:
        with closing(sqlite3.connect(path_of(backend))) as connection, connection:
            connection.execute("DELETE FROM lease WHERE key = ?", (key,))

    def unreachable(self, backend: LeaseBackend) -> SqliteLease:
        not_a_folder = path_of(backend).with_name("file")
        not_a_folder.touch()
        return SqliteLease(not_a_folder / "leases.sqlite3")
