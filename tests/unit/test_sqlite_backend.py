"""SqliteLease beyond the conformance suite: its clock, its file, and what can happen to both."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from attrs import define
from freezegun import freeze_time

from tako_sync.abc import ABSENT, BODY_LIMIT, Absent, Interval, Version
from tako_sync.backends.sqlite import SqliteLease, boot_clock
from tako_sync.backends.sqlite.file import LeaseFile, Session
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    ConfigurationError,
    VersionConflictError,
)

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
STUCK = 10
"""Seconds after which a child ends itself."""


@define
class Machine:
    """A machine's clocks, as they might be."""

    boot: str | None = "first boot"
    since: float = 100.0
    time: float = 1_000_000.0

    def identity(self) -> str | None:
        return self.boot

    def since_boot(self) -> float:
        return self.since

    def wall(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.since += seconds
        self.time += seconds

    def reboot(self, down: float = 60.0) -> None:
        self.boot, self.since, self.time = f"{self.boot}+", 10.0, self.time + down


@pytest.fixture(autouse=True)
def every_file_is_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python 3.13 warns of connections that are dropped without a close."""
    files: list[LeaseFile] = []
    init = LeaseFile.__init__

    def remember(self: LeaseFile, path: object) -> None:
        init(self, path)
        files.append(self)

    monkeypatch.setattr(LeaseFile, "__init__", remember)
    yield
    for file in files:
        file.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "leases.sqlite3"


def create(store: SqliteLease, key: str = "a", body: bytes = b"x") -> Version:
    return store.write(key, body, expect=ABSENT, timeout=9)


def age(store: SqliteLease, key: str = "a") -> float:
    """Return the age that frees a lease."""
    seen = store.read(key, timeout=20)
    assert seen.now is not None and seen.written is not None
    return seen.now.earliest - seen.written.latest


def now(store: SqliteLease) -> float:
    seen = store.read("nothing", timeout=20).now
    assert seen is not None and seen.earliest == seen.latest
    return seen.latest


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(query).fetchall()


def in_child(run: Callable[[], object]) -> int:
    """Start ``run`` in a forked child; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(STUCK)
        run()
        status = 0
    except BaseException as error:  # noqa: BLE001 - only the status leaves the child
        os.write(2, f"in the child: {error!r}\n".encode())
    finally:
        os._exit(status)


def ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- The path --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nonsense",
    ["", ":memory:", "a\0b", "a\ud800b", "~nobody-of-this-name/leases", b"bytes", None, 7],
)
def test_a_path_that_cannot_name_a_file_is_refused_where_it_is_written(nonsense: object) -> None:
    with pytest.raises(ConfigurationError):
        SqliteLease(nonsense)  # type: ignore[arg-type]


def test_a_folder_is_refused_where_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (tmp_path, "~"):
        with pytest.raises(ConfigurationError, match="folder"):
            SqliteLease(folder)


def test_a_relative_path_is_refused_where_there_is_no_working_folder_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigurationError, match="cannot be named"):
        SqliteLease("leases.sqlite3")


def test_nothing_is_made_before_the_first_use(path: Path) -> None:
    store = SqliteLease(path)
    store.describe()
    store.close()
    assert not path.parent.exists()


