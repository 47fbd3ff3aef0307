"""Heartbeats that fail, hang, starve or die: no hold is ever both believed and unattended."""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kit import Host, Running, World
from tako_sync.abc import Clock, Task
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    LeaseLostError,
    LossReason,
    VersionConflictError,
)
from tako_sync.events import Acquired, Event, Lost, Renewed, Unreachable
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.record import Identity, Record, State
from tako_sync.runtime import Runtime
from tako_sync.testing.clock import FakeClock
from tako_sync.testing.faults import Call, Fault, delay, fail, hang

KEY = "run-shop-test-reindex"
TTL = 30.0
ASSURED = 27.0
POLL = 2.5
HEARTBEAT = "tako-heartbeat-reindex"


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(2 * TTL)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


class Work:
    """A body that returns 42: after some seconds, earlier if it listens, or when told to."""

    def __init__(
        self, world: World, seconds: float | None = None, *, listens: bool = False
    ) -> None:
        self.finish = Flag()
        self.began: list[float] = []
        self.ended: list[float] = []
        self._world = world
        self._seconds = seconds
        self._listens = listens
        self._ctx: Ctx | None = None

    def __call__(self, ctx: Ctx) -> int:
        clock = self._world.clock
        with self._world.meter.running(ctx):
            self._ctx = ctx
            self.began.append(clock.monotonic())
            if self._listens:
                ctx.wait(600.0 if self._seconds is None else self._seconds)
            else:
                clock.wait(self.finish, self._seconds)
            self.ended.append(clock.monotonic())
        return 42

    @property
    def ctx(self) -> Ctx:
        assert self._ctx is not None, "the body has not begun"
        return self._ctx


def stored(world: World) -> tuple[bytes, object]:
    found = world.store.read(KEY, timeout=1.0)
    return found.body, found.version


def theirs() -> bytes:
    return Record(
        identity=Identity("shop", "test", "reindex"),
        owner="elsewhere:7:theirs",
        write="theirs",
        state=State.HELD,
        ttl=TTL,
        margin=3.0,
        fence=99 * 10**12,
        acquired="2026-01-01T00:00:00Z",
        expires="2026-01-01T00:00:30Z",
    ).encode()


def replace_the_record(world: World) -> None:
    found = world.store.read(KEY, timeout=1.0)
    world.store.write(KEY, theirs(), expect=found.version, timeout=1.0)


def renewal(call: Call) -> bool:
    return call.document.get("state") == "held"


def writes(host: Host) -> list[Call]:
    return [call for call in host.storage.calls if call.op == "write"]


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503 service unavailable")


def lost(running: Running[Any]) -> LeaseLostError:
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    return caught.value


def attended(world: World) -> bool:
    return any(waiting.name == HEARTBEAT for waiting in world.clock.waiters)


# --- Whatever a renewal raises -----------------------------------------------------------------


class RefreshError(Exception):
    """As the library for the credentials raises it; nobody here knows the class."""


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


RAISED: list[type[BaseException]] = [
    RuntimeError,
    ValueError,
    MemoryError,
    OSError,
    RefreshError,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    Odd,
]
STORAGES = [lambda: BackendDeniedError("403 forbidden"), unavailable]
ANYTHING: list[Callable[[], BaseException]] = [*RAISED, *STORAGES]


