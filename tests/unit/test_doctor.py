"""``doctor`` on memory, on SQLite, and on storages that are not what they should be."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from attrs import evolve

import tako_sync
from tako_sync.abc import ABSENT, Absent, Interval, Snapshot, Version
from tako_sync.backends.memory import MemoryLease
from tako_sync.backends.sqlite import SqliteLease, examination
from tako_sync.clock import SystemClock
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    ConfigurationError,
    VersionConflictError,
)
from tako_sync.findings import NOTE, OK, PROBLEM, Finding, Report
from tako_sync.policy import LeasePolicy
from tako_sync.probe import Probe
from tako_sync.record import Record, State, read
from tako_sync.runtime import Runtime
from tako_sync.testing.faults import FaultyBackend, delay, fail

SCRATCH = "run-app-dev-tako-doctor"


def told(report: Report, checked: str) -> str:
    """Return what was found there: the verdict, the text and the advice."""
    found = [finding for finding in report.findings if finding.checked == checked]
    return "\n".join(f"{item.verdict}: {item.text} -> {item.advice}" for item in found)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SqliteLease]:
    backend = SqliteLease(tmp_path / "leases.sqlite3")
    yield backend
    backend.close()


# --- What is well ----------------------------------------------------------------------


def test_memory_is_healthy_and_excludes_one_process() -> None:
    report = tako_sync.doctor("memory:")
    assert report.healthy and report and not report.problems
    assert told(report, "compare-and-swap").startswith("ok: kept")
    assert told(report, "reach").startswith("note: ")
    assert "its threads from each other, and nobody else" in told(report, "reach")


def test_memory_under_several_workers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for server in ("gunicorn", "uwsgi", "celery"):  # other tests may have loaded them
        monkeypatch.delitem(sys.modules, server, raising=False)
    monkeypatch.setenv("WEB_CONCURRENCY", "1")
    assert "workers" not in told(tako_sync.doctor("memory:"), "reach")
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    assert "WEB_CONCURRENCY=4 asks for 4 workers" in told(tako_sync.doctor("memory:"), "reach")
    monkeypatch.delenv("WEB_CONCURRENCY")
    monkeypatch.setitem(sys.modules, "gunicorn", ModuleType("gunicorn"))
    assert "gunicorn is loaded" in told(tako_sync.doctor("memory:"), "reach")


def test_sqlite_is_healthy_and_says_where_and_whose_it_is(file: SqliteLease) -> None:
    report = tako_sync.doctor(file)
    assert report.healthy, str(report)
    assert told(report, "journal").startswith("ok: mode delete")
    assert f"user {os.getuid()} alone" in told(report, "who may write")
    assert "MiB are left" in told(report, "free space")
    assert "setting the time of day changes nothing" in told(report, "clock since boot")
    assert "this host's agrees with it" in told(report, "clock")


def test_what_the_policy_promises_is_said_in_its_numbers() -> None:
    report = tako_sync.doctor(Runtime("memory:", policy=LeasePolicy(ttl=60, poll=4)))
    assert "60 s (the ttl)" in told(report, "a crash") and "(5 s) later" in told(report, "a crash")
    assert "after 54 s at most, 6 s (the margin)" in told(report, "a loss")
    assert "each 20 s" in told(report, "renewals")
    assert "may take 10 s (ttl/6), and a waiter looks each 4 s" in told(report, "round trips")


def test_what_is_bound_is_examined_by_default() -> None:
    tako_sync.configure(app="shop", backend="memory:", policy=LeasePolicy(ttl=60))
    assert "60 s (the ttl)" in told(tako_sync.doctor(), "a crash")
    assert "run-shop-dev-*" in told(tako_sync.doctor(), "listing")
    with pytest.raises(ConfigurationError, match="no URL"):
        tako_sync.doctor("leases")


def test_it_reads_as_lines_that_fit_a_terminal(file: SqliteLease, tmp_path: Path) -> None:
    first, *lines, last = str(tako_sync.doctor(file)).splitlines()
    assert first == file.describe()
    assert last == "  = healthy"
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)


def test_a_finding_is_wrapped_and_its_advice_stands_apart() -> None:
    text = str(Finding("this", PROBLEM, "word " * 40, "advice " * 20))
    assert text.startswith("  PROBLEM  this: word")
    assert sum(line.strip().startswith("->") for line in text.splitlines()) == 1
    assert all(len(line) <= 80 for line in text.splitlines())
    command = "gcloud " + "x" * 90
    assert command.split()[1] in str(Finding("this", NOTE, "", command))  # whole, to be copied
    both = Report("memory:", (Finding("a", PROBLEM, "b"), Finding("c", PROBLEM, "d")))
    assert str(both).endswith("= 2 problems") and not both


# --- What it leaves alone, and what it leaves behind -----------------------------------


def test_it_leaves_one_record_that_is_free_and_goes_on_from_it() -> None:
    store = MemoryLease()
    assert tako_sync.doctor(store) and tako_sync.doctor(store)
    assert list(store.list("", timeout=1)) == [SCRATCH]
    content = read(store.read(SCRATCH, timeout=1))
    assert isinstance(content, Record) and content.state is State.RELEASED


def test_no_lock_can_have_the_name_of_the_scratch_lease() -> None:
    with pytest.raises(ConfigurationError, match="kept for the framework"):
        tako_sync.Lock("tako-doctor")


def test_a_lease_that_is_held_stays_as_it_is() -> None:
    runtime = tako_sync.configure(backend="memory:")
    with tako_sync.Lock("reindex").hold(timeout=0) as ctx:
        before = runtime.backend.read("run-app-dev-reindex", timeout=1)
        report = tako_sync.doctor()
        assert runtime.backend.read("run-app-dev-reindex", timeout=1).version == before.version
        ctx.check()
    assert "1 lease is recorded there" in told(report, "listing")


def test_what_others_keep_under_that_name_is_not_replaced() -> None:
    """Keys are ambiguous: app-dev/tako/doctor is run-app-dev-tako-doctor, too."""
    store = MemoryLease()
    mine = Runtime(store, app="app-dev", env="tako")
    with tako_sync.Lock("doctor").bound_to(mine).hold(timeout=0) as ctx:
        report = tako_sync.doctor(store)
        ctx.check()
    assert "nothing written" in told(report, "compare-and-swap")
    assert "app-dev/tako/doctor" in told(report, "compare-and-swap")
    assert not report
    store = MemoryLease()
    version = store.write(SCRATCH, b"rubbish", expect=ABSENT, timeout=1)
    assert "no record of ours" in told(tako_sync.doctor(store), "compare-and-swap")
    assert store.read(SCRATCH, timeout=1).version == version


def test_several_at_once_do_not_take_each_other_for_a_fault() -> None:
    store, reports = MemoryLease(), list[Report]()
    threads = [
        threading.Thread(target=lambda: reports.append(tako_sync.doctor(store))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for report in reports:
        assert "not kept" not in told(report, "compare-and-swap")


class Disturbed(MemoryLease):
    """Another examination writes the scratch lease, right before ours replaces it."""

    times = 0

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        if expect is not ABSENT and self.times:
            self.times -= 1
            other = Probe(Runtime(MemoryLease()))._body()
            super().write(key, other, expect=self.read(key, timeout=1).version, timeout=1)
        return super().write(key, body, expect=expect, timeout=timeout)


def test_it_begins_anew_where_somebody_else_was_at_it() -> None:
    store = Disturbed()
    store.times = 1
    assert told(tako_sync.doctor(store), "compare-and-swap").startswith("ok: kept")
    store.times = 100
    told_then = told(tako_sync.doctor(store), "compare-and-swap")
    assert told_then.startswith("problem: others wrote") and "run this again" in told_then


# --- Storages that are none --------------------------------------------------------------


class Overwriting(MemoryLease):
    """It takes every write, as some emulators do."""

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        current = self.read(key, timeout=timeout).version
        return super().write(key, body, expect=current, timeout=timeout)


class CreatingOnly(Overwriting):
    """It minds that there is none, but not which one there is."""

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        if expect is ABSENT and self.read(key, timeout=timeout).version is not ABSENT:
            raise VersionConflictError(key)
        return super().write(key, body, expect=expect, timeout=timeout)


class Refusing(MemoryLease):
    """Nothing that is there can be replaced."""

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        if expect is not ABSENT:
            raise VersionConflictError(key)
        return super().write(key, body, expect=expect, timeout=timeout)


class Lagging(MemoryLease):
    """Reads come from a copy that is one write behind, as from a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.before = super().read("", timeout=1)

    def read(self, key: str, *, timeout: float) -> Snapshot:
        return self.before

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        before = super().read(key, timeout=timeout)
        version = super().write(key, body, expect=expect, timeout=timeout)
        self.before = before
        return version