def test_file_and_folder_are_for_this_user_only(path: Path) -> None:
    create(SqliteLease(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_relative_path_is_that_of_the_moment_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = SqliteLease("leases.sqlite3")
    monkeypatch.chdir("/")
    create(store)
    assert (tmp_path / "leases.sqlite3").exists()
    assert store.describe() == f"sqlite://{tmp_path}/leases.sqlite3"


def test_between_requests_there_is_one_file_and_nothing_beside_it(path: Path) -> None:
    """So that a copy, or one put in its place, never meets a journal of another."""
    store = SqliteLease(path)
    create(store)
    store.read("a", timeout=20)
    assert os.listdir(path.parent) == [path.name]


# --- Versions and bytes ----------------------------------------------------------------


def test_a_version_has_a_count_over_the_whole_store_and_a_nonce(path: Path) -> None:
    store = SqliteLease(path)
    versions = [create(store, f"key-{number}") for number in range(20)]
    assert [int(version.partition("-")[0]) for version in versions] == list(range(1, 21))
    nonces = {version.partition("-")[2] for version in versions}
    assert len(nonces) == 20
    assert all(re.fullmatch("[0-9a-f]{16}", nonce) for nonce in nonces)


def test_the_count_goes_on_where_it_was_in_a_later_process(path: Path) -> None:
    create(SqliteLease(path), "a")
    assert create(SqliteLease(path), "b").startswith("2-")


def test_an_empty_body_is_a_record(path: Path) -> None:
    store = SqliteLease(path)
    version = create(store, body=b"")
    seen = store.read("a", timeout=20)
    assert (seen.body, seen.version) == (b"", version)


def test_of_a_body_that_someone_else_made_huge_little_more_than_the_limit_is_read(
    path: Path,
) -> None:
    store = SqliteLease(path)
    create(store)
    rows(path, "UPDATE lease SET body = zeroblob(5000000)")
    assert len(store.read("a", timeout=20).body) == BODY_LIMIT + 1


# --- The clock -------------------------------------------------------------------------


def test_its_time_begins_with_the_wall_clock_and_goes_on_with_the_boot_clock(path: Path) -> None:
    machine = Machine()
    store = SqliteLease(path, _clock=machine)
    assert now(store) == pytest.approx(1_000_000)
    create(store)
    machine.sleep(7)
    seen = store.read("a", timeout=20)
    assert seen.written is not None and seen.written.latest == pytest.approx(1_000_000)
    assert seen.written == Interval.exactly(seen.written.latest)
    assert age(store) == pytest.approx(7)


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0 * 400])
def test_setting_the_wall_clock_does_nothing(path: Path, jump: float) -> None:
    machine = Machine()
    store = SqliteLease(path, _clock=machine)
    create(store)
    machine.sleep(5)
    machine.time += jump
    assert age(store) == pytest.approx(5)
    assert age(SqliteLease(path, _clock=machine)) == pytest.approx(5)
    assert now(store) == pytest.approx(1_000_005)


@pytest.mark.parametrize("down", [-900_000.0, 0.0, 3600.0])
def test_over_a_reboot_time_never_falls_back(path: Path, down: float) -> None:
    """Fences are made of it. A machine without a battery boots into 1970."""
    machine = Machine()
    store = SqliteLease(path, _clock=machine)
    machine.sleep(500)
    create(store)
    before = now(store)
    machine.reboot(down)
    after = now(SqliteLease(path, _clock=machine))
    assert after == pytest.approx(max(before, machine.time))
    assert after >= before


def test_a_record_left_behind_by_a_reboot_ages_from_the_first_look(path: Path) -> None:
    machine = Machine()
    create(SqliteLease(path, _clock=machine))
    machine.sleep(1000)
    machine.reboot(down=7200)
    ages = []
    for _ in range(4):  # each in a process of its own, that looks and ends
        ages.append(age(SqliteLease(path, _clock=machine)))
        machine.sleep(10)
    assert ages == pytest.approx([0, 10, 20, 30])


def test_a_record_left_behind_has_nothing_said_of_its_beginning(path: Path) -> None:
    machine = Machine()
    store = SqliteLease(path, _clock=machine)
    create(store)
    machine.reboot()
    seen = SqliteLease(path, _clock=machine).read("a", timeout=20)
    assert seen.written is not None and seen.now is not None
    assert seen.written.earliest < 0 <= seen.written.latest <= seen.now.latest


