"""Heartbeats over HTTP that fail, hang or starve: no hold is ever both believed and unattended."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.auth import exceptions as auth
from google.auth.credentials import AnonymousCredentials

from gcs import canned, kit
from gcs.actions import Action, Drip, Drop, Reset, Stall, Status, Substitute
from gcs.faults import Fault
from gcs.hosts import (
    ASSURED,
    POLL,
    TTL,
    WIDTHS,
    GCSHost,
    GCSWorld,
    Work,
    a_world,
    is_held,
    record,
)
from gcs.log import Request
from gcs.process import GCSProcess
from kit import Running
from tako_sync.backends.gcs import GCSLease
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    LeaseLostError,
    LossReason,
)
from tako_sync.events import Acquired, Event, Lost, Renewed
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

HTML = "<html><body>Sign in to the network.</body></html>"
HEARTBEAT = "tako-heartbeat-reindex"
THEIRS = record(fence=99 * 10**15)


@pytest.fixture
def world() -> Iterator[GCSWorld]:
    with a_world() as world:
        yield world


def lost(running: Running[Any]) -> LeaseLostError:
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    return caught.value


def attended(world: GCSWorld) -> bool:
    return any(waiting.name == HEARTBEAT for waiting in world.clock.waiters)


def renewals(host: GCSHost) -> list[Request]:
    return [request for request in host.writes() if is_held(request)][1:]


# --- Whatever a renewal raises ---------------------------------------------------------------


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


class Failing(AnonymousCredentials):
    """Credentials that raise what they are told to, wherever the client asks them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.error: Callable[[], BaseException] | None = None
        self.times = 0

    def before_request(self, *args: Any, **kwargs: Any) -> None:
        if self.error is not None and self.times > 0:
            self.times -= 1
            raise self.error()

    def fail(self, error: Callable[[], BaseException], times: int = 10**6) -> None:
        self.error, self.times = error, times


def of(kind: str) -> Callable[[], Exception]:
    """Return what makes an error of google.auth, whose classes have no types."""

    def make() -> Exception:
        error: Exception = getattr(auth, kind)("the token server answered 503")
        return error

    return make


RAISED: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": RuntimeError,
    "ValueError": ValueError,
    "MemoryError": MemoryError,
    "RefreshError": of("RefreshError"),
    "TransportError": of("TransportError"),
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "Odd": Odd,
}
ANSWERED: dict[str, Action] = {
    "503": Status(503),
    "500": Status(500),
    "429": Status(429),
    "408": Status(408),
    "403 forbidden": canned.forbidden("storage.objects.create"),
    "401": canned.UNAUTHORIZED,
    "404 of the bucket": canned.BUCKET_MISSING,
    "a proxy's page": Substitute(HTML, 502, "text/html"),
    "reset": Reset(),
    "closed": Drop(after=False),
}


def once(host: GCSHost, credentials: Failing, trouble: str) -> None:
    if trouble in RAISED:
        credentials.fail(RAISED[trouble], 1)
    else:
        host.fails("write", ANSWERED[trouble])


@pytest.mark.parametrize("trouble", [*RAISED, *ANSWERED])
def test_a_renewal_that_fails_once_is_tried_again_soon(world: GCSWorld, trouble: str) -> None:
    """No loss, no wait for the next tick, and the thread goes on with its rounds."""
    credentials = Failing()
    host = world.host(credentials=credentials)
    work = Work(world, TTL + 5)
    running = world.start(lambda: host.lock().do(work))
    once(host, credentials, trouble)

    for _ in range(15):
        world.advance(2.0)
        assert not work.ctx.cancelled and attended(world)
    world.advance(6.0)

    assert running.result() == 42 and not host.told(Lost)
    assert len(host.told(Renewed)) == 3
    first, second = (request.at - work.began[0] for request in renewals(host)[-3:-1])
    assert 9.5 <= first <= 13.0 and 19.5 <= second <= 20.0


