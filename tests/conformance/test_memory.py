"""MemoryLease keeps what is asked of a backend."""

from __future__ import annotations

import pytest

from tako_sync.abc import LeaseBackend
from tako_sync.backends.memory import MemoryLease
from tako_sync.testing.conformance import BackendConformance


class TestMemoryLease(BackendConformance):
    shared_between_processes = False

    @pytest.fixture
    def backend(self) -> MemoryLease:
        return MemoryLease()

    def forget(self, backend: LeaseBackend, key: str) -> None:
        assert isinstance(backend, MemoryLease)
        del backend._table[key]
