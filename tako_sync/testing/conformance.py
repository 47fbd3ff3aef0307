"""What every storage backend must keep, as a pytest suite to inherit from::

    from tako_sync.testing.conformance import BackendConformance


    class TestMyLease(BackendConformance):
        @pytest.fixture
        def backend(self):
            backend = MyLease("my://test-server")
            yield backend
            backend.close()

        def reopen(self, backend):
            return MyLease("my://test-server")

It first puts the storage itself to the test. On one that does not compare and swap, as some
emulators do not, everything else would pass and mean nothing: there, every test fails.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Final, TypeVar
from weakref import WeakKeyDictionary

import pytest
from attrs import evolve, frozen

from tako_sync.abc import ABSENT, BODY_LIMIT, Absent, LeaseBackend, Snapshot, Version
from tako_sync.clock import SystemClock
from tako_sync.errors import BackendError, BackendUnavailableError, VersionConflictError
from tako_sync.flag import Flag
from tako_sync.policy import LeasePolicy

__all__ = ["BackendConformance"]

T = TypeVar("T")

_CLOCK: Final = SystemClock()
_RACERS: Final = 50
_STUCK: Final = 60.0
_CHILD_STUCK: Final = 15
"""Seconds after which a thread, or a forked child, counts as stuck."""
_KEY: Final = "conformance-"


def _forks(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that forks, beside other threads perhaps, of which Python 3.12 warns."""
    ignored = "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
    for mark in (
        pytest.mark.filterwarnings(ignored),
        pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    ):
        mark(test)  # a mark leaves its sign on the function itself
    return test


@frozen
class _Storage:
    """The storage under test, through two clients, with the means to test it.

    Attributes:
        first, second: two clients of one storage; they may be the same.
        forget: deletes a record behind the library's back; None if it cannot be done.
        timeout: seconds for each request.
        key: a key that no other test uses.
    """

    first: LeaseBackend
    second: LeaseBackend
    forget: Callable[[str], None] | None
    timeout: float
    key: str

    def read(self, by: LeaseBackend | None = None, key: str = "") -> Snapshot:
        client = by or self.first
        return _patiently(lambda: client.read(key or self.key, timeout=self.timeout), broken=2)

    def write(
        self,
        body: bytes,
        expect: Version | Absent,
        by: LeaseBackend | None = None,
        key: str = "",
    ) -> Version:
        client = by or self.first
        return _patiently(
            lambda: client.write(key or self.key, body, expect=expect, timeout=self.timeout)
        )

    def create(self, body: bytes = b"first", key: str = "") -> Version:
        return self.write(body, ABSENT, key=key)

    def list(self, prefix: str, by: LeaseBackend | None = None) -> list[str]:
        client = by or self.first
        return _patiently(lambda: list(client.list(prefix, timeout=self.timeout)))

    def refuses(
        self, body: bytes, expect: Version | Absent, by: LeaseBackend | None = None
    ) -> bool:
        try:
            self.write(body, expect, by)
        except VersionConflictError:
            return True
        return False

    def race(self, expect: Version | Absent) -> None:
        """Have many threads write at once, and see that exactly one was applied."""
        bodies = [f"of racer {number}".encode() for number in range(_RACERS)]

        def run(number: int) -> Version | BaseException:
            client = (self.first, self.second)[number % 2]
            try:
                return client.write(self.key, bodies[number], expect=expect, timeout=self.timeout)
            except (VersionConflictError, BackendUnavailableError) as error:
                return error

        results = _at_once(run, _RACERS)
        won = [number for number, result in enumerate(results) if isinstance(result, str)]
        assert len(won) <= 1, f"{len(won)} of {_RACERS} writes with one expectation were applied"
        after = self.read()
        if won:
            assert (after.body, after.version) == (bodies[won[0]], results[won[0]]), (
                "after a race, what stands there is not the winner's"
            )
        else:
            unknown = any(isinstance(result, BackendUnavailableError) for result in results)
            assert unknown, f"{_RACERS} writes at once, and every one was refused"


# --- The storage's own test ------------------------------------------------------------


def a_second_create_is_refused(storage: _Storage) -> None:
    storage.create(b"first")
    assert storage.refuses(b"second", ABSENT), "a record was created twice"
    assert storage.refuses(b"second", ABSENT, storage.second), "a record was created twice"
    assert storage.read().body == b"first", "a refused create was applied"


