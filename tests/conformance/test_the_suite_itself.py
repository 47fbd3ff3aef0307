"""The conformance suite fails where it should: against registers broken on purpose."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable

import pytest

from tako_sync.abc import ABSENT, Absent, Interval, LeaseBackend, Snapshot, Version
from tako_sync.backends.memory import MemoryLease
from tako_sync.errors import VersionConflictError
from tako_sync.testing import conformance

pytest_plugins = ["pytester"]

SUITE = """
    import pytest
    from tako_sync.testing.conformance import BackendConformance


    class TestBroken(BackendConformance):
        shared_between_processes = False
        page_size = 5

        @pytest.fixture
        def backend(self, make):
            return make()

        def forget(self, backend, key):
            backend.forget(key)
"""
PROBE = "test_the_storage_itself"
REFUSAL = "refuses to go on: this storage is no compare-and-swap register"


class Sound(MemoryLease):
    """What the broken ones are made from; it keeps every promise itself."""

    def forget(self, key: str) -> None:
        del self._table[key]

    def put(self, key: str, body: bytes, version: Version) -> Version:
        """Store without a look at what is there."""
        now = self._clock.monotonic()
        self._table[key] = (body, version, Interval.exactly(now))
        return version

    def current(self, key: str) -> Version | Absent:
        return self._table[key][1] if key in self._table else ABSENT

    def fresh_version(self) -> Version:
        return str(next(self._numbers))

    def check(self, key: str, expect: Version | Absent) -> None:
        if self.current(key) != expect:
            raise VersionConflictError(key)


# --- No registers at all ---------------------------------------------------------------


class IgnoresWhatIsExpected(Sound):
    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        return self.put(key, body, self.fresh_version())


class ChecksCreatesOnly(Sound):
    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        if expect is ABSENT:
            self.check(key, expect)
        return self.put(key, body, self.fresh_version())


class ChecksOverwritesOnly(Sound):
    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        if expect is not ABSENT:
            self.check(key, expect)
        return self.put(key, body, self.fresh_version())


class VersionsAreHashes(Sound):
    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        self.check(key, expect)
        return self.put(key, body, hashlib.sha256(body).hexdigest())


class CountsAnewAfterADeletion(Sound):
    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        self.check(key, expect)
        return self.put(key, body, "1" if expect is ABSENT else str(int(expect) + 1))


class TheLastOfManyWins(Sound):
    """Looks, and writes later: two that look at the same time are both applied."""

    def __init__(self) -> None:
        super().__init__()
        self.crowds: dict[Version | Absent, threading.Barrier] = {}

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        self.check(key, expect)
        if threading.current_thread() is not threading.main_thread():
            # Whoever passes the look first waits here for a second.
            try:
                self.crowds.setdefault(expect, threading.Barrier(2)).wait(5)
            except threading.BrokenBarrierError:
                pass
        return self.put(key, body, self.fresh_version())


class ReadsAreStale(Sound):
    """Answers a read with what the read before it should have shown."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Snapshot] = {}

    def read(self, key: str, *, timeout: float) -> Snapshot:
        fresh = super().read(key, timeout=timeout)
        stale = self.before.get(key, fresh)
        self.before[key] = fresh
        return stale


class RefusesByAssertion(Sound):
    """Asserts what it should ask, and without a word."""

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        if self.current(key) != expect:
            raise AssertionError
        return super().write(key, body, expect=expect, timeout=timeout)


class CannotBeReached(Sound):
    def read(self, key: str, *, timeout: float) -> Snapshot:
        raise ConnectionRefusedError("nobody listens")

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        raise ConnectionRefusedError("nobody listens")


NO_REGISTERS: list[tuple[type[Sound], str]] = [
    (IgnoresWhatIsExpected, "a_second_create_is_refused"),
    (IgnoresWhatIsExpected, "a_write_that_expects_another_version_is_refused"),
    (IgnoresWhatIsExpected, "of_many_creates_at_once_one_is_applied"),
    (ChecksCreatesOnly, "a_write_that_expects_another_version_is_refused"),
    (ChecksCreatesOnly, "of_many_overwrites_at_once_one_is_applied"),
    (ChecksOverwritesOnly, "a_second_create_is_refused"),
    (VersionsAreHashes, "a_version_never_comes_again"),
    (CountsAnewAfterADeletion, "a_version_never_comes_again_after_a_deletion"),
    (TheLastOfManyWins, "of_many_creates_at_once_one_is_applied"),
    (TheLastOfManyWins, "of_many_overwrites_at_once_one_is_applied"),
    (ReadsAreStale, "a_read_shows_the_last_write"),
    (RefusesByAssertion, "a_second_create_is_refused"),
    (CannotBeReached, "a_second_create_is_refused"),
]