def test_two_namespaces_do_not_disturb_each_others_sightings(path: Path) -> None:
    """Two containers of one machine that look in turn, at a holder in a third that has died."""
    one, another = Machine("namespace 1"), Machine("namespace 2", since=5.0)
    create(SqliteLease(path, _clock=Machine("namespace 0", since=9_000.0, time=5_000.0)))
    ages: list[tuple[float, float]] = []
    for _ in range(4):
        ages.append(
            (age(SqliteLease(path, _clock=one)), age(SqliteLease(path, _clock=another))),
        )
        one.sleep(10)
        another.sleep(10)
    assert [left for left, _ in ages] == pytest.approx([0, 10, 20, 30])
    assert [right for _, right in ages] == pytest.approx([0, 10, 20, 30])


def test_two_namespaces_that_write_in_turn_never_find_each_other_old(path: Path) -> None:
    one, another = Machine("namespace 1"), Machine("namespace 2", since=50_000.0, time=9_999_999.0)
    stores = [SqliteLease(path, _clock=one), SqliteLease(path, _clock=another)]
    version: Version | Absent = ABSENT
    for number in range(10):
        version = stores[number % 2].write("a", b"x", expect=version, timeout=20)
        for _ in range(2):
            assert [0 <= age(store) <= 10 for store in stores] == [True, True]
            one.sleep(5)
            another.sleep(5)


def test_a_sighting_is_of_one_version_and_goes_with_it(path: Path) -> None:
    machine, foreign = Machine(), Machine("another namespace")
    store, elsewhere = SqliteLease(path, _clock=machine), SqliteLease(path, _clock=foreign)
    version = create(elsewhere)
    age(store)
    machine.sleep(20)
    assert age(store) == pytest.approx(20)
    assert rows(path, "SELECT count(*) FROM seen") == [(1,)]
    elsewhere.write("a", b"renewed", expect=version, timeout=20)
    assert rows(path, "SELECT count(*) FROM seen") == [(0,)]
    assert age(store) == pytest.approx(0)


def test_looking_at_ones_own_records_writes_nothing(path: Path) -> None:
    store = SqliteLease(path, _clock=Machine())
    create(store)
    store.read("a", timeout=20)
    before = path.read_bytes()
    for _ in range(3):
        store.read("a", timeout=20)
    assert path.read_bytes() == before


def test_without_a_boot_clock_all_ages_are_unknown(path: Path) -> None:
    store = SqliteLease(path, _clock=Machine(boot=None))
    version = create(store)
    seen = store.read("a", timeout=20)
    assert (seen.version, seen.written, seen.now) == (version, None, None)
    assert store.read("nothing", timeout=20).now is None


def test_a_record_of_a_system_without_a_boot_clock_ages_from_the_first_look(path: Path) -> None:
    create(SqliteLease(path, _clock=Machine(boot=None)))
    machine = Machine()
    store = SqliteLease(path, _clock=machine)
    assert age(store) == pytest.approx(0)
    machine.sleep(4)
    assert age(store) == pytest.approx(4)


def test_processes_of_one_boot_agree_on_the_time_whoever_comes_first(path: Path) -> None:
    one, another = Machine(), Machine(time=1_900_000.0)  # the wall clock was set in between
    first = now(SqliteLease(path, _clock=one))
    assert now(SqliteLease(path, _clock=another)) == first


def test_the_machines_clock_is_known_by_boot_and_time_namespace() -> None:
    clock = boot_clock.SystemBootClock()
    if not Path("/proc/sys/kernel/random/boot_id").exists():
        assert clock.identity() is None
        return
    identity = clock.identity()
    assert identity is not None
    assert identity.startswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    assert identity == boot_clock.SystemBootClock().identity()
    assert clock.since_boot() <= clock.since_boot()


def test_freezegun_moves_nothing(path: Path) -> None:
    store = SqliteLease(path)
    create(store)
    before = now(store)
    with freeze_time("1999-12-31") as frozen:
        frozen.tick(1e6)
        assert age(store) < 60
        assert before <= now(store) < before + 60
        assert before <= now(SqliteLease(path)) < before + 60


