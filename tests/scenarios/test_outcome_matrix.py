"""How a hold can end: what the body did, how the release went, whether the lease was lost.

Each cell has one answer; docs/reference/outcomes.md has the same table for people.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import frozen

from kit import Host, World
from tako_sync.abc import ABSENT, Snapshot
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    LeaseLostError,
    LossReason,
    VersionConflictError,
)
from tako_sync.events import Event, Lost, Released, ReleaseUnconfirmed
from tako_sync.testing.faults import Call, Fault, Proceed, applied_then, fail, hang, intercept

KEY = "run-shop-test-reindex"
TTL = 30.0
ASSURED = 27.0
MOMENT = TTL / 30
"""Seconds that a release may take in its caller's time."""
LOST_AFTER = 28.0
HELD_FOR = 5.0


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(2 * TTL)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503 service unavailable")


def denied() -> BackendDeniedError:
    return BackendDeniedError("403 forbidden")


def release(call: Call) -> bool:
    return call.document.get("state") == "released"


def renewal(call: Call) -> bool:
    return call.document.get("state") == "held"


@frozen
class Way:
    """One way in which a release may go.

    Attributes:
        fault: what meets it.
        kept: seconds that the caller is kept waiting, at most.
        confirmed: whether the storage says in the end that the lease is free.
    """

    fault: Callable[[], Fault] | None
    kept: float
    confirmed: bool


RELEASES = {
    "ok": Way(None, 0.0, True),
    "unavailable": Way(lambda: fail(unavailable), MOMENT, False),
    "denied": Way(lambda: fail(denied), 0.0, False),
    "hangs": Way(hang, MOMENT, False),
}
BODIES: dict[str, type[BaseException] | None] = {
    "returns": None,
    "raises ValueError": ValueError,
    "raises KeyboardInterrupt": KeyboardInterrupt,
}


class Outcome:
    """What came of one call, and when."""

    def __init__(self) -> None:
        self.ended = 0.0
        self.answered = 0.0
        self.value: Any = None
        self.error: BaseException | None = None


def end_a_hold(
    world: World, host: Host, call: Callable[[Any], Any], raised: BaseException | None, lost: bool
) -> Outcome:
    """Run a body that ends as told, while held or after a loss; return what its caller got."""
    outcome = Outcome()

    def body(ctx: Ctx) -> int:
        with world.meter.running(ctx):
            Ctx.background(world.clock).wait(LOST_AFTER if lost else HELD_FOR)
            assert ctx.cancelled is lost
            outcome.ended = world.clock.monotonic()
        if raised is not None:
            raise raised
        return 42

    def run() -> None:
        try:
            outcome.value = call(body)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            outcome.error = error
        outcome.answered = world.clock.monotonic()

    running = world.start(run)
    if lost:  # from here on: the acquisition is behind us
        host.storage.always("write", fail(unavailable), when=renewal)
    world.advance(LOST_AFTER if lost else HELD_FOR)
    world.advance(MOMENT)
    assert running.done, "the caller is kept waiting for longer than a moment"
    return outcome


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        line.getMessage()
        for line in caplog.records
        if line.levelno >= logging.WARNING and "fails while renewing" not in line.getMessage()
    ]


def via_do(host: Host) -> Callable[[Any], Any]:
    return host.lock().do


def via_try_do(host: Host) -> Callable[[Any], Any]:
    def call(body: Callable[[Ctx], Any]) -> Any:
        result = host.lock().try_do(body)
        assert result.ran
        return result.value

    return call


def via_hold(host: Host) -> Callable[[Any], Any]:
    def call(body: Callable[[Ctx], Any]) -> Any:
        with host.lock().hold() as ctx:
            return body(ctx)

    return call


DOORS = {"do": via_do, "try_do": via_try_do, "hold": via_hold}