# --- Registers with a fault ------------------------------------------------------------


class BodiesAreText(Sound):
    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        return super().write(key, body.strip(), expect=expect, timeout=timeout)


class BodiesAreViews(Sound):
    def read(self, key: str, *, timeout: float) -> Snapshot:
        seen = super().read(key, timeout=timeout)
        body: bytes = memoryview(seen.body)  # type: ignore[assignment]
        return Snapshot(body, seen.version, seen.written, seen.now)


class VersionsAreParsed(Sound):
    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        if expect is not ABSENT:
            int(expect)
        return super().write(key, body, expect=expect, timeout=timeout)


class ZeroMeansAbsent(Sound):
    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        return super().write(key, body, expect=ABSENT if expect == "0" else expect, timeout=timeout)


class KeysAreFolded(Sound):
    """Makes file names of keys, say, and loses something on the way."""

    def read(self, key: str, *, timeout: float) -> Snapshot:
        return super().read(key.replace(".", "-"), timeout=timeout)

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        return super().write(key.replace(".", "-"), body, expect=expect, timeout=timeout)


class PrefixesArePatterns(Sound):
    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        """As LIKE does: an underscore stands for any character."""

        def alike(key: str) -> bool:
            return len(key) >= len(prefix) and all(
                wanted in ("_", found) for wanted, found in zip(prefix, key)
            )

        return [key for key in self._table if alike(key)]


class ListsAreCut(Sound):
    """Answers with the first page, and forgets to ask for the next."""

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        return list(super().list(prefix, timeout=timeout))[:5]