class Garbling(MemoryLease):
    """Other bytes come out than went in."""

    def read(self, key: str, *, timeout: float) -> Snapshot:
        snapshot = super().read(key, timeout=timeout)
        return evolve(snapshot, body=snapshot.body.upper())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Overwriting, "a second creation of one record was taken"),
        (CreatingOnly, "a write was taken that named an older version"),
        (Refusing, "names the very version which stands"),
        (Lagging, "an older state than that of the write before it"),
        (Garbling, "other bytes than were written"),
    ],
)
def test_a_storage_that_does_not_compare_and_swap_is_a_problem(
    kind: Callable[[], MemoryLease], words: str
) -> None:
    report = tako_sync.doctor(kind())
    assert not report.healthy
    assert told(report, "compare-and-swap").startswith("problem: not kept: ")
    assert words in told(report, "compare-and-swap")
    assert "use another storage" in told(report, "compare-and-swap")


# --- Faults ------------------------------------------------------------------------------


def faulty(prompt: bool = True) -> FaultyBackend:
    return FaultyBackend(MemoryLease(), SystemClock(), prompt=prompt)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BackendUnavailableError("connection refused"), "no answer that counts within 5 s"),
        (BackendDeniedError("permission is missing: storage.objects.get"), "refused"),
        (ZeroDivisionError("by seven"), "what no backend may"),
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_fault_is_told_once_and_the_rest_is_looked_at_all_the_same(
    error: Exception, words: str, prompt: bool
) -> None:
    storage = faulty(prompt)
    storage.always("*", fail(lambda: error))
    report = tako_sync.doctor(storage)
    assert len(report.problems) == 1
    assert words in told(report, "reading") and str(error) in told(report, "reading")
    assert report.problems[0].advice
    assert "nobody else" in told(report, "reach") and told(report, "a crash")