def a_write_that_expects_another_version_is_refused(storage: _Storage) -> None:
    old = storage.create(b"first")
    storage.write(b"second", old)
    assert storage.refuses(b"third", old), "a write that expects an overwritten version is applied"
    assert storage.refuses(b"third", old, storage.second), "the second client's is applied"
    assert storage.read().body == b"second", "a refused write was applied"


def of_many_creates_at_once_one_is_applied(storage: _Storage) -> None:
    storage.race(ABSENT)


def of_many_overwrites_at_once_one_is_applied(storage: _Storage) -> None:
    storage.race(storage.create())


def a_version_never_comes_again(storage: _Storage) -> None:
    versions = [storage.create(b"a")]
    for body in (b"b", b"a", b"a", b"b"):
        versions.append(storage.write(body, versions[-1]))
    assert len(set(versions)) == len(versions), f"versions came again: {versions}"
    assert storage.refuses(b"c", versions[0]), "a write passes that expects an old version"


def a_version_never_comes_again_after_a_deletion(storage: _Storage) -> None:
    if storage.forget is None:
        return
    versions = []
    for _ in range(3):
        versions.append(storage.create(b"a"))
        versions.append(storage.write(b"b", versions[-1]))
        storage.forget(storage.key)
        found = storage.read(storage.second).version
        assert found is ABSENT, f"after forget() there is still version {found!r}"
        assert storage.refuses(b"c", versions[-1]), "a write passes that expects what is deleted"
    assert len(set(versions)) == len(versions), f"versions came again: {versions}"


def a_read_shows_the_last_write(storage: _Storage) -> None:
    version: Version | Absent = ABSENT
    for number in range(6):
        writer, reader = (storage.first, storage.second)[:: 1 if number % 2 else -1]
        body = f"write {number}".encode()
        version = storage.write(body, version, writer)
        for client in (reader, writer):
            seen = storage.read(client)
            assert (seen.body, seen.version) == (body, version), (
                f"after {body!r} at {version!r}, a read shows {seen.body!r} at {seen.version!r}"
            )


_PROBES: Final[Sequence[Callable[[_Storage], None]]] = (
    a_second_create_is_refused,
    a_write_that_expects_another_version_is_refused,
    of_many_creates_at_once_one_is_applied,
    of_many_overwrites_at_once_one_is_applied,
    a_version_never_comes_again,
    a_version_never_comes_again_after_a_deletion,
    a_read_shows_the_last_write,
)


_Parameters = tuple[tuple[str, int], ...]
_VERDICTS: Final[WeakKeyDictionary[type, dict[_Parameters, dict[str, str]]]] = WeakKeyDictionary()
"""What the probes found: by test class, then by parameters of its fixtures, then by probe."""


def _fresh_key() -> str:
    return _KEY + uuid.uuid4().hex


def _parameters(request: pytest.FixtureRequest) -> _Parameters:
    """Return which of their parameters the fixtures have: each may mean another storage.

    Also that of a fixture below ``backend``, as of one that starts servers. Left out are those
    that a test gives to itself.
    """
    callspec = getattr(request.node, "callspec", None)
    if callspec is None:
        return ()
    own = [
        mark.args[0]
        for mark in request.node.own_markers
        if mark.name == "parametrize" and not mark.kwargs.get("indirect")
    ]
    return tuple(sorted(item for item in callspec.indices.items() if item[0] not in own))


def _complaint(probe: Callable[[_Storage], None], storage: _Storage) -> str:
    try:
        probe(storage)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong here, it is no register
        what = str(error).partition("\nassert ")[0]  # pytest adds the expression
        if what and isinstance(error, AssertionError):
            return what
        return f"{type(error).__name__}: {what}"  # never empty: that would mean sound
    return ""


# --- The suite -------------------------------------------------------------------------