# --- The file is replaced, deleted, restored -------------------------------------------


def test_a_deleted_file_is_made_anew_and_its_records_are_gone(path: Path) -> None:
    store = SqliteLease(path)
    version = create(store)
    path.unlink()
    assert store.read("a", timeout=20).version is ABSENT
    assert path.exists()
    path.unlink()
    with pytest.raises(VersionConflictError):
        store.write("a", b"renewed", expect=version, timeout=20)
    create(store)
    assert SqliteLease(path).read("a", timeout=20).body == b"x"


def test_a_deleted_folder_is_made_anew(path: Path) -> None:
    store = SqliteLease(path)
    create(store)
    shutil.rmtree(path.parent)
    create(store)
    assert SqliteLease(path).read("a", timeout=20).body == b"x"


def test_a_file_put_in_its_place_is_the_one_that_counts(path: Path, tmp_path: Path) -> None:
    store, other = SqliteLease(path), SqliteLease(tmp_path / "other")
    old = create(store, body=b"in the old one")
    create(other, body=b"in the new one")
    other.close()
    os.replace(tmp_path / "other", path)
    assert store.read("a", timeout=20).body == b"in the new one"
    with pytest.raises(VersionConflictError):
        store.write("a", b"renewed", expect=old, timeout=20)


def test_in_a_restored_copy_a_holders_version_is_never_anothers(path: Path, tmp_path: Path) -> None:
    """The counts come again there; the nonces do not."""
    holder = SqliteLease(path)
    first = create(holder)
    shutil.copy(path, tmp_path / "backup")
    mine = holder.write("a", b"mine", expect=first, timeout=20)
    os.replace(tmp_path / "backup", path)
    theirs = SqliteLease(path).write("a", b"another's", expect=first, timeout=20)
    assert mine.partition("-")[0] == theirs.partition("-")[0]
    with pytest.raises(VersionConflictError):
        holder.write("a", b"renewed", expect=mine, timeout=20)
    assert holder.read("a", timeout=20).body == b"another's"


def test_an_older_copy_written_over_the_file_is_read_at_once(path: Path, tmp_path: Path) -> None:
    """As cp does: the file is the same one, its contents are not."""
    store = SqliteLease(path)
    first = create(store)
    shutil.copy(path, tmp_path / "backup")
    mine = store.write("a", b"mine", expect=first, timeout=20)
    shutil.copyfile(tmp_path / "backup", path)
    with pytest.raises(VersionConflictError):
        store.write("a", b"renewed", expect=mine, timeout=20)


def test_after_a_copy_from_before_the_boot_all_processes_agree_on_the_time(
    path: Path, tmp_path: Path
) -> None:
    """Else one's record would be old for the other at once."""
    machine = Machine()
    create(SqliteLease(path, _clock=machine))
    shutil.copy(path, tmp_path / "backup")
    machine.reboot()
    running = SqliteLease(path, _clock=machine)
    now(running)
    machine.sleep(10)
    shutil.copyfile(tmp_path / "backup", path)
    machine.time += 5000  # set meanwhile, so that another anchor is found
    create(running, "b")
    assert age(SqliteLease(path, _clock=machine), "b") == pytest.approx(0)
    assert age(running, "b") == pytest.approx(0)