@pytest.mark.parametrize(("number", "doing"), [(0, "creating"), (1, "writing"), (2, "replacing")])
def test_a_write_that_is_refused_says_which(number: int, doing: str) -> None:
    storage = faulty()
    storage.script("write", *[None] * number, fail(lambda: BackendDeniedError("may not")))
    report = tako_sync.doctor(storage)
    assert told(report, doing).startswith("problem: refused: may not")
    assert [problem.checked for problem in report.problems] == [doing]


def test_who_may_write_but_not_read_is_told_that() -> None:
    storage = faulty()
    storage.always("read", fail(lambda: BackendDeniedError("may not read")))
    report = tako_sync.doctor(storage)
    assert told(report, "reading").startswith("problem: refused: may not read")
    assert told(report, "compare-and-swap").startswith("ok")
    again = tako_sync.doctor(storage)  # it is there now, and cannot be replaced unseen
    assert not again and not told(again, "compare-and-swap")


def test_one_write_a_second_is_waited_for() -> None:
    storage = faulty()
    storage.script("write", fail(lambda: BackendUnavailableError("429", retry_after=0.05)))
    assert tako_sync.doctor(storage).healthy


def test_a_storage_that_asks_for_pause_after_pause_is_left() -> None:
    storage = faulty()
    storage.always("write", fail(lambda: BackendUnavailableError("again 429", retry_after=0.01)))
    assert "again 429" in told(tako_sync.doctor(storage), "creating")
    assert len([call for call in storage.calls if call.op == "write"]) == 4


def test_a_long_pause_is_told_rather_than_made() -> None:
    storage = faulty()
    storage.always("write", fail(lambda: BackendUnavailableError("in an hour", retry_after=3600)))
    assert "in an hour" in told(tako_sync.doctor(storage), "creating")


def test_a_list_that_is_not_allowed_is_noted() -> None:
    storage = faulty()
    storage.always("list", fail(lambda: BackendDeniedError("no permission to list")))
    report = tako_sync.doctor(storage)
    assert report.healthy
    assert told(report, "listing").startswith("note: refused: no permission to list")


def test_a_backend_that_cannot_examine_itself_is_no_traceback() -> None:
    class Faulty(MemoryLease):
        prompt = False
        hang = threading.Event()

        def examine(self, policy: LeasePolicy, *, timeout: float) -> Iterable[Finding]:
            yield Finding("a thing", OK, "found")
            self.hang.wait(20)
            raise LookupError("nothing")

    backend = Faulty()
    report = tako_sync.doctor(Runtime(backend, policy=LeasePolicy(ttl=0.6)))
    backend.hang.set()
    assert told(report, "a thing") == "ok: found -> "
    assert told(report, "the storage's own").startswith("note: no answer that counts")
    assert "LookupError('nothing')" in told(tako_sync.doctor(backend), "the storage's own")


