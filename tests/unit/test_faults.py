"""FaultyBackend: each fault, scripts, gates, chaos, and a log that counts exactly."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tako_sync.abc import ABSENT, Absent, LeaseBackend, Snapshot, Version
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    VersionConflictError,
)
from tako_sync.flag import Flag
from tako_sync.testing.clock import FakeClock
from tako_sync.testing.faults import (
    Call,
    FaultyBackend,
    Gate,
    applied_then,
    delay,
    fail,
    hang,
    intercept,
    lands_later,
    substitute,
)

NEVER = 30.0


class Register(LeaseBackend):
    """The least that works, with a skew to forward."""

    clock_skew = 0.5

    def __init__(self) -> None:
        self.stored: dict[str, tuple[bytes, Version]] = {}
        self.versions = 0
        self.closed = 0

    def read(self, key: str, *, timeout: float) -> Snapshot:
        return Snapshot(*self.stored.get(key, (b"", ABSENT)))

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        if self.stored.get(key, (b"", ABSENT))[1] != expect:
            raise VersionConflictError(key)
        self.versions += 1
        self.stored[key] = body, str(self.versions)
        return str(self.versions)

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        return (key for key in self.stored if key.startswith(prefix))

    def describe(self) -> str:
        return "register:"

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(start=100.0)


@pytest.fixture
def register() -> Register:
    return Register()


@pytest.fixture
def faulty(register: Register, clock: FakeClock) -> Iterator[FaultyBackend]:
    backend = FaultyBackend(register, clock)
    yield backend
    backend.release_all()
    clock.advance(1000)
    assert clock.waiters == (), "a thread is left"


class Caller:
    """Calls in a thread of the clock; remembers the answer and when it came."""

    def __init__(self, clock: FakeClock, call: Callable[[], Any], name: str = "caller") -> None:
        self.answer: Any = None
        self.at: float | None = None

        def target() -> None:
            try:
                self.answer = call()
            except Exception as error:  # noqa: BLE001 - it is looked at by the test
                self.answer = error
            self.at = clock.monotonic()

        self.task = clock.spawn(target, name)


def write(backend: LeaseBackend, body: bytes = b"x", expect: Version | Absent = ABSENT) -> Version:
    return backend.write("k", body, expect=expect, timeout=5)


def read(backend: LeaseBackend) -> Snapshot:
    return backend.read("k", timeout=5)


# --- Without faults ----------------------------------------------------------------------


def test_everything_is_passed_on(faulty: FaultyBackend, register: Register) -> None:
    version = write(faulty, b"body")
    assert read(faulty) == Snapshot(b"body", version)
    assert list(faulty.list("", timeout=5)) == ["k"]
    assert list(faulty.list("z", timeout=5)) == []
    faulty.close()
    assert register.closed == 1
    assert faulty.describe() == "register:"
    assert faulty.clock_skew == 0.5
    assert faulty.prompt is False
    assert FaultyBackend(register, prompt=True).prompt is True
    with pytest.raises(VersionConflictError):
        write(faulty, b"other")


def test_the_log_tells_who_called_what_when_and_how_it_ended(
    faulty: FaultyBackend, clock: FakeClock
) -> None:
    version = write(faulty, b'{"state": "held"}')
    Caller(clock, lambda: write(faulty, b"[1]", expect="99"), name="rival")
    clock.advance(1)
    read(faulty)
    first, second, third = faulty.calls
    assert (first.op, first.key, first.at, first.timeout) == ("write", "k", 100.0, 5)
    assert (first.pid, first.thread) == (os.getpid(), threading.current_thread().name)
    assert (first.expect, first.body) == (ABSENT, b'{"state": "held"}')
    assert (first.outcome, first.result, first.applied) == ("ok", version, True)
    assert first.document == {"state": "held"}
    assert (second.thread, second.expect, second.document) == ("rival", "99", {})
    assert (second.outcome, second.applied) == ("VersionConflictError", False)
    assert isinstance(second.error, VersionConflictError)
    assert (third.number, third.at, third.body, third.document) == (3, 101.0, None, {})


def test_calls_are_counted_by_operation_key_and_predicate(faulty: FaultyBackend) -> None:
    version = write(faulty, b'{"state": "held"}')
    write(faulty, b'{"state": "released"}', expect=version)
    faulty.read("other", timeout=5)
    assert (faulty.count(), faulty.count("write"), faulty.count("read")) == (3, 2, 1)
    assert (faulty.count(key="k"), faulty.count("read", key="k")) == (2, 0)
    assert faulty.count("write", when=lambda call: call.document["state"] == "held") == 1
    faulty.clear()
    assert (faulty.count(), list(faulty.calls)) == (0, [])


# --- Each fault --------------------------------------------------------------------------


def test_fail_applies_nothing(faulty: FaultyBackend, register: Register) -> None:
    faulty.script("write", fail(BackendDeniedError("no")))
    with pytest.raises(BackendDeniedError, match="no"):
        write(faulty)
    assert register.stored == {}
    assert faulty.calls[0].faults == ["fail(BackendDeniedError('no'))"]
    assert write(faulty) == "1"


@pytest.mark.parametrize("error", [MemoryError, SystemExit, lambda: ValueError("made")])
def test_a_class_or_function_makes_an_error_for_each_call(
    faulty: FaultyBackend, error: Callable[[], BaseException]
) -> None:
    faulty.always("read", fail(error))
    seen = []
    for _ in range(2):
        with pytest.raises(BaseException) as caught:  # SystemExit among them
            read(faulty)
        assert type(caught.value) is type(error())
        seen.append(caught.value)
    assert seen[0] is not seen[1]


def test_applied_then_applies_and_raises(faulty: FaultyBackend, register: Register) -> None:
    faulty.script("write", applied_then(BackendUnavailableError("lost")))
    with pytest.raises(BackendUnavailableError, match="lost"):
        write(faulty, b"mine")
    assert register.stored["k"] == (b"mine", "1")
    assert (faulty.calls[0].applied, faulty.calls[0].outcome) == (True, "BackendUnavailableError")


def test_a_delay_waits_on_the_clock_before_and_after(
    faulty: FaultyBackend, register: Register, clock: FakeClock
) -> None:
    faulty.script("write", delay(2, 1))
    caller = Caller(clock, lambda: write(faulty))
    clock.advance(1.9)
    assert register.stored == {}
    clock.advance(0.2)
    assert register.stored != {}
    assert caller.at is None
    clock.advance(10)
    assert (caller.answer, caller.at) == ("1", 103.0)


@pytest.mark.parametrize(
    ("before", "after", "applied"), [(6, 0, False), (0, 6, True), (3, 3, True)]
)
def test_a_delay_beyond_the_timeout_is_no_answer(
    faulty: FaultyBackend, clock: FakeClock, before: float, after: float, applied: bool
) -> None:
    faulty.script("write", delay(before, after))
    caller = Caller(clock, lambda: write(faulty))
    clock.advance(10)
    assert isinstance(caller.answer, BackendUnavailableError)
    assert caller.at == 105.0
    assert faulty.calls[0].applied is applied


def test_a_deaf_delay_ignores_the_timeout(faulty: FaultyBackend, clock: FakeClock) -> None:
    faulty.script("write", delay(60, 10, deaf=True))
    caller = Caller(clock, lambda: write(faulty))
    clock.advance(100)
    assert (caller.answer, caller.at) == ("1", 170.0)


def test_a_write_that_lands_later_is_reported_as_unavailable_at_once(
    faulty: FaultyBackend, register: Register, clock: FakeClock
) -> None:
    faulty.script("write", lands_later(30), lands_later(40, BackendUnavailableError("mine")))
    with pytest.raises(BackendUnavailableError, match="no answer"):
        write(faulty, b"late")
    with pytest.raises(BackendUnavailableError, match="mine"):
        write(faulty, b"too late")
    clock.advance(29)
    assert register.stored == {}
    clock.advance(1)
    assert register.stored["k"] == (b"late", "1")
    clock.advance(10)  # the second meets a conflict, and nobody is there to be told
    assert register.stored["k"] == (b"late", "1")
    assert [call.applied for call in faulty.calls] == [True, False]


@pytest.mark.parametrize("after", [False, True])
def test_a_hang_lasts_until_its_flag_is_set(
    faulty: FaultyBackend, register: Register, clock: FakeClock, after: bool
) -> None:
    until = Flag()
    faulty.script("write", hang(until, after=after))
    caller = Caller(clock, lambda: write(faulty))
    clock.advance(1000)
    assert (caller.at, bool(register.stored)) == (None, after)
    until.set()
    clock.advance(0)
    assert (caller.answer, caller.at) == ("1", 1100.0)


def test_release_all_frees_everything_that_waits(faulty: FaultyBackend, clock: FakeClock) -> None:
    faulty.script("read", hang(), hang(after=True), delay(900, deaf=True), Gate(), delay(900))
    callers = [Caller(clock, lambda: read(faulty)) for _ in range(5)]
    faulty.always("write", hang())
    faulty.script("write", lands_later(900))
    callers.append(Caller(clock, lambda: write(faulty)))
    clock.wait_for_waiters(6)
    faulty.release_all()
    clock.advance(0)
    assert clock.waiters == ()
    assert not any(caller.task.is_alive() for caller in callers)
    assert read(faulty) is not None  # and the faults are gone


def test_what_someone_else_writes_first_makes_ours_conflict(
    faulty: FaultyBackend, register: Register
) -> None:
    version = write(faulty, b"mine")
    faulty.script("write", substitute(b"theirs"), substitute(lambda stored: stored.body + b"!"))
    for expected in (b"theirs", b"theirs!"):
        with pytest.raises(VersionConflictError):
            write(faulty, b"mine again", expect=version)
        assert register.stored["k"][0] == expected
    assert faulty.count("write") == 3  # theirs are in no log


def test_a_read_sees_what_was_substituted(faulty: FaultyBackend) -> None:
    faulty.script("read", substitute(b"theirs"))
    assert read(faulty).body == b"theirs"


def test_any_function_of_the_call_and_its_continuation_is_a_fault(faulty: FaultyBackend) -> None:
    def twice(call: Call, proceed: Callable[[], Any]) -> Any:
        proceed()
        return proceed()

    faulty.script("write", twice, intercept(twice))
    for _ in range(2):
        with pytest.raises(VersionConflictError):
            write(faulty, expect=read(faulty).version)
    assert [call.faults for call in faulty.calls if call.op == "write"] == [
        ["twice"],
        ["intercept(twice)"],
    ]


# --- Which calls -------------------------------------------------------------------------


def test_a_script_is_used_up_one_fault_a_call(faulty: FaultyBackend) -> None:
    faulty.script("read", fail(BackendUnavailableError("1")), None, fail(OSError("3")))
    outcomes = []
    for _ in range(5):
        with contextlib.suppress(Exception):
            read(faulty)
        outcomes.append(faulty.calls[-1].outcome)
    assert outcomes == ["BackendUnavailableError", "ok", "OSError", "ok", "ok"]


def test_a_standing_fault_stays_until_it_is_healed(faulty: FaultyBackend) -> None:
    faulty.always("*", fail(BackendUnavailableError("down")))
    for call in (lambda: read(faulty), lambda: write(faulty), lambda: faulty.list("", timeout=5)):
        with pytest.raises(BackendUnavailableError):
            call()
    faulty.heal()
    assert read(faulty).version is ABSENT


def test_a_predicate_narrows_a_fault_to_some_calls(faulty: FaultyBackend) -> None:
    faulty.script(
        "write",
        fail(BackendUnavailableError("renewal")),
        when=lambda call: call.document.get("state") == "held" and call.expect is not ABSENT,
    )
    version = write(faulty, json.dumps({"state": "held"}).encode())
    with pytest.raises(BackendUnavailableError, match="renewal"):
        write(faulty, json.dumps({"state": "held"}).encode(), expect=version)
    write(faulty, json.dumps({"state": "released"}).encode(), expect=version)


def test_all_matching_faults_take_part_the_first_outermost(faulty: FaultyBackend) -> None:
    steps: list[str] = []

    def noting(name: str) -> Callable[[Call, Callable[[], Any]], Any]:
        def fault(call: Call, proceed: Callable[[], Any]) -> Any:
            steps.append(f"{name} in")
            result = proceed()
            steps.append(f"{name} out")
            return result

        return fault

    faulty.always("read", noting("outer"))
    faulty.script("*", noting("inner"))
    read(faulty)
    assert steps == ["outer in", "inner in", "inner out", "outer out"]


def test_an_unknown_operation_is_refused(faulty: FaultyBackend) -> None:
    with pytest.raises(ValueError, match="an op is"):
        faulty.script("writes", None)


def test_a_script_gives_each_fault_to_one_call_only_in_a_crowd(register: Register) -> None:
    faulty = FaultyBackend(register)
    faulty.script("read", *[fail(BackendUnavailableError("x"))] * 50)
    begin = threading.Barrier(10)

    def crowd() -> None:
        begin.wait(NEVER)
        for _ in range(20):
            with contextlib.suppress(BackendUnavailableError):
                read(faulty)

    threads = [threading.Thread(target=crowd, daemon=True) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NEVER)
    assert faulty.count("read") == 200
    assert faulty.count(when=lambda call: call.outcome != "ok") == 50
    assert [call.number for call in faulty.calls] == list(range(1, 201))


# --- Gates -------------------------------------------------------------------------------


def test_a_gate_holds_a_write_that_has_been_sent(
    faulty: FaultyBackend, register: Register, clock: FakeClock
) -> None:
    gate = faulty.gate("write", when=lambda call: call.thread == "slow")
    slow = Caller(clock, lambda: write(faulty, b"slow"), name="slow")
    assert gate.arrived.wait(NEVER)
    fast = Caller(clock, lambda: write(faulty, b"fast"), name="fast")
    clock.advance(0)
    assert fast.answer == "1"
    gate.open()
    clock.advance(0)
    assert isinstance(slow.answer, VersionConflictError)
    assert register.stored["k"][0] == b"fast"
    assert [call.thread for call in gate.calls] == ["slow"]
    assert repr(gate) == "gate(before)"


@pytest.mark.parametrize("stored", [False, True])
def test_a_gate_may_hold_the_reply_be_it_an_error_or_not(
    faulty: FaultyBackend, register: Register, clock: FakeClock, stored: bool
) -> None:
    if stored:
        write(register, b"theirs")
    gate = faulty.gate("write", after=True)
    caller = Caller(clock, lambda: write(faulty, b"mine"))
    clock.advance(3)
    assert gate.arrived.is_set()
    assert register.stored["k"][0] == (b"theirs" if stored else b"mine")
    assert caller.at is None
    gate.open()
    clock.advance(0)
    assert caller.at == 103.0
    assert isinstance(caller.answer, VersionConflictError) is stored
    assert gate.calls[0].faults == ["gate(after)"]


def test_a_gate_in_a_script_holds_that_call_alone(faulty: FaultyBackend, clock: FakeClock) -> None:
    gate = Gate()
    faulty.script("read", None, gate)
    callers = [Caller(clock, lambda: read(faulty)) for _ in range(3)]
    clock.advance(1)
    assert [caller.at is None for caller in callers].count(True) == 1
    gate.open()
    clock.advance(0)
    assert all(caller.at is not None for caller in callers)


# --- Chaos -------------------------------------------------------------------------------

RATES = {
    "fail": 0.1,
    "denied": 0.1,
    "lost": 0.1,
    "slow": 0.1,
    "timeout": 0.1,
    "deaf": 0.1,
    "late": 0.1,
}


def storm(seed: int) -> list[tuple[str, str, float, list[str]]]:
    clock = FakeClock(start=100.0)
    faulty = FaultyBackend(Register(), clock)
    faulty.chaos(seed, RATES)

    def target() -> None:
        for _ in range(100):
            with contextlib.suppress(
                BackendUnavailableError, BackendDeniedError, VersionConflictError
            ):
                write(faulty, expect=read(faulty).version)

    clock.spawn(target, "caller")
    clock.advance(100_000)
    assert clock.waiters == ()
    return [(call.op, call.outcome, call.at, call.faults) for call in faulty.calls]


def test_chaos_is_the_same_for_a_seed() -> None:
    log = storm(1)
    assert log == storm(1)
    assert log != storm(2)


def test_chaos_mixes_the_faults_at_the_given_rates() -> None:
    log = [
        fault.partition("(")[0] for seed in range(5) for call in storm(seed) for fault in call[3]
    ]
    calls = sum(len(storm(seed)) for seed in range(5))
    assert set(log) == {"fail", "applied_then", "delay", "lands_later"}
    assert 0.6 < len(log) / calls < 0.8
    assert 0.07 < log.count("lands_later") / calls < 0.13


def test_without_rates_chaos_does_nothing(faulty: FaultyBackend) -> None:
    faulty.chaos(1, {})
    read(faulty)
    assert faulty.calls[0].faults == []


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"boom": 0.1}, "unknown"),
        ({"fail": -0.1}, "shares"),
        ({"fail": 0.6, "lost": 0.6}, "shares"),
    ],
)
def test_rates_that_make_no_sense_are_refused(
    faulty: FaultyBackend, rates: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        faulty.chaos(1, rates)


# --- Surroundings ------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_may_call_and_logs_its_own_pid(faulty: FaultyBackend) -> None:
    with faulty._lock:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                read(faulty)
                assert faulty.calls[-1].pid == os.getpid()
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert faulty.count() == 0


def test_without_a_clock_it_waits_in_real_time(register: Register) -> None:
    faulty = FaultyBackend(register)
    faulty.script("read", delay(0.01))
    read(faulty)
    assert faulty.calls[0].outcome == "ok"