class BackendConformance:
    """Inherit, give a ``backend`` fixture, and override what is said here where it differs.

    The storage may be shared and may be in use: every test has a key of its own, under the
    prefix ``conformance-``. Nothing is cleaned up, for a backend cannot delete.
    """

    has_clock: ClassVar[bool] = True
    """Reads report ``now`` and, of a record, ``written``. If False, they may be None."""

    shared_between_processes: ClassVar[bool] = True
    """What a forked child writes is there for its parent, and the other way round."""

    page_size: ClassVar[int] = 0
    """Keys that the storage lists in one answer, if it has more to list than it gives at once.
    One more than these is created and listed. 0: lists come whole, and this is not tested."""

    timeout: ClassVar[float] = 30.0
    """Seconds that each request is given, where the timeout itself is not what is tested."""

    @pytest.fixture
    def backend(self) -> LeaseBackend:
        """The backend under test. Override it."""
        pytest.fail("a conformance test class needs a fixture named backend")

    def reopen(self, backend: LeaseBackend) -> LeaseBackend:
        """Return an independent client of the storage of ``backend``; the suite closes it."""
        return backend

    def unreachable(self, backend: LeaseBackend) -> LeaseBackend | None:
        """Return a client whose storage cannot be reached, or refuses; None: not tested."""
        return None

    forget: Callable[..., None] | None = None
    """A method ``forget(self, backend, key)`` that deletes a record, as an operator or a
    lifecycle rule would. None: what holds over deletions is not tested."""

    def let_time_pass(self, seconds: float) -> None:
        """Wait until the storage's clock has gone on by ``seconds``. For real ones: wait."""
        _CLOCK.wait(Flag(), seconds)

    def elapsed(self) -> float:
        """Return seconds on a clock of ours that runs like the storage's."""
        return _CLOCK.monotonic()

    # --- Fixtures

    @pytest.fixture
    def storage(self, backend: LeaseBackend) -> Iterator[_Storage]:
        second = self.reopen(backend)
        delete = self.forget
        forget = None if delete is None else lambda key: delete(backend, key)
        yield _Storage(backend, second, forget, self.timeout, _fresh_key())
        if second is not backend:
            second.close()

    @pytest.fixture
    def complaints(self, request: pytest.FixtureRequest, storage: _Storage) -> dict[str, str]:
        """What the storage's own test found, by probe. Done once a class and parameters."""
        verdicts = _VERDICTS.setdefault(type(self), {})
        parameters = _parameters(request)
        if parameters not in verdicts:
            verdicts[parameters] = {
                probe.__name__: _complaint(probe, evolve(storage, key=_fresh_key()))
                for probe in _PROBES
            }
        return verdicts[parameters]

    @pytest.fixture(autouse=True)
    def only_on_a_sound_storage(
        self, request: pytest.FixtureRequest, complaints: dict[str, str]
    ) -> None:
        if "probe" in request.fixturenames:
            return
        broken = [f"  {name}: NOT SO: {what}" for name, what in complaints.items() if what]
        if broken:
            pytest.fail(
                "refuses to go on: this storage is no compare-and-swap register, and two "
                "processes could hold one lease at the same time:\n" + "\n".join(broken),
                pytrace=False,
            )

    # --- The storage itself

    @pytest.mark.parametrize("probe", [probe.__name__ for probe in _PROBES])
    def test_the_storage_itself(self, probe: str, complaints: dict[str, str]) -> None:
        if complaints[probe]:
            pytest.fail(complaints[probe], pytrace=False)
        if "deletion" in probe and self.forget is None:
            pytest.skip("no forget(backend, key) to delete a record with")

    # --- Bytes and versions

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\0",
            b"\0\xff\xfe\r\n\n \t\x1a",
            bytes(range(256)) * 4,
            "é\u2028".encode("utf-16"),
            b" {} ",
            b"null",
            b"x" * BODY_LIMIT,
            os.urandom(BODY_LIMIT),
        ],
        ids=["empty", "nul", "control", "all", "utf16", "spaces", "null", "64K", "64K-random"],
    )
    def test_bytes_come_back_exactly(self, storage: _Storage, body: bytes) -> None:
        version = storage.create(body)
        seen = storage.read(storage.second)
        assert type(seen.body) is bytes, f"a body is {type(seen.body).__name__}, not bytes"
        assert seen.body == body
        assert storage.write(body[::-1], version) != version
        assert storage.read(storage.second).body == body[::-1]

    def test_versions_are_text_and_read_as_they_were_written(self, storage: _Storage) -> None:
        version = storage.create()
        assert type(version) is str, f"a version is {type(version).__name__}, not str"
        assert version, "a version is empty"
        assert storage.read().version == version
        assert storage.read(storage.second).version == version

    def test_the_same_bytes_written_again_have_another_version(self, storage: _Storage) -> None:
        version = storage.create(b"same")
        assert storage.write(b"same", version) != version

    def test_reading_and_listing_change_nothing(self, storage: _Storage) -> None:
        version = storage.create()
        first = storage.read()
        storage.list(storage.key)
        again = [storage.read(client) for client in (storage.first, storage.second)]
        assert {seen.version for seen in (first, *again)} == {version}
        assert storage.write(b"second", version)

    def test_what_was_read_does_not_change_with_the_storage(self, storage: _Storage) -> None:
        version = storage.create(b"first")
        seen = storage.read()
        storage.write(b"second", version)
        assert (seen.body, seen.version) == (b"first", version)

    def test_a_failed_write_changes_nothing(self, storage: _Storage) -> None:
        old = storage.create(b"first")
        storage.write(b"second", old)
        before = storage.read()
        self.let_time_pass(0.05)
        for expect in (old, ABSENT):
            assert storage.refuses(b"third", expect, storage.second)
        after = storage.read()
        assert (after.body, after.version) == (before.body, before.version)
        if before.written and after.written:
            same = (
                after.written.earliest <= before.written.latest
                and before.written.earliest <= after.written.latest
            )
            assert same, f"written moved from {before.written} to {after.written}"

    @pytest.mark.parametrize(
        "version",
        ["", "0", "-1", "1" * 40, "no such version", "None", "absent", "*", "é"],
        ids=["empty", "zero", "negative", "huge", "words", "none", "absent", "star", "accent"],
    )
    def test_a_version_that_never_was_is_refused_as_a_conflict(
        self, storage: _Storage, version: Version
    ) -> None:
        """Operators type versions. Zero, in GCS's terms, would mean that there is no record."""
        assert storage.refuses(b"x", version), "applied, with no record there"
        assert storage.read().version is ABSENT
        storage.create(b"first")
        assert storage.refuses(b"x", version), "applied to a record that has another version"
        assert storage.read().body == b"first"

    def test_a_version_holds_for_its_own_key_only(self, storage: _Storage) -> None:
        another = f"{storage.key}-another"
        storage.create(b"first")
        version = storage.create(b"another", key=another)
        assert storage.refuses(b"x", version)
        assert storage.read(key=another).body == b"another"

    def test_a_create_after_a_deletion_is_a_create(self, storage: _Storage) -> None:
        if storage.forget is None:
            pytest.skip("no forget(backend, key) to delete a record with")
        storage.create(b"first")
        storage.forget(storage.key)
        assert storage.read().version is ABSENT
        assert storage.key not in storage.list(storage.key)
        storage.create(b"second")
        assert storage.read(storage.second).body == b"second"

    # --- Keys

    @pytest.mark.parametrize(
        "parts",
        [
            ("a.b", "a-b", "a_b", "ab", "a", "a..b"),
            (".", "..", "...", "-", "_", "._-"),
            ("x" * 300, "x" * 299),
            ("0", "00", "1e1", "10"),
        ],
        ids=["separators", "dots", "long", "digits"],
    )
    def test_no_two_keys_share_a_record(self, storage: _Storage, parts: tuple[str, ...]) -> None:
        keys = [f"{storage.key}.{part}" for part in parts]
        versions = [storage.create(key.encode(), key=key) for key in keys]
        assert [storage.read(storage.second, key).body for key in keys] == [
            key.encode() for key in keys
        ]
        assert [storage.read(key=key).version for key in keys] == versions

    def test_a_key_may_be_of_400_characters(self, storage: _Storage) -> None:
        key = storage.key.ljust(400, "z")
        version = storage.create(key=key)
        assert storage.read(key=key).version == version
        assert storage.list(key) == [key]

    def test_a_list_has_the_keys_with_the_prefix_and_no_others(self, storage: _Storage) -> None:
        """In a pattern, an underscore or a dot would match any character."""
        prefix = storage.key
        inside = {f"{prefix}_{n}" for n in range(3)} | {f"{prefix}_", f"{prefix}_a.b"}
        for key in (*inside, prefix, f"{prefix}x1", f"{prefix}.1"):
            storage.create(key=key)
        for client in (storage.first, storage.second):
            found = storage.list(f"{prefix}_", client)
            assert sorted(found) == sorted(inside)
            assert set(storage.list(prefix, client)) == {
                *inside, prefix, f"{prefix}x1", f"{prefix}.1"
            }  # fmt: skip
            assert storage.list(f"{prefix}-nothing", client) == []
        assert inside <= set(storage.list(""))

    def test_a_list_of_more_than_one_page_is_whole(self, storage: _Storage) -> None:
        if not self.page_size:
            pytest.skip("page_size = 0")
        keys = [f"{storage.key}-{number}" for number in range(self.page_size + 1)]
        for key in keys:
            storage.create(key=key)
        assert sorted(storage.list(storage.key)) == sorted(keys)

    # --- Absence and the clock

    def test_what_is_not_there_reads_as_absent(self, storage: _Storage) -> None:
        seen = storage.read()
        assert seen.version is ABSENT, f"the version of nothing is {seen.version!r}"
        assert seen.body == b"" and seen.written is None
        if self.has_clock:
            assert seen.now is not None, "the fence needs the storage's time also of nothing"
        assert storage.key not in storage.list(_KEY), "reading has made a record"

    def test_the_clock_reports_intervals(self, storage: _Storage) -> None:
        storage.create()
        for client in (storage.first, storage.second):
            seen = storage.read(client)
            if self.has_clock:
                assert seen.now is not None, "has_clock, but a read does not report now"
                assert seen.written is not None, "has_clock, but a read does not report written"
            for interval in (seen.now, seen.written):
                if interval is not None:
                    assert interval.earliest <= interval.latest, f"{interval} is upside down"
            if seen.now is not None and seen.written is not None:
                assert seen.written.earliest <= seen.now.latest, "written later than now"
                assert seen.written.latest <= seen.now.latest, "written perhaps later than now"

    def test_the_storages_time_counts_seconds(self, storage: _Storage) -> None:
        """Milliseconds would free a lease a thousand times too early."""
        self._needs_a_clock()
        begun = self.elapsed()
        first = storage.read().now
        answered = self.elapsed()
        self.let_time_pass(0.5)
        asked = self.elapsed()
        second = storage.read(storage.second).now
        ended = self.elapsed()
        assert first is not None and second is not None
        slack = 0.05 + storage.first.clock_skew
        assert second.earliest - first.latest <= (ended - begun) + slack, "it runs too fast"
        assert second.latest - first.earliest >= (asked - answered) - slack, "it runs too slowly"

    def test_time_advances(self, storage: _Storage) -> None:
        self._needs_a_clock()
        first = storage.read().now
        assert first is not None
        until = self.elapsed() + 30
        while True:
            self.let_time_pass(0.05)
            now = storage.read(storage.second).now
            assert now is not None
            assert now.latest >= first.earliest, "the storage's time steps back"
            if now.earliest > first.latest:
                return
            assert self.elapsed() < until, f"the storage's time stands still at {now}"

    def test_the_age_of_a_record_is_not_overstated(self, storage: _Storage) -> None:
        """Age frees a lease. It counts from when this version was written, in one time zone."""
        self._needs_a_clock()
        version = storage.create()
        self.let_time_pass(0.3)
        for attempt in range(2):
            sent = self.elapsed()
            version = storage.write(f"renewal {attempt}".encode(), version)
            landed = self.elapsed()
            self.let_time_pass(0.2)
            asked = self.elapsed()
            seen = storage.read(storage.second)
            age = self.elapsed() - sent
            assert seen.now is not None and seen.written is not None
            slack = 0.05 + storage.first.clock_skew
            assert seen.now.earliest - seen.written.latest <= age + slack, (
                f"{age:.3f} s after its write, {seen} makes a record too old"
            )
            assert seen.now.latest - seen.written.earliest >= asked - landed - slack, (
                f"{asked - landed:.3f} s after its write, {seen} makes a record too young"
            )

    def test_a_renewal_makes_a_record_young_again(self, storage: _Storage) -> None:
        self._needs_a_clock()
        version = storage.create()
        first = storage.read().written
        assert first is not None
        self.let_time_pass(1.5)
        storage.write(b"renewed", version)
        second = storage.read(storage.second).written
        assert second is not None
        assert second.latest > first.earliest + 0.5, "written is when the record was created"

    def _needs_a_clock(self) -> None:
        if not self.has_clock:
            pytest.skip("has_clock = False")

    # --- Time and faults

    @pytest.mark.parametrize("timeout", [5, 0.5, 600, 600.5])
    def test_any_timeout_is_accepted(self, storage: _Storage, timeout: float) -> None:
        client, key = storage.first, storage.key
        version = client.write(key, b"x", expect=ABSENT, timeout=timeout)
        assert client.read(key, timeout=timeout).version == version
        assert list(client.list(key, timeout=timeout)) == [key]

    @pytest.mark.parametrize("timeout", [1e-9, 0.001])
    def test_a_timeout_too_short_means_an_answer_or_unavailable(
        self, storage: _Storage, timeout: float
    ) -> None:
        """Never a conflict that is none, never for ever, and the client stays usable."""
        client, key = storage.first, storage.key
        begun = _CLOCK.monotonic()
        for call in (
            lambda: client.write(key, b"x", expect=ABSENT, timeout=timeout),
            lambda: client.read(key, timeout=timeout),
            lambda: list(client.list(key, timeout=timeout)),
        ):
            try:
                call()
            except BackendUnavailableError:
                pass
        assert _CLOCK.monotonic() - begun < 10, "a timeout is not kept"
        assert storage.read().body in (b"", b"x")

    def test_an_error_is_one_of_the_four_kinds(self, backend: LeaseBackend) -> None:
        """What cannot be reached, or refuses, says so as BackendError, and in words."""
        client = self.unreachable(backend)
        if client is None:
            pytest.skip("no unreachable(backend) to test with")
        for call in (
            lambda: client.read(_KEY, timeout=1),
            lambda: client.write(_KEY, b"x", expect=ABSENT, timeout=1),
            lambda: list(client.list(_KEY, timeout=1)),
        ):
            with pytest.raises(BackendError) as caught:
                call()
            assert not isinstance(caught.value, VersionConflictError), "that is no conflict"
            assert type(caught.value) is not BackendError, "neither unavailable nor denied"
            assert str(caught.value), "it does not say what is wrong"
        client.close()

    # --- Clients, threads, processes

    def test_it_says_what_it_is(self, backend: LeaseBackend) -> None:
        assert isinstance(backend, LeaseBackend)
        words = backend.describe()
        assert words and words == words.strip() and len(words.splitlines()) == 1
        assert type(backend.prompt) is bool
        LeasePolicy().margin(backend.clock_skew)  # the default ttl must fit

    def test_a_closed_client_may_be_used_again(self, storage: _Storage) -> None:
        storage.first.close()  # before its first use
        version = storage.create()
        storage.first.close()
        storage.first.close()
        assert storage.read().version == version
        storage.first.close()
        assert storage.write(b"second", version)

    def test_sixteen_threads_can_use_it_at_once(self, storage: _Storage) -> None:
        """Each keeps a record of its own going; none sees what is another's."""

        def run(number: int) -> str:
            client = (storage.first, storage.second)[number % 2]
            return _keep_going(storage, client, f"{storage.key}-{number}")

        assert _at_once(run, 16) == [""] * 16

    def test_sixteen_threads_that_extend_one_record_lose_nothing(self, storage: _Storage) -> None:
        """Each adds its word to what it read, if that is still there. And what a read shows is
        one record: its body and its version are not of two, as of two requests they may be."""
        written: dict[Version, bytes] = {}
        seen: list[Snapshot] = []
        until = _CLOCK.monotonic() + _STUCK

        def run(number: int) -> None:
            client = (storage.first, storage.second)[number % 2]
            for word in (b"%d-once" % number, b"%d-again" % number):
                while True:
                    found = storage.read(client)
                    seen.append(found)
                    if word in found.body.split():
                        break  # so a write in doubt is settled by looking, as any is
                    assert _CLOCK.monotonic() < until, f"{word!r} does not get through"
                    body = found.body + b" " + word
                    try:
                        version = storage.write(body, found.version, client)
                    except (VersionConflictError, BackendUnavailableError):
                        continue
                    written[version] = body

        _at_once(run, 16)
        words = storage.read().body.split()
        assert len(words) == len(set(words)) == 32, f"of 32 updates there are {len(words)}"
        for found in seen:
            if found.version is not ABSENT:
                assert found.body == written.get(found.version, found.body), (
                    "a read shows the body of one write with the version of another"
                )

    @_forks
    def test_forked_children_can_use_it_at_once(self, storage: _Storage) -> None:
        """Connections that cross the fork would mix the answers of parent and children."""
        version = storage.create(b"of the parent")
        children = [
            _fork(partial(self._child, storage, f"{storage.key}-child-{number}"))
            for number in range(4)
        ]
        mine = _keep_going(storage, storage.first, f"{storage.key}-parent")
        assert [_ended(child) for child in children] == ["ended well"] * 4
        assert mine == ""
        assert storage.read().version == version, "a child's end has changed the parent's record"
        assert storage.write(b"second", version)
        for number in range(4 if self.shared_between_processes else 0):
            seen = storage.read(key=f"{storage.key}-child-{number}")
            assert seen.version is not ABSENT, "the parent does not see what a child wrote"

    @_forks
    def test_a_fork_while_other_threads_are_inside_leaves_the_child_usable(
        self, storage: _Storage
    ) -> None:
        """A lock that a thread of the parent holds at the fork stays locked in the child."""
        storage.create(b"of the parent")
        over, forking, moving = Flag(), threading.Event(), threading.Event()

        def keep_busy(key: str) -> None:
            version: Version | Absent = ABSENT
            while not over.is_set():
                moving.set()
                version = storage.write(b"busy", version, key=key)
                storage.read(key=key)
                # While a child is at work they rest: a storage need not be fair to it.
                forking.wait(_STUCK)

        threads = [
            threading.Thread(target=keep_busy, args=(f"{storage.key}-{number}",), daemon=True)
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        try:
            for number in range(8):
                moving.clear()
                forking.set()
                assert moving.wait(_STUCK), "the threads do not go on"
                child = _fork(partial(self._child, storage, f"{storage.key}-child-{number}"))
                forking.clear()
                assert _ended(child) == "ended well"
        finally:
            over.set()
            forking.set()
            for thread in threads:
                thread.join(_STUCK)

    def _child(self, storage: _Storage, key: str) -> str:
        wrong = _keep_going(storage, storage.first, key)
        if storage.read().body != b"of the parent":
            wrong += "a child does not see what its parent wrote before"
        storage.first.close()
        return wrong


# --- Helpers ---------------------------------------------------------------------------


def _patiently(call: Callable[[], T], broken: int = 0) -> T:
    """Call, and again where the storage asks for patience: some allow a write a second.

    Args:
        broken: how often to call again without being asked: any connection may break, and a
            read that is sent twice does no harm.
    """
    for _ in range(10):
        try:
            return call()
        except BackendUnavailableError as error:
            broken -= 1
            if not error.retry_after and broken < 0:
                raise
            _CLOCK.wait(Flag(), error.retry_after)
    return call()


def _keep_going(storage: _Storage, client: LeaseBackend, key: str) -> str:
    """Write and read a record a few times; return what went wrong."""
    version: Version | Absent = ABSENT
    for number in range(4):
        body = f"{key} {number} {os.getpid()}".encode() * 20
        version = storage.write(body, version, client, key)
        seen = storage.read(client, key)
        if (seen.body, seen.version) != (body, version):
            return f"{key}: wrote {body[:60]!r} at {version}, read {seen.body[:60]!r}"
    return ""


def _at_once(run: Callable[[int], T], count: int) -> list[T]:
    """Run ``run(number)`` in ``count`` threads that begin together; return what they return."""
    barrier = threading.Barrier(count, timeout=_STUCK)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def enter(number: int) -> None:
        try:
            barrier.wait()
            results[number] = run(number)
        except BaseException as error:  # noqa: BLE001 - raised below, where the test sees it
            errors.append(error)

    threads = [
        threading.Thread(target=enter, args=(number,), daemon=True) for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_STUCK)
    if errors:
        raise errors[0]
    assert len(results) == count, f"{count - len(results)} of {count} threads are stuck"
    return [results[number] for number in range(count)]


def _fork(run: Callable[[], str]) -> int:
    """Run in a forked child, which ends itself if it is stuck; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CHILD_STUCK)  # kills also one that waits for a lock
        wrong = run()
        if wrong:
            os.write(2, f"{wrong}\n".encode())
        else:
            status = 0
    except BaseException:  # noqa: BLE001 - nothing may leave the child but its status
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _ended(pid: int) -> str:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return "ended well"
    return "is stuck" if code == -signal.SIGALRM else f"failed with {code}: see its stderr"