def test_a_write_into_a_file_that_was_replaced_meanwhile_is_not_acknowledged(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = SqliteLease(path), SqliteLease(tmp_path / "other")
    version = create(store)
    create(other)
    other.close()
    urandom = os.urandom

    def replace_it_now(count: int) -> bytes:
        if (tmp_path / "other").exists():
            os.replace(tmp_path / "other", path)
        return urandom(count)

    monkeypatch.setattr(os, "urandom", replace_it_now)
    with pytest.raises(BackendUnavailableError, match=re.escape(str(path))):
        store.write("a", b"lost", expect=version, timeout=20)
    assert store.read("a", timeout=20).body == b"x"


@pytest.mark.parametrize("how", ["replaced", "deleted", "with its folder"])
def test_a_file_that_goes_just_before_a_write_is_unavailable_not_denied(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """SQLite calls it read-only then, or cannot open the journal; but the next try will do."""
    store, other = SqliteLease(path), SqliteLease(tmp_path / "other")
    version = create(store)
    create(other)
    other.close()
    go: Callable[[], object] = {
        "replaced": lambda: os.replace(tmp_path / "other", path),
        "deleted": path.unlink,
        "with its folder": lambda: shutil.rmtree(path.parent),
    }[how]
    lend = LeaseFile._session

    def lend_and_go(self: LeaseFile, until: float) -> Session:
        session = lend(self, until)
        go()
        return session

    with monkeypatch.context() as patched:
        patched.setattr(LeaseFile, "_session", lend_and_go)
        with pytest.raises(BackendUnavailableError, match="replaced"):
            store.write("a", b"lost", expect=version, timeout=20)
    assert store.read("a", timeout=20).version != version
    create(store, "next")


def test_a_file_that_another_program_switched_to_wal_is_switched_back(path: Path) -> None:
    create(SqliteLease(path))
    assert rows(path, "PRAGMA journal_mode = WAL") == [("wal",)]
    assert SqliteLease(path).read("a", timeout=20).body == b"x"
    assert rows(path, "PRAGMA journal_mode") == [("delete",)]


# --- Faults ----------------------------------------------------------------------------


@pytest.mark.parametrize("used_before", [True, False])
def test_a_file_locked_for_too_long_is_unavailable(path: Path, used_before: bool) -> None:
    create(SqliteLease(path))
    store = SqliteLease(path)
    if used_before:
        store.read("a", timeout=20)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for request in (
            lambda: store.read("a", timeout=0.2),
            lambda: create_quickly(store),
            lambda: store.list("", timeout=0.2),
        ):
            begun = time.perf_counter()
            with pytest.raises(BackendUnavailableError, match=r"0\.2 s") as caught:
                request()
            assert 0.1 < time.perf_counter() - begun < 5
            assert str(path) in str(caught.value)
        other.execute("ROLLBACK")
    assert store.read("a", timeout=0.2).body == b"x"
    create_quickly(store)


def create_quickly(store: SqliteLease) -> None:
    store.write("b", b"x", expect=ABSENT, timeout=0.2)


def test_a_read_does_not_wait_for_a_writer_that_has_not_committed_yet(path: Path) -> None:
    store = SqliteLease(path)
    create(store)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE lease SET body = x'00'")
        assert store.read("a", timeout=0.2).body == b"x"


def test_a_full_disk_is_unavailable_and_nothing_is_applied(path: Path) -> None:
    store = SqliteLease(path)
    version = create(store)
    with store._file.session(20) as session:
        (pages,) = session.one("PRAGMA page_count") or (0,)
        session.run(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(BackendUnavailableError, match="full"):
        store.write("a", b"x" * BODY_LIMIT, expect=version, timeout=20)
    seen = store.read("a", timeout=20)
    assert (seen.body, seen.version) == (b"x", version)
    store.close()
    assert store.write("a", b"x" * BODY_LIMIT, expect=version, timeout=20)


@forks
def test_a_disk_that_takes_no_more_is_unavailable_and_nothing_is_applied(path: Path) -> None:
    store = SqliteLease(path)
    version = create(store)

    def child() -> None:
        limit = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(BackendUnavailableError, match=re.escape(str(path))):
            store.write("a", b"y" * BODY_LIMIT, expect=version, timeout=5)
        assert store.read("a", timeout=5).body == b"x"

    assert ended_well(in_child(child))
    seen = store.read("a", timeout=20)
    assert (seen.body, seen.version) == (b"x", version)


@forks
def test_a_want_of_descriptors_is_unavailable_and_passes(path: Path) -> None:
    """SQLite says only that it cannot open its journal. Many a process runs out for a moment."""
    store = SqliteLease(path)
    version = create(store)

    def child() -> None:
        assert store.read("a", timeout=5).body == b"x"  # opens its own connection
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE  # noqa: PT017 - any other number is a fault of the test
        with pytest.raises(BackendUnavailableError, match=re.escape(str(path))):
            store.write("a", b"y", expect=version, timeout=5)
        for descriptor in taken:
            os.close(descriptor)
        assert store.write("a", b"z", expect=version, timeout=5)

    assert ended_well(in_child(child))
    assert store.read("a", timeout=20).body == b"z"


def test_a_name_so_long_that_the_journals_is_too_long_is_denied(tmp_path: Path) -> None:
    with pytest.raises(BackendDeniedError, match="cannot be opened"):
        create(SqliteLease(tmp_path / ("x" * 250)))


@pytest.mark.parametrize(
    "content",
    [
        b"notes, not leases\n" * 100,
        os.urandom(8192),
        b"a line\n",
    ],
    ids=["text", "noise", "line"],
)
def test_what_is_no_database_is_denied_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(BackendDeniedError, match="move it away") as caught:
        create(SqliteLease(path))
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_a_damaged_file_is_denied_and_the_message_says_what_to_do(path: Path) -> None:
    store = SqliteLease(path)
    for number in range(50):
        create(store, f"key-{number}", b"x" * 2000)
    store.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    with pytest.raises(BackendDeniedError, match="move it away"):
        store.read("key-7", timeout=20)


def test_an_empty_file_is_taken_as_new(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    create(SqliteLease(path))
    assert SqliteLease(path).list("", timeout=20) == ["a"]


@pytest.mark.parametrize(
    "script",
    [
        "CREATE TABLE lease (key, body, version, clock, at); CREATE TABLE counter (last)",
        "CREATE TABLE unrelated (x); INSERT INTO unrelated VALUES (1)",
        "PRAGMA application_id = 1196444487; CREATE TABLE gpkg (x)",
        "PRAGMA user_version = 3",
        "CREATE VIEW v AS SELECT 1",
        "PRAGMA journal_mode = WAL; CREATE TABLE unrelated (x)",
    ],
)
def test_another_programs_database_is_denied_and_untouched(tmp_path: Path, script: str) -> None:
    path = tmp_path / "another.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
    before = path.read_bytes(), os.listdir(tmp_path)
    store = SqliteLease(path)
    for request in (
        lambda: create(store),
        lambda: store.read("a", timeout=20),
        lambda: store.list("", timeout=20),
    ):
        with pytest.raises(BackendDeniedError, match="another program"):
            request()
    store.close()
    assert (path.read_bytes(), os.listdir(tmp_path)) == before


def test_a_file_of_a_later_version_is_denied_and_untouched(path: Path) -> None:
    store = SqliteLease(path)
    create(store)
    rows(path, "PRAGMA user_version = 99")
    store.close()
    before = path.read_bytes()
    with pytest.raises(BackendDeniedError, match="99"):
        create(store, "b")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, BackendDeniedError),
        (errno.EROFS, BackendDeniedError),
        (errno.ENOSPC, BackendUnavailableError),
        (errno.EMFILE, BackendUnavailableError),
        (errno.EIO, BackendUnavailableError),
    ],
    ids=["forbidden", "read-only", "full", "descriptors", "hardware"],
)
def test_a_file_that_cannot_be_made_is_denied_only_if_that_is_for_good(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(kind, match=re.escape(str(path))):
        create(SqliteLease(path))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may all")
@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_a_file_that_this_user_may_not_use_is_denied(path: Path, mode: int) -> None:
    create(SqliteLease(path))
    path.chmod(mode)
    with pytest.raises(BackendDeniedError, match=re.escape(str(path))):
        create(SqliteLease(path), "b")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_whatever_strikes_inside_a_write_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    store = SqliteLease(path)
    version = create(store)

    def strike(_: int) -> bytes:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, "urandom", strike)
        with pytest.raises(error):
            store.write("a", b"never", expect=version, timeout=20)
    # Another connection, that would meet a lock left behind.
    assert SqliteLease(path).write("a", b"next", expect=version, timeout=0.5)
    assert store.read("a", timeout=0.5).body == b"next"


def test_an_acknowledged_write_is_on_the_disk(path: Path) -> None:
    """EXTRA: the removal of the journal, too, or a power loss would undo the write."""
    store = SqliteLease(path)
    create(store)
    with store._file.session(20) as session:
        assert session.one("PRAGMA synchronous") == (3,)
        assert session.one("PRAGMA journal_mode") == ("delete",)


# --- Threads ---------------------------------------------------------------------------


def test_connections_are_few_and_descriptors_do_not_pile_up(path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no /proc to count descriptors in")
    store = SqliteLease(path)
    create(store)
    before = len(os.listdir("/proc/self/fd"))

    def work(number: int) -> None:
        version = create(store, f"key-{number}")
        for _ in range(8):
            version = store.write(f"key-{number}", b"x", expect=version, timeout=50)
            for _ in range(15):
                store.read(f"key-{number}", timeout=50)

    for _ in range(2):
        workers = [
            threading.Thread(target=work, args=(number,), daemon=True)
            for number in range(8 * _, 8 * _ + 8)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(50)
            assert not worker.is_alive()
        assert len(os.listdir("/proc/self/fd")) <= before + 4
    store.close()
    assert len(os.listdir("/proc/self/fd")) < before


# --- Processes -------------------------------------------------------------------------


@forks
def test_eight_processes_may_come_first_at_once(path: Path) -> None:
    read_end, write_end = os.pipe()

    def child(number: int) -> None:
        os.close(write_end)
        os.read(read_end, 1)  # all begin when the parent closes its end
        store = SqliteLease(path)
        create(store, f"key-{number}")
        try:
            create(store, "contested", str(number).encode())
        except VersionConflictError:
            return
        create(store, f"won-by-{number}")

    children = [in_child(partial(child, number)) for number in range(8)]
    os.close(write_end)
    assert [ended_well(pid) for pid in children] == [True] * 8
    os.close(read_end)
    found = set(SqliteLease(path).list("", timeout=20))
    assert {f"key-{number}" for number in range(8)} <= found
    assert len(found) == 8 + 1 + 1, "exactly one has won"


@forks
def test_a_process_killed_in_the_midst_of_writes_loses_nothing_acknowledged(path: Path) -> None:
    store = SqliteLease(path)
    for round_ in range(4):
        key = f"key-{round_}"
        read_end, write_end = os.pipe()

        def child(key: str = key, out: int = write_end) -> None:
            mine, version, number = SqliteLease(path), ABSENT, 0
            while True:
                version = mine.write(key, b"%d" % number, expect=version, timeout=20)  # type: ignore[assignment]
                os.write(out, b"%8d" % number)
                number += 1

        pid = in_child(child)
        os.close(write_end)
        acknowledged = -1
        for _ in range(5 + round_):
            acknowledged = int(os.read(read_end, 8))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while more := os.read(read_end, 8):
            acknowledged = int(more)
        os.close(read_end)
        seen = store.read(key, timeout=20)
        assert int(seen.body) in (acknowledged, acknowledged + 1)
        assert store.write(key, b"next", expect=seen.version, timeout=20)
        assert rows(path, "PRAGMA integrity_check") == [("ok",)]


@forks
def test_a_child_neither_uses_nor_closes_its_parents_connection(path: Path) -> None:
    """A close there would meddle with the journal of the parent's next transaction."""
    store = SqliteLease(path)
    create(store)
    with store._file.session(20) as session:
        parents = session._raw

    def child() -> None:
        store.close()
        gc.collect()
        assert parents.total_changes > 0, "it is still open"
        create(store, "of the child")
        with store._file.session(20) as session:
            assert session._raw is not parents
        store.close()

    assert ended_well(in_child(child))
    with store._file.session(20) as session:
        assert session._raw is parents
    assert store.read("of the child", timeout=20).body == b"x"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc to look in")
def test_a_childs_ordinary_end_does_not_disturb_its_parents_transaction(path: Path) -> None:
    """The whole end of an interpreter, finalizers and all, which closes what it finds."""
    script = f"""if True:
        import gc, os, sys
        from tako_sync.abc import ABSENT
        from tako_sync.backends.sqlite import SqliteLease

        store = SqliteLease({str(path)!r})
        store.write("a", b"before", expect=ABSENT, timeout=20)
        go_read, go_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(go_write)
            os.read(go_read, 1)
            gc.collect()
            here = "/proc/self/fd"
            opened = [os.path.realpath(f"{{here}}/{{fd}}") for fd in os.listdir(here)]
            assert {os.path.realpath(path)!r} in opened, "the parent's connection was closed"
            sys.exit(7)
        with store._file.session(20) as session:
            with session.writing():
                session.run("UPDATE lease SET body = x'70'")
                os.close(go_write)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
                assert os.path.exists({f"{path}-journal"!r}), "the child's end took the journal"
                rival = SqliteLease({str(path)!r})
                try:
                    rival.write("b", b"rival", expect=ABSENT, timeout=0.1)
                except Exception as error:
                    assert "locked" in str(error), error
                else:
                    raise AssertionError("the child's end took the lock")
                session.run("UPDATE lease SET body = x'71'")
        rival.close()
        store.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert SqliteLease(path).read("a", timeout=20).body == b"q"
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


@forks
def test_a_fork_waits_until_nobody_is_in_a_transaction(path: Path) -> None:
    """Else the child would believe for ever that it holds the lock which its parent had."""
    store = SqliteLease(path)
    create(store)
    inside, forking = threading.Event(), threading.Event()

    def transact() -> None:
        with store._file.session(20) as session, session.writing():
            session.run("UPDATE lease SET body = x'70'")
            inside.set()
            forking.wait(STUCK)

    thread = threading.Thread(target=transact, daemon=True)
    thread.start()
    assert inside.wait(STUCK)
    # What is registered last is called first: before the fork waits for the transaction.
    os.register_at_fork(before=forking.set)
    child = in_child(lambda: (create(store, "of the child"), store.read("a", timeout=9)))
    assert ended_well(child)
    thread.join(STUCK)
    assert not thread.is_alive()
    assert store.read("a", timeout=20).body == b"p"


@forks
def test_a_child_forked_while_threads_of_its_parent_write_can_write(path: Path) -> None:
    """SQLite keeps the locks of a process in its memory, and the child would have them for ever."""
    store = SqliteLease(path)
    over, forking, moving = threading.Event(), threading.Event(), threading.Event()
    create(store)

    def keep_writing(number: int) -> None:
        version: Version | Absent = ABSENT
        while not over.is_set():
            moving.set()
            version = store.write(f"busy-{number}", b"x", expect=version, timeout=50)
            # While a child is at work they rest: SQLite is not fair to one that comes in between.
            forking.wait(50)

    threads = [
        threading.Thread(target=keep_writing, args=(number,), daemon=True) for number in range(3)
    ]
    for thread in threads:
        thread.start()
    try:
        for number in range(15):
            moving.clear()
            forking.set()
            assert moving.wait(STUCK)
            child = in_child(partial(create, store, f"child-{number}"))
            forking.clear()
            assert ended_well(child)
    finally:
        over.set()
        forking.set()
        for thread in threads:
            thread.join(50)
    assert len(list(store.list("child-", timeout=20))) == 15