@pytest.mark.parametrize("prompt", [True, False], ids=["inline", "in a thread"])
@pytest.mark.parametrize("raised", ANYTHING, ids=lambda make: type(make()).__name__)
def test_a_renewal_that_raises_once_is_tried_again_soon(
    world: World, raised: Callable[[], BaseException], prompt: bool
) -> None:
    """No loss, no wait for the next tick, and the thread goes on with its rounds."""
    host = world.host(prompt=prompt)
    work = Work(world, 2 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    host.storage.script("write", fail(raised))

    for _ in range(60):
        world.advance(1.0)
        assert not work.ctx.cancelled and attended(world)
    world.advance(2.0)

    assert running.result() == 42 and not host.told(Lost)
    failed, retried = writes(host)[1:3]
    assert (failed.outcome, retried.outcome) == (type(raised()).__name__, "ok")
    assert 0.5 <= retried.at - failed.at <= 1.5
    assert len(host.told(Renewed)) == 6


@pytest.mark.parametrize("prompt", [True, False], ids=["inline", "in a thread"])
@pytest.mark.parametrize("raised", ANYTHING, ids=lambda make: type(make()).__name__)
def test_renewals_that_raise_for_ever_end_the_hold_at_its_deadline_with_the_cause(
    world: World, raised: Callable[[], BaseException], prompt: bool
) -> None:
    """At the deadline, not later: who waits on the ctx wakes, and ``do`` names the cause."""
    host = world.host(prompt=prompt)
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    host.storage.always("write", fail(raised), when=renewal)

    for _ in range(26):
        world.advance(1.0)
        assert not work.ctx.cancelled and attended(world)
    world.advance(2.0)

    assert work.ended == [writes(host)[0].at + ASSURED]
    loss = lost(running)
    denied = type(raised()) is BackendDeniedError
    assert loss.reason is (LossReason.DENIED if denied else LossReason.UNREACHABLE)
    assert type(loss.__cause__) is type(raised())
    assert loss.value == 42
    assert [event.reason for event in host.told(Lost)] == [loss.reason]
    tries = [call.at for call in writes(host) if renewal(call)][1:]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert len(tries) >= 4 and all(0.5 <= gap <= 7.5 for gap in gaps), gaps
    assert b'"released"' in stored(world)[0], "what it left is still its own, and is freed"


def test_a_listener_that_raises_systemexit_in_the_heartbeat_does_not_end_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """What strikes inside the thread, but outside a request, is logged and survived as well."""

    def listener(event: Event) -> None:
        if isinstance(event, Renewed):
            raise SystemExit("from a listener")

    host = world.host()
    host.runtime.listeners = (listener, host.events.append)
    work = Work(world, 2 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    for _ in range(60):
        world.advance(1.0)
        assert not work.ctx.cancelled and attended(world)
    world.advance(2.0)
    assert running.result() == 42 and not host.told(Lost)
    assert [line for line in caplog.records if line.levelno == logging.ERROR]


# --- Time enough for another attempt -----------------------------------------------------------


TROUBLES: dict[str, Callable[[], Fault]] = {
    "503": lambda: fail(unavailable),
    "429": lambda: fail(lambda: BackendUnavailableError("429 too many requests", retry_after=1.0)),
    "timeout": lambda: delay(before=60.0),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_storage_that_fails_for_three_seconds_costs_nothing(world: World, trouble: str) -> None:
    """Down when the first heartbeat is due, healthy at 13 s: renewed before the second is due."""
    host = world.host(prompt=False)
    work = Work(world, 2 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    start = writes(host)[0].at
    host.storage.always("write", TROUBLES[trouble](), when=lambda call: call.at < start + 13.0)

    world.advance(2 * TTL + 2)

    assert running.result() == 42 and not host.told(Lost)
    renewals = [call for call in writes(host) if renewal(call)][1:]
    first = next(call for call in renewals if call.outcome == "ok")
    assert start + 13.0 <= first.at < start + 19.5
    assert all(call.timeout <= TTL / 6 for call in renewals)
    if trouble == "429":
        at = [call.at for call in renewals[: renewals.index(first) + 1]]
        assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(at))


@pytest.mark.parametrize("trouble", TROUBLES)
def test_two_of_three_attempts_may_fail_for_ever(world: World, trouble: str) -> None:
    """Over five ttl: each heartbeat gets through in its third attempt, and nothing is lost."""
    host = world.host(prompt=False)
    work = Work(world, 5 * TTL)
    running = world.start(lambda: host.lock().do(work))
    fault = TROUBLES[trouble]()
    host.storage.script("write", *20 * [fault, fault, None], when=renewal)
    world.advance(5 * TTL + 6)  # an attempt that hangs when the body ends is waited for
    assert running.result() == 42 and not host.told(Lost)
    assert len(host.told(Renewed)) >= 6


# --- A request that outlasts the ttl -----------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True], ids=["not applied", "applied"])
def test_a_renewal_that_hangs_for_five_ttl_does_not_keep_its_holder_in_the_dark(
    world: World, applied: bool
) -> None:
    """Cancelled at the deadline by something else than the blocked call, whose end is ignored."""
    a, b = world.host("a", prompt=False), world.host("b")
    slow, next_one = Work(world, listens=True), Work(world)
    first = world.start(lambda: a.lock().do(slow), "a")
    told: list[float] = []
    slow.ctx.on_cancel(lambda: told.append(world.clock.monotonic()))
    granted = writes(a)[0].at
    a.storage.always("*", hang(after=applied))
    second = world.start(lambda: b.lock().do(next_one), "b")

    world.advance(TTL + 12.5)

    assert slow.ended == told == [granted + ASSURED]
    assert first.done, "do does not wait for a request that hangs"
    assert lost(first).reason is LossReason.UNREACHABLE
    # The storage counts from when it applied the last write: the renewal's, if that one landed.
    written = writes(a)[1].at if applied else granted
    assert len(next_one.began) == 1 and TTL <= next_one.began[0] - written <= TTL + POLL
    assert next_one.began[0] > slow.ended[0]
    record = stored(world)

    world.advance(5 * TTL - 42.5)
    a.storage.release_all()
    world.advance(0)

    assert slow.ctx.cancelled and not next_one.ctx.cancelled
    assert b'"held"' in record[0] and stored(world)[0].count(b'"held"') == 1
    assert str(next_one.ctx.fence).encode() in stored(world)[0]
    assert all(call.timeout <= TTL / 6 for call in a.storage.calls)
    assert [event.reason for event in a.told(Lost)] == [LossReason.UNREACHABLE]
    next_one.finish.set()
    assert second.result() == 42


# --- A loss stops the work ---------------------------------------------------------------------


def test_a_body_that_asks_its_ctx_ends_within_one_poll_of_the_detection(world: World) -> None:
    host = world.host()
    asked_every = 0.05
    ended: list[float] = []

    def body(ctx: Ctx) -> str:
        other = Ctx.background(world.clock)
        while not ctx.cancelled:
            other.wait(asked_every)
        ended.append(world.clock.monotonic())
        return "stopped"

    running = world.start(lambda: host.lock().do(body))
    replace_the_record(world)
    world.advance(10.0)
    detected = host.storage.calls[-1]
    assert detected.op == "read" and 0 <= ended[0] - detected.at <= asked_every
    loss = lost(running)
    assert (loss.reason, loss.value) == (LossReason.TAKEN, "stopped")
    assert stored(world)[0] == theirs()


WAITS: dict[str, Callable[[Ctx], Any]] = {
    "ctx.wait": lambda ctx: ctx.wait(600.0),
    "ctx.done.wait": lambda ctx: ctx.done.wait(600.0),
    "a child's wait": lambda ctx: ctx.child(timeout=500.0).wait(600.0),
}


@pytest.mark.parametrize("how", WAITS)
def test_a_body_blocked_in_a_wait_on_its_ctx_wakes_at_the_detection(world: World, how: str) -> None:
    host = world.host()
    ended: list[float] = []

    def body(ctx: Ctx) -> None:
        assert WAITS[how](ctx) is True
        ended.append(world.clock.monotonic())
        ctx.check()

    running = world.start(lambda: host.lock().do(body))
    replace_the_record(world)
    world.advance(10.0)
    assert ended == [host.storage.calls[-1].at]
    loss = lost(running)
    assert loss.reason is LossReason.TAKEN and loss.value is None
    assert not getattr(loss, "__notes__", []), "the loss is not a note on itself"


def test_a_body_deaf_to_its_ctx_is_told_by_do_and_its_value_is_kept(world: World) -> None:
    host = world.host()
    work = Work(world, TTL)
    running = world.start(lambda: host.lock().do(work))
    replace_the_record(world)
    world.advance(TTL)
    assert work.ended == [work.began[0] + TTL]
    loss = lost(running)
    assert (loss.reason, loss.value, loss.lease) == (LossReason.TAKEN, 42, "reindex")
    assert str(loss) == (
        'lease "reindex" was lost while held (ttl expired or forcibly taken) '
        "— work after the loss point may not have run"
    )


# --- No heartbeat without a live body ------------------------------------------------------------


def raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    ident = ctypes.c_ulong(thread.ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(kind)) == 1


def ended(world: World, host: Host) -> None:
    """The hold has ended with its frame: nobody renews it, and it is free at once."""
    assert not attended(world)
    assert b'"released"' in stored(world)[0]
    sent = len(host.storage.calls)
    world.advance(2 * TTL)
    assert len(host.storage.calls) == sent


@pytest.mark.parametrize("kind", [Odd, SystemExit, RuntimeError])
def test_an_asynchronous_exception_in_the_body_ends_the_hold(
    world: World, kind: type[BaseException]
) -> None:
    host = world.host()

    def body(ctx: Ctx) -> None:
        while True:
            ctx.wait(1.0)

    running = world.start(lambda: host.lock().do(body))
    world.advance(15.0)
    raise_in(running.thread, kind)
    world.advance(2.0)
    assert running.done and type(running.error) is kind
    assert not host.told(Lost)
    ended(world, host)


def test_an_abandoned_generator_ends_its_hold(world: World) -> None:
    host = world.host()

    def rows() -> Iterator[int]:
        with host.lock().hold() as ctx:
            yield ctx.fence
            yield ctx.fence

    generator = rows()
    assert next(generator) > 0
    world.advance(15.0)
    assert attended(world)
    del generator
    world.advance(0)
    ended(world, host)


def test_a_generator_abandoned_by_a_thread_that_dies_ends_its_hold(world: World) -> None:
    host = world.host()

    def rows() -> Iterator[int]:
        with host.lock().hold() as ctx:
            yield ctx.fence

    def die() -> None:
        generator = rows()
        next(generator)
        Ctx.background(world.clock).wait(15.0)
        raise ValueError("the thread's own")

    running = world.start(die)
    assert attended(world)
    world.advance(15.0)
    assert running.done
    assert isinstance(running.error, ValueError)
    running.error.__traceback__ = None  # it keeps the frame, and with that the generator
    gc.collect()
    world.advance(0)
    ended(world, host)


@pytest.mark.parametrize("cycle", [False, True], ids=["by its last reference", "in a cycle"])
def test_a_dropped_hold_ends(world: World, cycle: bool) -> None:
    host = world.host()
    hold = host.lock().hold()
    ctx = hold.__enter__()
    if cycle:
        hold.itself = hold  # type: ignore[attr-defined]
    world.advance(15.0)
    assert attended(world) and not ctx.cancelled
    del hold
    gc.collect()
    world.advance(0)
    assert ctx.cancelled and not isinstance(ctx.cause, LeaseLostError)
    ended(world, host)


# --- A heartbeat that starves, or is dead ---------------------------------------------------------


class Starving(Clock):
    """A host's clock, on which the heartbeats' threads do not run while they are starved."""

    def __init__(self, base: FakeClock) -> None:
        self._base = base
        self._fed = Flag()
        self._fed.set()
        self.threads_left = True

    def starve(self) -> None:
        self._fed = Flag()

    def feed(self) -> None:
        self._fed.set()

    def monotonic(self) -> float:
        return self._base.monotonic()

    def wall(self) -> datetime:
        return self._base.wall()

    def random(self) -> float:
        return self._base.random()

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        self._base.wait(event, timeout)
        if threading.current_thread().name == HEARTBEAT:
            self._base.wait(self._fed)
        return event.is_set()

    def spawn(self, target: Callable[[], object], name: str) -> Task:
        if not self.threads_left and name == HEARTBEAT:
            raise RuntimeError("can't start new thread")
        return self._base.spawn(target, name)


def starving_host(world: World) -> tuple[Host, Starving]:
    clock = Starving(world.clock)
    host = Host("a", world.store, clock, world.policy, True)
    world.hosts.append(host)
    return host, clock


class GuardedStore:
    """The receiver of a lease's writes: refuses a fence smaller than the largest it has seen."""

    def __init__(self) -> None:
        self.largest = 0
        self.accepted: list[int] = []

    def write(self, fence: int) -> bool:
        if fence < self.largest:
            return False
        self.largest = fence
        self.accepted.append(fence)
        return True


def test_a_starved_heartbeat_makes_nobody_believe_in_a_lease_that_another_has(
    world: World,
) -> None:
    """The body hears of it before its next step that asks, and its writes are refused anyway."""
    a, clock = starving_host(world)
    b = world.host("b")
    store = GuardedStore()
    busy, next_one = Work(world), Work(world)
    first = world.start(lambda: a.lock().do(busy), "a")
    assert store.write(busy.ctx.fence)
    clock.starve()
    second = world.start(lambda: b.lock().do(next_one), "b")

    world.advance(ASSURED - 0.001)
    assert not busy.ctx.cancelled
    world.advance(0.001)
    assert busy.ctx.cancelled, "asked at the deadline, while its heartbeat does not run"
    world.advance(TTL + 5.0 - ASSURED)
    assert len(next_one.began) == 1
    assert store.write(next_one.ctx.fence)
    record = stored(world)

    clock.feed()
    world.advance(0)
    assert stored(world) == record and len(writes(a)) == 1, "a heartbeat that comes late is none"
    with pytest.raises(LeaseLostError):
        busy.ctx.ensure(1.0)
    assert not store.write(busy.ctx.fence)
    busy.finish.set()
    world.advance(0)
    assert lost(first).reason is LossReason.EXPIRED
    assert stored(world) == record
    next_one.finish.set()
    assert second.result() == 42 and store.accepted == sorted(store.accepted)


def test_a_starved_heartbeat_does_not_leave_a_waiting_body_asleep(world: World) -> None:
    """Whoever waits on the ctx wakes at the deadline, though nobody is there to wake them."""
    host, clock = starving_host(world)
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    clock.starve()
    world.advance(ASSURED + 6.0)
    assert work.ended == [work.began[0] + ASSURED]
    clock.feed()
    world.advance(1.0)
    assert lost(running).reason is LossReason.EXPIRED


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_heartbeat_thread_that_dies_ends_the_hold_at_its_deadline(world: World) -> None:
    """Killed in its first wait, where nothing of the heartbeat's own runs yet."""
    host = world.host()
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    thread = next(thread for thread in threading.enumerate() if thread.name == HEARTBEAT)
    raise_in(thread, SystemExit)
    world.advance(20.0)
    assert not thread.is_alive() and not work.ctx.cancelled
    world.advance(10.0)
    assert work.ended == [work.began[0] + ASSURED]
    assert lost(running).reason is LossReason.EXPIRED
    assert len(writes(host)) == 2 and b'"released"' in stored(world)[0]


def test_an_exception_thrown_into_the_heartbeats_thread_does_not_end_it(world: World) -> None:
    """Between two renewals: it is logged, and the next renewal is sent all the same."""
    host = world.host()
    work = Work(world, 2 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    world.advance(12.0)
    for _ in range(4):
        thread = next(thread for thread in threading.enumerate() if thread.name == HEARTBEAT)
        raise_in(thread, SystemExit)
        world.advance(10.0)
        assert attended(world) and not work.ctx.cancelled
    world.advance(10.0)
    assert running.result() == 42 and not host.told(Lost)


def test_a_heartbeat_that_cannot_be_started_means_no_body_and_a_free_lease(world: World) -> None:
    host, clock = starving_host(world)
    clock.threads_left = False
    work = Work(world)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        host.lock().do(work)
    with pytest.raises(RuntimeError, match="can't start new thread"), host.lock().hold():
        pytest.fail("the block has begun without a heartbeat")
    world.advance(0)
    assert not work.began and b'"released"' in stored(world)[0]


# --- Stopped between the grant and the body -------------------------------------------------------


@pytest.mark.parametrize("contended", [True, False])
def test_a_process_stopped_before_its_body_begins_finds_its_ctx_cancelled(
    world: World, contended: bool
) -> None:
    """Stopped for longer than the ttl after the check of its deadline: the first question tells."""
    a, clock = starving_host(world)
    clock.starve()  # as the whole process

    def stop(event: Event) -> None:
        if isinstance(event, Acquired):
            Ctx.background(world.clock).wait(TTL + 5.0)

    a.runtime.listeners = (stop, a.events.append)
    b = world.host("b")
    steps: list[str] = []

    def body(ctx: Ctx) -> None:
        with world.meter.running(ctx):
            steps.append("cancelled" if ctx.cancelled else "believes")
            assert ctx.remaining() == 0 and ctx.done.is_set() and ctx.wait(60.0)
            ctx.check()
            steps.append("went on")

    first = world.start(lambda: a.lock().do(body), "a")
    next_one = Work(world)
    second = world.start(lambda: b.lock().do(next_one), "b") if contended else None
    world.advance(TTL + 5.0)
    clock.feed()
    world.advance(0)

    assert lost(first).reason is LossReason.EXPIRED
    assert steps == ["cancelled"]
    renewals = [call for call in writes(a)[1:] if renewal(call)]
    assert not renewals, "a hold that was slept through is not revived"
    if second is not None:
        assert len(next_one.began) == 1 and not next_one.ctx.cancelled
        next_one.finish.set()
        assert second.result() == 42
    else:
        assert b'"released"' in stored(world)[0]


def test_an_answer_that_comes_at_the_deadline_prolongs_nothing(world: World) -> None:
    """The renewal has landed in time, but its answer arrives when the hold is over: it stays so."""
    host = world.host()  # prompt: the heartbeat's own thread is held up by the request
    work = Work(world)
    running = world.start(lambda: host.lock().do(work))
    host.storage.script("write", delay(after=ASSURED, deaf=True))
    world.advance(ASSURED)
    assert work.ctx.cancelled
    world.advance(12.0)
    assert writes(host)[1].applied and work.ctx.cancelled and work.ctx.remaining() == 0
    work.finish.set()
    world.advance(6.0)
    assert lost(running).reason is LossReason.EXPIRED
    assert b'"released"' in stored(world)[0]


# --- For real -----------------------------------------------------------------------------------

NEXT_ONE = """
import sys
import tako_sync
tako_sync.configure(
    app="shop", env="test", backend=sys.argv[1],
    policy=tako_sync.LeasePolicy(ttl=0.5, poll=0.1),
)
print("ready", flush=True)
sys.stdin.readline()
print(tako_sync.Lock("reindex").do(lambda ctx: ctx.fence), flush=True)
"""


def test_a_body_that_holds_the_interpreter_lock_past_its_ttl_finds_itself_cancelled(
    tmp_path: Path,
) -> None:
    """One C call, 1.2 s long: no thread of this process runs, and another process takes over."""
    try:
        usleep = ctypes.PyDLL(None).usleep  # PyDLL: called with the interpreter lock held
    except (AttributeError, OSError, TypeError):
        pytest.skip("no C library to hold the interpreter lock in")
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        pytest.skip("this interpreter has no lock to hold")
    path = tmp_path / "leases.sqlite3"
    policy = LeasePolicy(ttl=0.5, poll=0.1)
    backend = SqliteLease(str(path))
    runtime = Runtime(backend, app="shop", env="test", policy=policy)
    store = GuardedStore()
    asked: list[bool] = []

    with subprocess.Popen(
        [sys.executable, "-c", NEXT_ONE, f"sqlite://{path}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        stdin, stdout = other.stdin, other.stdout

        def body(ctx: Ctx) -> None:
            assert store.write(ctx.fence)
            stdin.write("go\n")
            stdin.flush()
            usleep(1_200_000)
            asked.append(ctx.cancelled)
            assert store.write(int(stdout.readline())), "the next holder's fence is larger"
            assert not store.write(ctx.fence), "ours is refused from then on"

        with pytest.raises(LeaseLostError) as caught:
            Lock("reindex").bound_to(runtime).do(body)
    assert asked == [True]
    assert caught.value.reason in (LossReason.EXPIRED, LossReason.UNREACHABLE)
    assert other.returncode == 0
    backend.close()


def test_renewals_refused_for_no_reason_are_trouble_and_no_hot_loop(world: World) -> None:
    """A proxy, or a broken storage, answers each renewal with a conflict; the record stands."""
    host = world.host()
    work = Work(world, TTL)
    running = world.start(lambda: host.lock().do(work))
    host.storage.always("write", fail(lambda: VersionConflictError("412")))
    asked = len(host.requests())
    world.advance(ASSURED - 0.1)
    assert not work.ctx.cancelled
    assert len(host.told(Unreachable)) == 1
    world.advance(0.1)
    assert work.ctx.cancelled
    sent = host.requests()[asked:]
    assert sent.count("write") == sent.count("read") <= 30, "one look for each refusal"
    host.storage.heal()
    world.advance(TTL)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.UNREACHABLE
    assert "nobody has changed it" in str(caught.value.__cause__)
    assert (len(host.told(Unreachable)), len(host.told(Lost))) == (1, 1)


def test_a_pause_that_is_asked_for_does_not_outlast_the_last_chance_to_renew(world: World) -> None:
    """429 asks for a second at least, and a minute at most: with a short ttl, that is too long."""
    host = world.host()
    work = Work(world)
    running = world.start(lambda: host.lock().do(work))
    refused = BackendUnavailableError("429", retry_after=60.0)
    host.storage.script("write", fail(lambda: refused), fail(lambda: refused))
    world.advance(ASSURED - 5.0 + 0.1)
    assert host.requests()[2:] == ["write", "write"], "the second one as the last chance came"
    world.advance(5.0)
    assert host.told(Lost)[0].reason is LossReason.UNREACHABLE
    work.finish.set()
    world.advance(TTL)
    with pytest.raises(LeaseLostError):
        running.result()


def test_one_refusal_that_asks_for_a_minute_costs_nothing(world: World) -> None:
    host = world.host()
    work = Work(world, 2 * TTL)
    running = world.start(lambda: host.lock().do(work))
    host.storage.script("write", fail(lambda: BackendUnavailableError("429", retry_after=60.0)))
    world.advance(2 * TTL + 1)
    assert running.result() == 42