def test_a_backend_that_cannot_say_where_it_is_is_no_traceback() -> None:
    class Nowhere(MemoryLease):
        def describe(self) -> str:
            raise LookupError("nowhere")

    assert "Nowhere object" in tako_sync.doctor(Nowhere()).where


def test_a_storage_that_takes_long_is_noted_with_a_ttl_that_would_do() -> None:
    storage = faulty(prompt=False)
    storage.script("read", delay(0.2))
    report = tako_sync.doctor(Runtime(storage, policy=LeasePolicy(ttl=3)))
    assert told(report, "round trips").startswith("note: ")
    ttl = int(told(report, "round trips").partition("LeasePolicy(ttl=")[2].partition(")")[0])
    assert 5 <= ttl <= 20


# --- The clock ---------------------------------------------------------------------------


class Clocked(MemoryLease):
    """Its clock shows the time of day, and so many seconds more; None: it has no clock."""

    def __init__(self, ahead: float | None) -> None:
        super().__init__()
        self.ahead = ahead

    def read(self, key: str, *, timeout: float) -> Snapshot:
        now = None
        if self.ahead is not None:
            now = Interval.exactly(SystemClock().wall().timestamp() + self.ahead)
        return evolve(super().read(key, timeout=timeout), written=None, now=now)


@pytest.mark.parametrize(
    ("ahead", "verdict", "words"),
    [
        (0, OK, "agrees with it"),
        (5, OK, " s behind it, which does leases no harm"),
        (-5, OK, " s ahead of it, which does leases no harm"),
        (3600, NOTE, " s behind it, which does leases no harm"),
        (None, NOTE, "the storage has none"),
    ],
)
def test_the_difference_of_the_clocks_is_told_and_called_harmless(
    ahead: float | None, verdict: str, words: str
) -> None:
    report = tako_sync.doctor(Clocked(ahead))
    assert report.healthy
    assert told(report, "clock").startswith(verdict) and words in told(report, "clock")


# --- A file and its folder -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("nfs4", PROBLEM), ("fuse.gcsfuse", PROBLEM), ("tmpfs", NOTE), ("ext4", OK), ("", NOTE)],
)
def test_the_kind_of_the_file_system_counts(
    file: SqliteLease, monkeypatch: pytest.MonkeyPatch, kind: str, verdict: str
) -> None:
    monkeypatch.setattr(examination, "file_system", lambda path: kind)
    report = tako_sync.doctor(file)
    assert told(report, "file system").startswith(verdict)
    assert kind in told(report, "file system")
    assert report.healthy is (verdict != PROBLEM)


def test_the_file_system_is_that_of_the_innermost_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "rootfs / rootfs rw 0 0\n"
        "disk / ext4 rw 0 0\n"
        "server:/x /srv/my\\040data nfs4 rw 0 0\n"
        "disk2 /srv/my\\040data/local xfs rw 0 0\n"
        "nonsense\n"
    )
    monkeypatch.setattr(examination, "_MOUNTS", mounts)
    assert examination.file_system(Path("/srv/my data/leases")) == "nfs4"
    assert examination.file_system(Path("/srv/my data/local/leases")) == "xfs"
    assert examination.file_system(Path("/srv/my database")) == "ext4"
    mounts.unlink()
    assert examination.file_system(Path("/srv")) == ""


def test_a_full_disk_and_a_file_for_everybody_are_noted(
    file: SqliteLease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write("x", b"", expect=ABSENT, timeout=20)
    path = tmp_path / "leases.sqlite3"
    path.chmod(0o666)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    report = tako_sync.doctor(file)
    assert told(report, "free space").startswith("note: 1 MiB")
    assert "everybody on this machine may write" in told(report, "who may write")
    assert f"chmod o-w {path}" in told(report, "who may write")
    path.chmod(0o660)
    assert "and group" in told(tako_sync.doctor(file), "who may write")


def test_a_folder_that_cannot_be_written_is_a_problem(
    file: SqliteLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may, whatever the mode
    assert told(tako_sync.doctor(file), "folder").startswith("problem")


def test_a_path_that_is_no_database_is_told_as_that(tmp_path: Path) -> None:
    path = tmp_path / "leases.sqlite3"
    path.write_text("something else " * 100)
    backend = SqliteLease(path)
    report = tako_sync.doctor(backend)
    backend.close()
    assert "no SQLite database" in told(report, "reading")
    assert told(report, "journal").startswith("note: not looked at")
    assert not report