@pytest.mark.parametrize("lost", [False, True], ids=["held", "lost"])
@pytest.mark.parametrize("releasing", RELEASES)
@pytest.mark.parametrize("ending", BODIES)
@pytest.mark.parametrize("door", DOORS)
def test_each_ending_has_its_one_answer(
    world: World,
    door: str,
    ending: str,
    releasing: str,
    lost: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The body's own exception first, then the loss, then its value; never the release's error."""
    caplog.set_level(logging.DEBUG, "tako_sync")
    host = world.host(prompt=False)
    way, kind = RELEASES[releasing], BODIES[ending]
    if way.fault is not None:
        host.storage.always("write", way.fault(), when=release)
    raised = kind("the body's own") if kind is not None else None

    # --- What the caller gets
    outcome = end_a_hold(world, host, DOORS[door](host), raised, lost)

    if raised is not None:
        assert outcome.error is raised
        notes = getattr(raised, "__notes__", [])
        assert len(notes) == (1 if lost else 0)
        if lost:
            assert notes[0].startswith('lease "reindex" was lost while held')
            assert "reason: unreachable" in notes[0] and "fence: " in notes[0]
        assert raised.__cause__ is None and raised.__context__ is None
    elif lost:
        assert isinstance(outcome.error, LeaseLostError)
        # A block has no value of its own.
        assert outcome.error.value == (None if door == "hold" else 42)
        assert outcome.error.reason is LossReason.UNREACHABLE
        assert isinstance(outcome.error.__cause__, BackendUnavailableError)
    else:
        assert outcome.error is None and outcome.value == 42

    # --- When
    assert outcome.answered - outcome.ended <= way.kept + 1e-6

    # --- What is left, and said
    world.advance(TTL + MOMENT + 1.0)
    assert [event.reason for event in host.told(Lost)] == lost * [LossReason.UNREACHABLE]
    assert len(host.told(Released)) == int(way.confirmed)
    assert len(host.told(ReleaseUnconfirmed)) == int(not way.confirmed)
    said = [text for text in warnings(caplog) if "was lost while held" not in text]
    assert len(said) == int(not way.confirmed)
    assert all("could not be confirmed" in text for text in said)
    body = world.store.read(KEY, timeout=1.0).body
    assert (b'"released"' in body) is way.confirmed
    sent = len(host.storage.calls)
    world.advance(2 * TTL)
    assert len(host.storage.calls) == sent, "it is not tried for ever"


@pytest.mark.parametrize("lost", [False, True], ids=["held", "lost"])
@pytest.mark.parametrize("releasing", ["unavailable", "hangs"])
def test_a_release_that_succeeds_later_is_confirmed_without_a_warning(
    world: World, releasing: str, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller had its answer long ago; the lease's own thread went on."""
    host = world.host(prompt=False)
    fault = RELEASES[releasing].fault
    assert fault is not None
    host.storage.always("write", fault(), when=release)
    outcome = end_a_hold(world, host, via_do(host), None, lost)
    assert outcome.value == (None if lost else 42)

    world.advance(10.0)
    host.storage.release_all()
    world.advance(5.0)

    assert b'"released"' in world.store.read(KEY, timeout=1.0).body
    assert len(host.told(Released)) == 1 and not host.told(ReleaseUnconfirmed)
    assert not [text for text in warnings(caplog) if "was lost while held" not in text]


def test_a_release_refused_for_its_rate_does_not_keep_the_caller(world: World) -> None:
    """429 with a second to wait is longer than the moment: the thread takes over at once."""
    host = world.host(prompt=False)
    host.storage.script(
        "write", fail(lambda: BackendUnavailableError("429", retry_after=1.0)), when=release
    )
    outcome = end_a_hold(world, host, via_do(host), None, lost=False)
    assert outcome.value == 42 and outcome.answered == outcome.ended
    world.advance(2.0)
    assert b'"released"' in world.store.read(KEY, timeout=1.0).body
    first, second = [call.at for call in host.storage.calls if release(call)]
    assert 1.0 <= second - first <= 1.5


LOOKS: dict[str, tuple[Callable[[], BaseException], int]] = {
    "denied": (denied, 1),
    "unavailable": (unavailable, 1),
    "a fault of the backend": (lambda: ValueError("no JSON"), 1),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("ending", BODIES)
def test_a_look_that_fails_after_a_refused_release_is_the_releases_affair(
    world: World, ending: str, look: str
) -> None:
    """It proves nothing about the body: its value or its own exception comes back all the same."""
    host = world.host(prompt=False)
    host.storage.always("write", fail(lambda: VersionConflictError("412")), when=release)
    kind = BODIES[ending]
    raised = kind("the body's own") if kind is not None else None
    error, warned = LOOKS[look]

    def listens(body: Callable[[Ctx], int]) -> int:
        def then_no_read(ctx: Ctx) -> int:
            host.storage.always("read", fail(error))
            return body(ctx)

        return host.lock().do(then_no_read)

    outcome = end_a_hold(world, host, listens, raised, lost=False)

    assert outcome.error is raised and outcome.value == (42 if raised is None else None)
    world.advance(TTL + MOMENT + 1.0)
    assert len(host.told(ReleaseUnconfirmed)) == warned
    assert isinstance(host.told(ReleaseUnconfirmed)[0].error, type(error()))


def test_a_renewal_under_way_keeps_the_caller_for_one_request_timeout_at_most(
    world: World,
) -> None:
    """The worst there is: it hangs, and then the release hangs too."""
    host = world.host(prompt=False)
    outcome = Outcome()

    def body(ctx: Ctx) -> int:
        Ctx.background(world.clock).wait(TTL / 3)
        outcome.ended = world.clock.monotonic()
        return 42

    def run() -> None:
        outcome.value = host.lock().do(body)
        outcome.answered = world.clock.monotonic()

    running = world.start(run)
    host.storage.always("*", hang())
    world.advance(TTL / 3 + TTL / 6 + MOMENT)
    assert running.done and outcome.value == 42
    assert outcome.answered - outcome.ended <= TTL / 6 + MOMENT + 1e-6


@pytest.mark.parametrize("ending", BODIES)
def test_after_another_holder_has_come_nothing_is_released(world: World, ending: str) -> None:
    """The contrast to a loss by deadline: the record is another's by now, and is left alone."""
    host = world.host(prompt=False)
    kind = BODIES[ending]
    raised = kind("the body's own") if kind is not None else None
    outcome = Outcome()

    def body(ctx: Ctx) -> int:
        ctx.wait(600.0)
        if raised is not None:
            raise raised
        return 42

    def run() -> None:
        try:
            host.lock().do(body)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            outcome.error = error

    world.start(run)
    found = world.store.read(KEY, timeout=1.0)
    theirs = found.body.replace(b'"owner": "', b'"owner": "another-').replace(
        b'"write": "', b'"write": "another-'
    )
    world.store.write(KEY, theirs, expect=found.version, timeout=1.0)
    world.advance(TTL)
    if raised is None:
        assert isinstance(outcome.error, LeaseLostError)
        assert outcome.error.reason is LossReason.TAKEN
    else:
        assert outcome.error is raised
        assert "reason: taken" in getattr(raised, "__notes__", [""])[0]
    assert world.store.read(KEY, timeout=1.0).body == theirs
    assert host.requests() == ["read", "write", "write", "read"]


def test_a_body_that_raises_the_loss_itself_gets_it_without_a_note_on_itself(world: World) -> None:
    """``ctx.check()`` in the body: one exception, once, with no value and the cause chained."""
    host = world.host(prompt=False)
    outcome = Outcome()

    def run() -> None:
        def body(ctx: Ctx) -> None:
            ctx.wait(600.0)
            ctx.check()

        try:
            host.lock().do(body)
        except LeaseLostError as error:
            outcome.error = error

    world.start(run)
    host.storage.always("write", fail(unavailable), when=renewal)
    world.advance(TTL)
    assert isinstance(outcome.error, LeaseLostError)
    assert outcome.error.value is None and not getattr(outcome.error, "__notes__", [])
    assert isinstance(outcome.error.__cause__, BackendUnavailableError)


def test_a_success_is_not_taken_back_by_what_is_found_later(world: World) -> None:
    """The verdict falls as the body returns, in its deadline; then the release meets another's."""
    host = world.host(prompt=False)

    def body(ctx: Ctx) -> int:
        found = world.store.read(KEY, timeout=1.0)
        other = found.body.replace(b'"write": "', b'"write": "another-').replace(
            b'"owner": "', b'"owner": "another-'
        )
        world.store.write(KEY, other, expect=found.version, timeout=1.0)
        return 42

    running = world.start(lambda: host.lock().do(body))
    assert running.result() == 42
    assert not host.told(Lost) and not host.told(ReleaseUnconfirmed)
    assert b"another-" in world.store.read(KEY, timeout=1.0).body


def test_a_body_that_returns_while_its_release_waits_is_judged_by_its_return(world: World) -> None:
    """It returned a second before its deadline; the renewal under way is waited for beyond that."""
    host = world.host(prompt=False)
    work_for = ASSURED - 1.0

    def body(ctx: Ctx) -> int:
        Ctx.background(world.clock).wait(work_for)
        assert not ctx.cancelled
        return 42

    running = world.start(lambda: host.lock().do(body))
    host.storage.always("*", hang())
    world.advance(work_for + TTL / 6 + MOMENT)
    assert running.result() == 42
    assert not host.told(Lost)


def test_an_event_listener_that_fails_changes_no_outcome(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def listener(event: Event) -> None:
        raise ValueError(f"at {type(event).__name__}")

    host = world.host(prompt=False)
    host.runtime.listeners = (listener,)
    outcome = end_a_hold(world, host, via_do(host), None, lost=False)
    assert outcome.value == 42
    assert "listener" in caplog.text


def test_a_lost_answer_to_the_release_is_no_trouble(world: World) -> None:
    """Applied, 503, and its look shows it: confirmed, within the moment."""
    host = world.host(prompt=False)
    host.storage.script("write", applied_then(unavailable), when=release)
    outcome = end_a_hold(world, host, via_do(host), None, lost=False)
    assert outcome.value == 42 and outcome.answered - outcome.ended <= 0.2
    assert len(host.told(Released)) == 1


def test_a_record_that_is_gone_at_the_release_is_no_trouble(world: World) -> None:
    """412, then 404: it was released, or removed, by whomever; nothing is left to do."""
    host = world.host(prompt=False)
    host.storage.always("write", fail(lambda: VersionConflictError("412")), when=release)

    def nothing(call: Call, proceed: Proceed) -> Any:
        found = proceed()
        return found if call.number == 1 else Snapshot(b"", ABSENT)

    host.storage.always("read", intercept(nothing))
    outcome = end_a_hold(world, host, via_do(host), None, lost=False)
    assert outcome.value == 42 and outcome.answered == outcome.ended
    assert not host.told(ReleaseUnconfirmed)