@pytest.mark.parametrize("trouble", [*RAISED, *ANSWERED])
def test_renewals_that_fail_for_ever_end_the_hold_at_its_deadline_with_the_cause(
    world: GCSWorld, trouble: str
) -> None:
    """At the deadline, not later: who waits on the ctx wakes, and ``do`` names the cause."""
    credentials = Failing()
    host = world.host(credentials=credentials)
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    granted = host.writes()[0].at
    if trouble in RAISED:
        credentials.fail(RAISED[trouble])
        work.ctx.on_cancel(lambda: credentials.fail(RuntimeError, 0))  # not at the release
    else:
        host.fails("write", ANSWERED[trouble], times=None, when=is_held)

    for _ in range(13):
        world.advance(2.0)
        assert not work.ctx.cancelled and attended(world)
    world.advance(1.5)

    assert work.ended == [granted + ASSURED]
    loss = lost(running)
    permanent = trouble in ("403 forbidden", "401", "404 of the bucket")
    assert loss.reason is (LossReason.DENIED if permanent else LossReason.UNREACHABLE)
    if permanent:
        assert isinstance(loss.__cause__, BackendDeniedError)
    elif trouble in (*ANSWERED, "RefreshError", "TransportError"):
        assert isinstance(loss.__cause__, BackendUnavailableError)
    else:
        assert type(loss.__cause__) is RAISED[trouble]
    assert loss.value == 42
    assert [event.reason for event in host.told(Lost)] == [loss.reason]
    if trouble in ANSWERED:
        tries = [request.at for request in renewals(host)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
        assert len(tries) >= 4 and all(0.5 <= gap <= 7.5 for gap in gaps), gaps
    assert b'"released"' in world.body, "what it left is still its own, and is freed"


def test_credentials_that_fail_for_twelve_seconds_cost_nothing(world: GCSWorld) -> None:
    """The token server is down when the first heartbeat is due, and back at 22 s."""
    credentials = Failing()
    host = world.host(credentials=credentials)
    work = Work(world, 2 * TTL)
    running = world.start(lambda: host.lock().do(work))
    world.advance(9.0)
    credentials.fail(of("RefreshError"))
    world.advance(13.0)
    assert not work.ctx.cancelled and not renewals(host)
    credentials.error = None
    world.advance(3.5)
    assert len(renewals(host)) == 1 and work.ctx.remaining() > 23.0
    world.advance(2 * TTL)
    assert running.result() == 42 and not host.told(Lost)


def test_credentials_that_fail_at_the_start_are_an_error_and_not_an_endless_loop(
    world: GCSWorld,
) -> None:
    credentials = Failing()
    host = world.host(credentials=credentials)
    work = Work(world)
    credentials.fail(of("RefreshError"))
    running = world.start(lambda: host.lock().try_do(work))
    world.advance(10.0)
    with pytest.raises(BackendUnavailableError, match="the token server answered 503"):
        running.result()
    credentials.fail(of("DefaultCredentialsError"))
    with pytest.raises(BackendDeniedError, match="no usable credentials"):
        world.run(lambda: host.lock().do(work))
    assert not work.began and not host.requests()


# --- Time enough for another attempt -----------------------------------------------------------

TROUBLES: dict[str, Callable[[], Action]] = {
    "503": lambda: Status(503),
    "429": lambda: Status(429),
    "reset": Reset,
    "timeout": Stall,
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_bucket_that_fails_for_three_seconds_costs_nothing(world: GCSWorld, trouble: str) -> None:
    """Down when the first heartbeat is due, healthy at 13 s: renewed before the second is due."""
    host = world.host()
    work = Work(world, 2 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    start = host.writes()[0].at
    host.fails(
        "write", TROUBLES[trouble](), times=None, when=lambda request: request.at < start + 13.0
    )

    world.advance(2 * TTL + 2)

    assert running.result() == 42 and not host.told(Lost)
    tries = renewals(host)
    good = next(request for request in tries if request.status == 200)
    assert start + 13.0 <= good.at < start + 19.5
    if trouble == "429":
        at = [request.at for request in tries[: tries.index(good) + 1]]
        assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(at))


@pytest.mark.parametrize("trouble", TROUBLES)
def test_two_of_three_attempts_may_fail_for_ever(world: GCSWorld, trouble: str) -> None:
    """Over four ttl: each heartbeat gets through in its third attempt, and nothing is lost."""
    host = world.host()
    work = Work(world, 4 * TTL)
    running = world.start(lambda: host.lock().do(work))
    turn = itertools.count()
    host.fails(
        "write",
        TROUBLES[trouble](),
        times=None,
        when=lambda request: is_held(request) and next(turn) % 3 < 2,
    )
    world.advance(4 * TTL + 6)  # an attempt that hangs when the body ends is waited for
    assert running.result() == 42 and not host.told(Lost)
    assert len(host.told(Renewed)) >= 5


# --- A request that outlasts the ttl -----------------------------------------------------------


@pytest.mark.parametrize(
    ("hang", "applied"),
    [(Stall, False), (lambda: Stall(after=True), True), (lambda: Drip(interval=60), True)],
    ids=["not applied", "applied", "dripping"],
)
def test_a_renewal_that_hangs_for_five_ttl_does_not_keep_its_holder_in_the_dark(
    world: GCSWorld, hang: Callable[[], Action], applied: bool
) -> None:
    """Cancelled at the deadline by something else than the blocked call, whose end is ignored."""
    a, b = world.host("a"), world.host("b")
    slow, next_one = Work(world, listens=True), Work(world)
    first = world.start(lambda: a.lock().do(slow), "a")
    told: list[float] = []
    slow.ctx.on_cancel(lambda: told.append(world.now))
    granted = a.writes()[0].at
    a.fails("*", hang(), times=None)
    second = world.start(lambda: b.lock().do(next_one), "b")

    world.advance(TTL + 10.0 + WIDTHS + POLL)

    assert slow.ended == told == [granted + ASSURED]
    assert first.done, "do does not wait for a request that hangs"
    assert lost(first).reason is LossReason.UNREACHABLE
    # The bucket counts from when it applied the last write: the renewal's, if that one landed.
    written = a.writes()[1].at if applied else granted
    (began,) = next_one.began
    assert slow.ended[0] < began and TTL <= began - written <= TTL + WIDTHS + POLL
    theirs = world.stands
    world.advance(5 * TTL - 50)
    world.let_go()
    assert slow.ctx.cancelled and not next_one.ctx.cancelled
    assert b'"held"' in theirs[0] and str(next_one.ctx.fence).encode() in world.body
    assert [event.reason for event in a.told(Lost)] == [LossReason.UNREACHABLE]
    next_one.end()
    assert second.result() == 42


def test_every_request_carries_a_short_timeout_of_its_own(
    monkeypatch: pytest.MonkeyPatch, world: GCSWorld
) -> None:
    """What the client's library has by default is 60 s, and 120 s of retries."""
    host = world.host()
    session = host.backend._clients.get()._http
    seen: list[Any] = []
    request = session.request

    def listen(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("timeout"))
        return request(*args, **kwargs)

    monkeypatch.setattr(session, "request", listen)
    work = Work(world, TTL)
    running = world.start(lambda: host.lock().do(work))
    world.advance(TTL)
    assert running.result() == 42
    assert len(seen) == len(host.requests()) >= 4
    assert all(timeout is not None and 0 < timeout <= TTL / 6 for timeout in seen)


# --- A loss stops the work ---------------------------------------------------------------------


def test_a_body_that_asks_its_ctx_ends_within_one_poll_of_the_detection(world: GCSWorld) -> None:
    host = world.host()
    ended: list[float] = []

    def body(ctx: Ctx) -> str:
        other = Ctx.background(world.clock)
        while not ctx.cancelled:
            other.wait(0.05)
        ended.append(world.now)
        return "stopped"

    running = world.start(lambda: host.lock().do(body))
    world.put(THEIRS)
    world.advance(10.0)
    detected = host.requests()[-1]
    assert detected.kind == "read" and 0 <= ended[0] - detected.at <= 0.05
    loss = lost(running)
    assert (loss.reason, loss.value) == (LossReason.TAKEN, "stopped")
    assert world.body == THEIRS


def test_a_body_blocked_in_a_wait_on_its_ctx_wakes_at_the_detection(world: GCSWorld) -> None:
    host = world.host()
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    world.put(THEIRS)
    world.advance(10.0)
    assert work.ended == [host.requests()[-1].at]
    assert lost(running).reason is LossReason.TAKEN


def test_a_body_deaf_to_its_ctx_is_told_by_do_and_its_value_is_kept(world: GCSWorld) -> None:
    host = world.host()
    work = Work(world, TTL)
    running = world.start(lambda: host.lock().do(work))
    world.put(THEIRS)
    world.advance(TTL)
    assert work.ended == [work.began[0] + TTL]
    loss = lost(running)
    assert (loss.reason, loss.value, loss.lease) == (LossReason.TAKEN, 42, "reindex")
    assert str(loss) == (
        'lease "reindex" was lost while held (ttl expired or forcibly taken) '
        "— work after the loss point may not have run"
    )


# --- No heartbeat without a live body ----------------------------------------------------------


def ended(world: GCSWorld, host: GCSHost) -> None:
    """The hold has ended with its frame: nobody renews it, and it is free at once."""
    assert not attended(world)
    assert b'"released"' in world.body
    sent = len(host.requests())
    world.advance(2 * TTL)
    assert len(host.requests()) == sent


@pytest.mark.parametrize("kind", [Odd, SystemExit, RuntimeError])
def test_an_asynchronous_exception_in_the_body_ends_the_hold(
    world: GCSWorld, kind: type[BaseException]
) -> None:
    host = world.host()

    def body(ctx: Ctx) -> None:
        while True:
            ctx.wait(1.0)

    running = world.start(lambda: host.lock().do(body))
    world.advance(15.0)
    ident = ctypes.c_ulong(running.thread.ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(kind)) == 1
    world.advance(2.0)
    assert running.done and type(running.error) is kind
    assert not host.told(Lost)
    ended(world, host)


def test_an_abandoned_generator_ends_its_hold(world: GCSWorld) -> None:
    host = world.host()

    def rows() -> Iterator[int]:
        with host.lock().hold() as ctx:
            yield ctx.fence
            yield ctx.fence

    begun: list[Iterator[int]] = []

    def begin() -> None:
        begun.append(rows())
        next(begun[0])

    world.run(begin)
    world.advance(15.0)
    assert attended(world)
    world.run(begun.clear)
    world.advance(0)
    ended(world, host)


@pytest.mark.parametrize("cycle", [False, True], ids=["by its last reference", "in a cycle"])
def test_a_dropped_hold_ends(world: GCSWorld, cycle: bool) -> None:
    host = world.host()
    holds: list[Any] = [host.lock().hold()]
    ctx = world.run(holds[0].__enter__)
    if cycle:
        holds[0].itself = holds[0]
    world.advance(15.0)
    assert attended(world) and not ctx.cancelled
    holds.clear()
    gc.collect()
    world.until(lambda: b'"released"' in world.body)
    world.let_go()
    assert ctx.cancelled and not isinstance(ctx.cause, LeaseLostError)
    ended(world, host)


# --- A process that stands still ----------------------------------------------------------------


@pytest.mark.parametrize("contended", [True, False])
def test_a_process_stopped_before_its_body_begins_finds_its_ctx_cancelled(
    world: GCSWorld, contended: bool
) -> None:
    """Stopped for longer than the ttl after the check of its deadline: the first question tells."""
    a, b = world.host("a"), world.host("b")
    a.fails("write", Stall(), times=None, when=lambda request: len(a.writes()) > 1)

    def stop(event: Event) -> None:
        if isinstance(event, Acquired):
            Ctx.background(world.clock).wait(TTL + WIDTHS + POLL)

    a.runtime.listeners = (stop, a.events.append)
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
    world.advance(TTL + WIDTHS + POLL)
    world.let_go()
    world.advance(1.0)

    assert lost(first).reason in (LossReason.EXPIRED, LossReason.UNREACHABLE)
    assert steps == ["cancelled"]
    if second is not None:
        assert len(next_one.began) == 1 and not next_one.ctx.cancelled
        next_one.end()
        assert second.result() == 42
    else:
        assert b'"released"' in world.body


def test_a_body_that_holds_the_interpreter_lock_past_its_ttl_finds_itself_cancelled(
    gcs_process: GCSProcess,
) -> None:
    """One C call, longer than the ttl, in which no thread runs: the next question to the ctx is
    answered by the clock. The server is another process, and counts what comes to it."""
    try:
        usleep = ctypes.PyDLL(None).usleep  # PyDLL: called with the interpreter lock held
    except (AttributeError, OSError, TypeError):
        pytest.skip("no C library to hold the interpreter lock in")
    policy = LeasePolicy(ttl=1.0, poll=0.1)
    largest: list[int] = []
    asked: list[bool] = []
    name = "starved"
    with kit.client_of(gcs_process.url) as client:
        mine, theirs = (GCSLease(gcs_process.bucket, "gil", client=client) for _ in range(2))
        here = Lock(name).bound_to(Runtime(mine, app="shop", env="test", policy=policy))
        there = Lock(name).bound_to(Runtime(theirs, app="shop", env="test", policy=policy))

        def body(ctx: Ctx) -> None:
            largest.append(ctx.fence)
            usleep(1_300_000)
            asked.append(ctx.cancelled)
            largest.append(there.do(lambda ctx: ctx.fence, timeout=10))

        with pytest.raises(LeaseLostError) as caught:
            here.do(body)
        mine.close()
        theirs.close()
    assert asked == [True]
    assert largest[0] < largest[1], "a receiver of fences refuses ours from then on"
    assert caught.value.reason in (LossReason.EXPIRED, LossReason.UNREACHABLE)


# --- For real ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["stall", "drip"])
def test_in_real_time_a_holder_whose_answers_stop_ends_before_another_begins(
    gcs_process: GCSProcess, loss: str
) -> None:
    """The clocks and sockets are the system's, and a dripping answer ends no socket's timeout."""
    actions: dict[str, Action] = {"stall": Stall(), "drip": Drip(interval=0.05)}
    gcs_process.faults.clear()
    policy = LeasePolicy(ttl=1.0, poll=0.1)
    order: list[str] = []
    with kit.client_of(gcs_process.url) as client:
        folder = f"real/{loss}"
        mine, theirs = (GCSLease(gcs_process.bucket, folder, client=client) for _ in range(2))
        here = Lock("reindex").bound_to(Runtime(mine, app="shop", env="test", policy=policy))
        there = Lock("reindex").bound_to(Runtime(theirs, app="shop", env="test", policy=policy))
        began = threading.Event()

        def body(ctx: Ctx) -> None:
            began.set()
            gcs_process.faults.add(Fault("write", actions[loss], times=None))
            assert ctx.wait(20.0)
            order.append("ended")
            gcs_process.faults.release()

        def next_one() -> None:
            began.wait(20.0)
            there.do(lambda ctx: order.append("began"), timeout=20.0)

        thread = threading.Thread(target=next_one)
        thread.start()
        start = time.monotonic()
        with pytest.raises(LeaseLostError):
            here.do(body)
        assert time.monotonic() - start < 10.0
        thread.join()
        mine.close()
        theirs.close()
    assert order == ["ended", "began"]
