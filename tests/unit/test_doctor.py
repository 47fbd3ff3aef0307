"""``doctor`` on memory, on SQLite, and on storages that are not what they should be."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import tako_sync
from tako_sync.abc import ABSENT, Absent, Version
from tako_sync.backends.memory import MemoryLease
from tako_sync.backends.sqlite import SqliteLease, examination
from tako_sync.clock import SystemClock
from tako_sync.errors import BackendDeniedError, BackendUnavailableError, ConfigurationError
from tako_sync.findings import NOTE, OK, PROBLEM, Finding, Report
from tako_sync.policy import LeasePolicy
from tako_sync.record import Record, State, read
from tako_sync.runtime import Runtime
from tako_sync.testing.faults import FaultyBackend, fail

SCRATCH = "run-tako-doctor-scratch"


def told(report: Report, verdict: str) -> str:
    return "\n".join(finding.text for finding in report.findings if finding.verdict == verdict)


def test_memory_is_healthy_and_excludes_one_process() -> None:
    report = tako_sync.doctor("memory:")
    assert report.healthy and report
    assert "compares and swaps" in told(report, OK)
    assert "excludes its threads from each other, and nobody else" in told(report, NOTE)
    assert "a crash frees a name after that" in told(report, OK)


def test_sqlite_is_healthy_and_says_who_may_write_it(tmp_path: Path) -> None:
    backend = SqliteLease(tmp_path / "leases.sqlite3")
    report = tako_sync.doctor(backend)
    assert report.healthy, str(report)
    assert str(tmp_path) in told(report, OK)
    assert "its clock is the machine's since boot" in str(report).replace("\n           ", " ")
    backend.close()


def test_it_reads_as_lines_that_fit_a_terminal(tmp_path: Path) -> None:
    backend = SqliteLease(tmp_path / "leases.sqlite3")
    text = str(tako_sync.doctor(backend))
    backend.close()
    first, *_, last = text.splitlines()
    assert first == backend.describe()
    assert last == "  = healthy"
    assert all(len(line) <= 80 for line in text.splitlines()[1:] if str(tmp_path) not in line)


def test_it_leaves_one_record_that_is_free_and_goes_on_from_it() -> None:
    store = MemoryLease()
    tako_sync.doctor(store)
    tako_sync.doctor(store)
    assert list(store.list("", timeout=1)) == [SCRATCH]
    content = read(store.read(SCRATCH, timeout=1))
    assert isinstance(content, Record) and content.state is State.RELEASED


def test_what_is_bound_is_examined_by_default() -> None:
    tako_sync.configure(app="shop", backend="memory:", policy=LeasePolicy(ttl=60))
    assert "ttl 60 s" in str(tako_sync.doctor())
    with pytest.raises(ConfigurationError, match="no URL"):
        tako_sync.doctor("leases")


class Overwriting(MemoryLease):
    """A storage that takes every write, as some emulators do."""

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        current = self.read(key, timeout=timeout).version
        return super().write(key, body, expect=current, timeout=timeout)


def test_a_storage_that_does_not_compare_is_a_problem() -> None:
    report = tako_sync.doctor(Overwriting())
    assert not report
    assert "does not compare and swap" in told(report, PROBLEM)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BackendUnavailableError("connection refused"), "cannot be reached within 5 s"),
        (BackendDeniedError("permission is missing: storage.objects.get"), "it refuses"),
    ],
)
def test_a_fault_is_a_problem_and_the_rest_is_looked_at_all_the_same(
    error: Exception, words: str
) -> None:
    clock = SystemClock()
    storage = FaultyBackend(MemoryLease(), clock)
    storage.always("*", fail(lambda: error))
    report = tako_sync.doctor(storage)
    assert words in told(report, PROBLEM) and str(error) in told(report, PROBLEM)
    assert "nobody else" in told(report, NOTE)


def test_one_write_a_second_is_waited_for() -> None:
    storage = FaultyBackend(MemoryLease(), SystemClock())
    storage.script("write", fail(lambda: BackendUnavailableError("429", retry_after=0.05)))
    assert tako_sync.doctor(storage).healthy


def test_a_storage_without_a_clock_is_noted() -> None:
    class Timeless(MemoryLease):
        def read(self, key: str, *, timeout: float) -> object:  # type: ignore[override]
            from attrs import evolve

            return evolve(super().read(key, timeout=timeout), written=None, now=None)

    assert "the storage has no clock" in told(tako_sync.doctor(Timeless()), NOTE)


def test_a_list_that_is_not_allowed_is_noted() -> None:
    storage = FaultyBackend(MemoryLease(), SystemClock())
    storage.always("list", fail(lambda: BackendDeniedError("no permission to list")))
    report = tako_sync.doctor(storage)
    assert report.healthy
    assert "leases cannot be listed: no permission to list" in told(report, NOTE)


def test_a_file_on_a_network_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_file_system", lambda path: "nfs4")
    backend = SqliteLease(tmp_path / "leases.sqlite3")
    report = tako_sync.doctor(backend)
    assert "(nfs4), whose locks are not to be relied on" in told(report, PROBLEM)
    assert str(report).endswith("= 1 problem")
    backend.close()


def test_a_full_disk_and_a_file_for_everybody_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "leases.sqlite3"
    backend = SqliteLease(path)
    backend.write("x", b"", expect=ABSENT, timeout=20)
    path.chmod(0o666)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    notes = told(tako_sync.doctor(backend), NOTE)
    assert "1 MiB are left on its disk" in notes
    assert "everybody on this machine may write" in notes
    backend.close()


def test_a_storage_that_takes_long_is_noted() -> None:
    from tako_sync.testing.faults import delay

    storage = FaultyBackend(MemoryLease(), SystemClock(), prompt=False)
    storage.script("read", delay(0.2))
    runtime = Runtime(storage, policy=LeasePolicy(ttl=3))
    assert "give leases a longer ttl" in str(tako_sync.doctor(runtime))


def test_a_finding_is_wrapped_and_its_advice_stands_apart() -> None:
    text = str(Finding(PROBLEM, "word " * 40, "advice " * 20))
    assert text.startswith("  PROBLEM  word")
    assert sum(line.strip().startswith("->") for line in text.splitlines()) == 1