class ReadsAreTorn(Sound):
    """Asks for the version first and for the body then; once, a write comes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.once = threading.Lock()

    def read(self, key: str, *, timeout: float) -> Snapshot:
        seen = super().read(key, timeout=timeout)
        alone = threading.current_thread() is threading.main_thread() or not seen.body
        if alone or not self.once.acquire(blocking=False):
            return seen
        until = time.monotonic() + 10
        while self.current(key) == seen.version and time.monotonic() < until:
            time.sleep(0.001)
        body = super().read(key, timeout=timeout).body
        return Snapshot(body, seen.version, seen.written, seen.now)


class RefusedWritesTouchTheRecord(Sound):
    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        if self.current(key) != expect and key in self._table:
            self.put(key, self._table[key][0], self._table[key][1])
        return super().write(key, body, expect=expect, timeout=timeout)


class ReadsMakeRecords(Sound):
    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        return {*super().list(prefix, timeout=timeout), *self.asked}

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    def read(self, key: str, *, timeout: float) -> Snapshot:
        self.asked.add(key)
        return super().read(key, timeout=timeout)


class TimeOfNothingIsUnknown(Sound):
    def read(self, key: str, *, timeout: float) -> Snapshot:
        seen = super().read(key, timeout=timeout)
        return seen if seen.body else Snapshot(b"", seen.version)


class TimeIsInMilliseconds(Sound):
    def read(self, key: str, *, timeout: float) -> Snapshot:
        seen = super().read(key, timeout=timeout)
        return Snapshot(seen.body, seen.version, _scaled(seen.written), _scaled(seen.now))


def _scaled(interval: Interval | None) -> Interval | None:
    return interval and Interval(interval.earliest * 1000, interval.latest * 1000)


class TimeStandsStill(Sound):
    def read(self, key: str, *, timeout: float) -> Snapshot:
        seen = super().read(key, timeout=timeout)
        return Snapshot(seen.body, seen.version, seen.written and _NOON, _NOON)


_NOON = Interval.exactly(43200.0)


class WrittenIsAnHourOff(Sound):
    """A stamp in local time, read as if it were in UTC."""

    def read(self, key: str, *, timeout: float) -> Snapshot:
        seen = super().read(key, timeout=timeout)
        written = seen.written and Interval.exactly(seen.written.latest - 3600)
        return Snapshot(seen.body, seen.version, written, seen.now)


class WrittenIsWhenItWasCreated(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.created: dict[str, Interval] = {}

    def read(self, key: str, *, timeout: float) -> Snapshot:
        seen = super().read(key, timeout=timeout)
        written = seen.written and self.created.setdefault(key, seen.written)
        return Snapshot(seen.body, seen.version, written, seen.now)


class IntervalsAreUpsideDown(Sound):
    def read(self, key: str, *, timeout: float) -> Snapshot:
        seen = super().read(key, timeout=timeout)
        assert seen.now is not None
        now = Interval(seen.now.latest + 1, seen.now.latest)
        return Snapshot(seen.body, seen.version, seen.written, now)


class TimeoutsAreWholeSeconds(Sound):
    def read(self, key: str, *, timeout: float) -> Snapshot:
        assert timeout == int(timeout)
        return super().read(key, timeout=timeout)


class ClosedForGood(Sound):
    open = True

    def close(self) -> None:
        self.open = False

    def read(self, key: str, *, timeout: float) -> Snapshot:
        if not self.open:
            raise ValueError("closed")
        return super().read(key, timeout=timeout)


class BelongsToOneThread(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.thread: int | None = None

    def read(self, key: str, *, timeout: float) -> Snapshot:
        self.thread = self.thread or threading.get_ident()
        if self.thread != threading.get_ident():
            raise RuntimeError("created in another thread")
        return super().read(key, timeout=timeout)


class BelongsToOneProcess(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()

    def read(self, key: str, *, timeout: float) -> Snapshot:
        if self.pid != os.getpid():
            raise RuntimeError("forked")
        return super().read(key, timeout=timeout)


class SkewIsNotANumber(Sound):
    clock_skew = float("inf")


FAULTY: list[tuple[type[Sound], str]] = [
    (BodiesAreText, "test_bytes_come_back_exactly"),
    (BodiesAreViews, "test_bytes_come_back_exactly"),
    (VersionsAreParsed, "test_a_version_that_never_was_is_refused_as_a_conflict"),
    (ZeroMeansAbsent, "test_a_version_that_never_was_is_refused_as_a_conflict"),
    (KeysAreFolded, "test_no_two_keys_share_a_record"),
    (PrefixesArePatterns, "test_a_list_has_the_keys_with_the_prefix_and_no_others"),
    (ListsAreCut, "test_a_list_of_more_than_one_page_is_whole"),
    (ReadsAreTorn, "test_sixteen_threads_that_extend_one_record_lose_nothing"),
    (RefusedWritesTouchTheRecord, "test_a_failed_write_changes_nothing"),
    (ReadsMakeRecords, "test_what_is_not_there_reads_as_absent"),
    (TimeOfNothingIsUnknown, "test_what_is_not_there_reads_as_absent"),
    (TimeIsInMilliseconds, "test_the_storages_time_counts_seconds"),
    (TimeStandsStill, "test_the_storages_time_counts_seconds"),
    (WrittenIsAnHourOff, "test_the_age_of_a_record_is_not_overstated"),
    (WrittenIsWhenItWasCreated, "test_a_renewal_makes_a_record_young_again"),
    (IntervalsAreUpsideDown, "test_the_clock_reports_intervals"),
    (TimeoutsAreWholeSeconds, "test_any_timeout_is_accepted"),
    (ClosedForGood, "test_a_closed_client_may_be_used_again"),
    (BelongsToOneThread, "test_sixteen_threads_can_use_it_at_once"),
    (BelongsToOneProcess, "test_forked_children_can_use_it_at_once"),
    (SkewIsNotANumber, "test_it_says_what_it_is"),
]


class Outcome:
    """What the suite said of one backend: test names, and the text of what failed."""

    def __init__(self, pytester: pytest.Pytester, make: type[LeaseBackend], *options: str) -> None:
        class Maker:
            @pytest.fixture
            def make(self) -> type[LeaseBackend]:
                return make

        pytester.makepyfile(SUITE)
        run = pytester.inline_run("-p", "no:cacheprovider", *options, plugins=[Maker()])
        passed, skipped, failed = run.listoutcomes()
        self.passed = [report.nodeid.partition("::TestBroken::")[2] for report in passed]
        self.skipped = [report.nodeid.partition("::TestBroken::")[2] for report in skipped]
        self.failed = {
            report.nodeid.partition("::TestBroken::")[2]: str(report.longrepr) for report in failed
        }


def test_a_sound_register_passes(pytester: pytest.Pytester) -> None:
    outcome = Outcome(pytester, Sound)
    assert outcome.failed == {}
    assert len(outcome.passed) > 40
    assert outcome.skipped == ["test_an_error_is_one_of_the_four_kinds"]


@pytest.mark.parametrize("make", list(dict(NO_REGISTERS)))
def test_on_what_is_no_register_every_test_refuses(
    pytester: pytest.Pytester, make: type[Sound]
) -> None:
    outcome = Outcome(pytester, make)
    assert [name for name in outcome.passed if not name.startswith(PROBE)] == []
    assert outcome.skipped == []
    refused = [text for name, text in outcome.failed.items() if not name.startswith(PROBE)]
    assert len(refused) > 40
    assert all(REFUSAL in text for text in refused)
    for broken, probe in NO_REGISTERS:
        if broken is make:
            assert f"{PROBE}[{probe}]" in outcome.failed
            assert all(f"{probe}: NOT SO" in text for text in refused)


@pytest.mark.parametrize("order", ["no:randomly", "randomly"])
def test_one_test_chosen_alone_refuses_too(pytester: pytest.Pytester, order: str) -> None:
    outcome = Outcome(pytester, IgnoresWhatIsExpected, "-k", "test_time_advances", "-p", order)
    assert list(outcome.failed) == ["test_time_advances"]
    assert REFUSAL in outcome.failed["test_time_advances"]


@pytest.mark.parametrize(("make", "test"), FAULTY, ids=[make.__name__ for make, _ in FAULTY])
def test_a_fault_in_a_register_is_found(
    pytester: pytest.Pytester, make: type[Sound], test: str
) -> None:
    if "fork" in test and not hasattr(os, "fork"):
        pytest.skip("no fork here")
    outcome = Outcome(pytester, make, "-k", test)
    assert [name for name in outcome.failed if name.startswith(test)]
    assert not any(REFUSAL in text for text in outcome.failed.values())


def test_each_of_several_storages_has_a_verdict_of_its_own(pytester: pytest.Pytester) -> None:
    """Also where the parameter is not the backend's but that of a fixture below it."""
    kinds = {"sound": Sound, "broken": IgnoresWhatIsExpected}

    class Kinds:
        @pytest.fixture
        def kinds(self) -> dict[str, type[Sound]]:
            return kinds

    pytester.makepyfile(
        """
        import pytest
        from tako_sync.testing.conformance import BackendConformance


        class TestServers(BackendConformance):
            @pytest.fixture(params=["sound", "broken"])
            def server(self, request, kinds):
                return kinds[request.param]

            @pytest.fixture
            def backend(self, server):
                return server()
        """
    )
    options = ("-p", "no:cacheprovider", "-k", "test_time_advances")
    passed, _, failed = pytester.inline_run(*options, plugins=[Kinds()]).listoutcomes()
    assert [report.nodeid.rpartition("[")[2] for report in passed] == ["sound]"]
    assert [report.nodeid.rpartition("[")[2] for report in failed] == ["broken]"]
    assert REFUSAL in str(failed[0].longrepr)


def test_a_class_without_a_backend_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from tako_sync.testing.conformance import BackendConformance as TestEmpty
        """
    )
    result = pytester.inline_run("-p", "no:cacheprovider", "-k", "test_time_advances")
    (failed,) = result.getfailures()
    assert "needs a fixture named backend" in str(failed.longrepr)


def test_a_verdict_is_found_once_a_class(pytester: pytest.Pytester) -> None:
    before = {cls.__name__ for cls in conformance._VERDICTS}
    made: list[Sound] = []

    class Counted(Sound):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    outcome = Outcome(pytester, Counted, "-k", "test_what_was_read or test_time_advances")
    assert sorted(outcome.passed) == [
        "test_time_advances",
        "test_what_was_read_does_not_change_with_the_storage",
    ]
    writes = [next(store._numbers) - 1 for store in made]
    assert min(writes) < 5 < 100 < max(writes), f"one store was probed, not {writes}"
    assert {cls.__name__ for cls in conformance._VERDICTS} - before <= {"TestBroken"}
