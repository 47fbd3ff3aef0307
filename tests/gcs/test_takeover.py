"""Takeovers, releases and renewals that meet in the bucket: nobody touches another's record."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from gcs import kit
from gcs.actions import Action, Ending, Exchange, Proceed, Stall, Status
from gcs.faults import Fault
from gcs.hosts import (
    ASSURED,
    NAME,
    POLL,
    TTL,
    WIDTHS,
    GCSWorld,
    Work,
    a_world,
    is_held,
    is_release,
    record,
    states,
)
from gcs.server import GCSServer
from tako_sync.backends.gcs import GCSLease
from tako_sync.ctx import Ctx
from tako_sync.errors import BackendUnavailableError, LeaseLostError, LossReason
from tako_sync.events import Acquired, Lost, ReleaseUnconfirmed
from tako_sync.lock import Lock, TryResult
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime
from tako_sync.testing.overlap import OverlapMeter

TAKEOVER = TTL + WIDTHS + POLL


@pytest.fixture
def world() -> Iterator[GCSWorld]:
    with a_world() as world:
        yield world


# --- A release after a takeover -------------------------------------------------------------


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_release_after_a_takeover_leaves_the_successors_record_alone(
    world: GCSWorld, ending: str
) -> None:
    """The slow holder's release expects its own generation, and another's stands by then."""
    error = ValueError("the body's own") if ending == "raises" else None
    a, b = world.host("a"), world.host("b")
    slow, next_one = Work(world, error=error), Work(world)
    first = world.start(lambda: a.lock().do(slow), "a")
    a.fails("*", Status(503), times=None)
    second = world.start(lambda: b.lock().do(next_one), "b")
    world.advance(TAKEOVER)
    assert next_one.began and slow.ctx.cancelled
    theirs = world.stands
    world.server.faults.clear()

    slow.end()
    world.advance(1.0)

    if error is None:
        with pytest.raises(LeaseLostError) as caught:
            first.result()
        assert (caught.value.reason, caught.value.value) == (LossReason.UNREACHABLE, 42)
    else:
        assert first.done and first.error is error
        assert any('"reindex" was lost' in note for note in getattr(error, "__notes__", []))
    assert world.stands == theirs, "byte for byte, and not even rewritten"
    assert is_release(a.writes()[-1]) and a.writes()[-1].status == 412
    assert not next_one.ctx.cancelled and not b.told(Lost)
    next_one.end()
    assert second.result() == 42


def test_a_release_that_arrives_after_the_takeover_leaves_the_successors_record_alone(
    world: GCSWorld,
) -> None:
    """Sent in time, it stands on its way; the caller has its value long before it arrives."""
    a, b = world.host("a"), world.host("b")
    slow, next_one = Work(world), Work(world)
    first = world.start(lambda: a.lock().do(slow), "a")
    a.fails("write", Status(503), times=None, when=is_held)
    a.fails("write", Stall(), times=None, when=is_release)
    second = world.start(lambda: b.lock().do(next_one), "b")
    world.advance(25.0)
    slow.end()
    world.advance(1.0)
    assert first.result() == 42, "it had returned within its deadline"
    world.advance(TAKEOVER - 26.0)
    assert next_one.began
    theirs = world.stands

    world.let_go()
    world.advance(5.0)

    assert world.stands == theirs
    releases = [request for request in a.writes() if is_release(request)]
    assert releases and not any(request.committed for request in releases)
    assert not next_one.ctx.cancelled
    assert not a.told(Lost) and not a.told(ReleaseUnconfirmed), "the look has settled it"
    next_one.end()
    assert second.result() == 42


# --- Two who see the same expired record -----------------------------------------------------


def test_the_slower_of_two_who_see_an_expired_record_goes_back_to_polling(
    world: GCSWorld,
) -> None:
    """Its one write names the generation it saw, gets 412, and the winner is not disturbed."""
    expired = world.put(record())
    world.advance(TTL + WIDTHS)
    b, c = world.host("b"), world.host("c")
    won, waited = Work(world), Work(world)
    c.fails("write", Stall())
    slower = world.start(lambda: c.lock().do(waited), "c")
    faster = world.start(lambda: b.lock().do(won), "b")
    assert won.began and not waited.began
    theirs = world.stands

    world.let_go()
    world.advance(5.0)

    assert world.stands == theirs and not won.ctx.cancelled and not waited.began
    assert c.kinds()[:3] == ["read", "write", "read"] and set(c.kinds()[2:]) == {"read"}
    assert c.writes()[0].generation_match == b.writes()[0].generation_match == expired
    assert [request.status for request in c.writes()] == [412]
    won.end()
    world.advance(POLL)
    assert faster.result() == 42 and len(waited.began) == 1
    waited.end()
    assert slower.result() == 42


def test_a_takeover_is_one_write_that_names_the_generation_and_nothing_else(
    world: GCSWorld,
) -> None:
    """Never a delete and a create; never the metageneration, which begins anew."""
    expired = world.put(record())
    world.advance(TTL + WIDTHS)
    host = world.host()
    assert world.run(lambda: host.lock().try_do(Work(world, 0.0))).ran
    assert states(host.requests()) == ["read", "held", "released"]
    takeover = host.writes()[0]
    conditions = {key: value for key, value in takeover.query.items() if key.startswith("if")}
    assert conditions == {"ifGenerationMatch": str(expired)}


class Steps:
    """Has every request stand at the server, and every body, until it is that one's turn."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._changed = threading.Condition()
        self._standing: list[tuple[str, threading.Event]] = []
        self.ended = 0

    def stand(self, what: str) -> threading.Event:
        turn = threading.Event()
        with self._changed:
            self._standing.append((what, turn))
            self._changed.notify()
        return turn

    def end(self) -> None:
        with self._changed:
            self.ended += 1
            self._changed.notify()

    def take(self, threads: int, but: str = "") -> bool:
        """Give one of those that stand its turn; return whether there was any.

        Where one pauses, as after lost races, the others go on without it.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._standing) + self.ended >= threads, 0.1)
            choices = [standing for standing in self._standing if standing[0] != but]
            if not choices:
                return False
            chosen = self._chance.choice(choices)
            self._standing.remove(chosen)
        chosen[1].set()
        return True


@dataclass(frozen=True)
class InTurn:
    """An action: stand until it is its turn."""

    steps: Steps

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        exchange.hold(self.steps.stand(exchange.request.kind))
        return proceed()


@dataclass
class Late:
    """A wall clock that is moved by hand."""

    ahead: float = 0.0
    began: float = field(default_factory=time.time)

    def __call__(self) -> float:
        return self.began + self.ahead


def one_interleaving(seed: int, meanwhile: str) -> int:
    """Let three call ``try_do`` on one expired record, in a random order; return how many ran."""
    chance = random.Random(seed)
    steps, meter, wall = Steps(chance), OverlapMeter(), Late()

    def body(ctx: Ctx) -> int:
        with meter.running(ctx):
            steps.stand("body").wait(kit.PATIENCE)
            assert not ctx.cancelled
        return ctx.fence

    with GCSServer(wall=wall) as server, kit.client_of(server.url) as client:
        expired = server.put(NAME, record()).generation
        wall.ahead = TTL + WIDTHS
        server.faults.add(Fault("*", InTurn(steps), times=None))
        backends = [GCSLease(server.bucket, client=client) for _ in range(3)]

        def attempt(backend: GCSLease) -> TryResult[int]:
            try:
                runtime = Runtime(backend, app="shop", env="test")
                return Lock("reindex").bound_to(runtime).try_do(body)
            finally:
                steps.end()

        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(attempt, backend) for backend in backends]
            if meanwhile != "nothing":
                for _ in range(chance.randrange(4)):
                    steps.take(3, but="write")
                server.delete(NAME)
                if meanwhile == "deleted and recreated":
                    server.put(NAME, record("new:1:1"))
            until = time.monotonic() + kit.PATIENCE
            while steps.ended < 3:
                steps.take(3)
                assert time.monotonic() < until, server.log
            results = [one.result() for one in running]
        for backend in backends:
            backend.close()
        meter.check()
        assert meter.fences == sorted({r.value for r in results if r.value is not None})
        applied = [request for request in server.requests("write") if request.committed]
        replaced = [request.generation_match for request in applied]
        assert len(set(replaced)) == len(replaced), "two writes took the place of one generation"
        if meanwhile == "nothing":
            assert expired in replaced and 0 not in replaced
        if meanwhile == "deleted and recreated":
            stored = server.object(NAME)
            assert not applied and stored is not None and stored.body == record("new:1:1")
    return sum(result.ran for result in results)


@pytest.mark.parametrize(
    ("meanwhile", "fewest", "most"),
    [("nothing", 1, 3), ("deleted", 1, 3), ("deleted and recreated", 0, 0)],
)
def test_no_interleaving_of_takeovers_gives_two_holders(
    meanwhile: str, fewest: int, most: int
) -> None:
    """Random orders of three campaigners' reads, writes and bodies; the rest of a thousand of
    them is run on a storage in memory."""
    ran = [one_interleaving(seed, meanwhile) for seed in range(25)]
    assert fewest <= min(ran) and max(ran) <= most


# --- A renewal by a former holder --------------------------------------------------------------


def test_a_queued_heartbeat_let_through_after_a_takeover_changes_nothing(
    world: GCSWorld,
) -> None:
    """The former holder was cut off for longer than the ttl; its renewal arrives last of all."""
    a, b = world.host("a"), world.host("b")
    slow, next_one = Work(world), Work(world)
    first = world.start(lambda: a.lock().do(slow), "a")
    a.fails("*", Stall(), times=None)
    second = world.start(lambda: b.lock().do(next_one), "b")
    world.advance(ASSURED)
    assert slow.ctx.cancelled and not next_one.began
    world.advance(TAKEOVER - ASSURED)
    assert next_one.began
    theirs, queued = world.stands, a.writes()[1:]
    assert queued

    world.let_go()
    world.advance(2.0)

    assert world.stands == theirs and not next_one.ctx.cancelled
    assert not any(request.committed for request in queued)
    slow.end()
    world.advance(1.0)
    with pytest.raises(LeaseLostError):
        first.result()
    assert world.stands == theirs and not next_one.ctx.cancelled
    next_one.end()
    assert second.result() == 42


def test_a_renewal_never_creates_an_object_that_an_operator_deleted(world: GCSWorld) -> None:
    """It is lost at the next heartbeat, and nothing is written any more, not even a release."""
    host = world.host()
    work = Work(world)
    running = world.start(lambda: host.lock().do(work))
    world.advance(5.0)
    world.server.delete(NAME)

    world.advance(5.0)

    assert work.ctx.cancelled and isinstance(work.ctx.cause, LeaseLostError)
    assert work.ctx.cause.reason is LossReason.DELETED
    work.end()
    world.advance(TTL)
    with pytest.raises(LeaseLostError):
        running.result()
    assert [request.status for request in host.requests()] == [404, 200, 412, 404]
    assert [request.generation_match for request in host.writes()].count(0) == 1
    assert world.server.object(NAME) is None


def test_a_renewal_that_is_applied_after_the_deadline_does_not_revive_the_hold(
    world: GCSWorld,
) -> None:
    """Nobody took the expired lease over. It is lost all the same, and freed as the body ends."""
    a, b = world.host("a"), world.host("b")
    work = Work(world)
    running = world.start(lambda: a.lock().do(work))
    granted = world.stands
    a.fails("*", Stall(), times=None)
    world.advance(TTL + 1.0)
    assert work.ctx.cancelled

    world.let_go()
    world.advance(1.0)

    assert world.stands != granted and b'"held"' in world.body, "it has been applied"
    assert work.ctx.cancelled
    sent = len(a.writes())
    world.advance(3.0)
    assert len(a.writes()) == sent, "a lost hold is not renewed"
    assert not world.run(lambda: b.lock().try_do(Work(world))).ran, "and respected by others"
    work.end()
    world.advance(1.0)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.UNREACHABLE
    assert b'"released"' in world.body


# --- A release and a heartbeat in flight -------------------------------------------------------


@pytest.mark.parametrize("landing", ["before", "during", "after", "never"])
def test_a_heartbeat_in_flight_at_the_release_costs_neither_result_nor_lease(
    world: GCSWorld, landing: str
) -> None:
    """Stop, join for one request timeout at most, then release the last known generation."""
    a, b = world.host("a"), world.host("b")
    work = Work(world)
    running = world.start(lambda: a.lock().do(work))
    in_flight, releasing = Stall(), Stall()
    a.fails("write", in_flight, when=is_held)
    if landing == "during":
        a.fails("write", releasing, when=is_release)
    world.advance(10.0)
    assert len(a.writes()) == 2 and not work.ctx.cancelled
    heartbeat = a.writes()[1]

    def land() -> None:
        in_flight.release()
        world.until(lambda: heartbeat.outcome != "pending")

    work.end()
    world.advance(1.0)
    assert not running.done and len(a.writes()) == 2, "no release beside a renewal under way"
    if landing == "before":
        land()
        world.until(lambda: running.done)
    else:
        # The join ends one request timeout after the sending, or at that of the request.
        world.advance(4.0)
        if landing == "during":
            assert is_release(a.writes()[-1])
            land()
            releasing.release()
            world.until(lambda: a.writes()[-1].outcome != "pending")
            world.advance(1.0)

    assert running.done, "the caller is kept waiting"
    assert running.result() == 42 and not a.told(Lost)
    world.advance(3.0)
    assert b'"released"' in world.body
    sent, free = len(a.requests()), world.stands
    if landing == "after":
        land()
        assert world.stands == free
    assert world.run(lambda: b.lock().try_do(Work(world, 0.0))) == (True, 42)
    world.advance(2 * TTL)
    assert len(a.requests()) == sent, "nothing leaves the process after that"


def test_cycles_with_renewals_under_way_at_the_release_are_all_successes(
    gcs_server: GCSServer,
) -> None:
    """In real time: bodies end around the first heartbeat, whose answers take their time."""
    chance = random.Random(11)

    def slowly() -> Action:
        return Stall(seconds=chance.uniform(0, 0.05), after=chance.random() < 0.5)

    gcs_server.faults.add(*[Fault("write", slowly(), when=is_held) for _ in range(500)])
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, client=client)
        events: list[object] = []
        runtime = Runtime(
            backend, app="shop", env="test", policy=LeasePolicy(ttl=3.0), listeners=[events.append]
        )

        def freed(name: str, fence: int) -> bool:
            last = [r for r in gcs_server.requests("write", name) if r.committed][-1]
            return is_release(last) and last.document["fence"] == fence

        def cycles(number: int) -> int:
            lock, name = Lock(f"name-{number}").bound_to(runtime), f"*name-{number}"
            for _ in range(2):
                fence = lock.do(
                    lambda ctx: ctx.wait(chance.uniform(0.93, 1.06)) or ctx.fence, timeout=20
                )
                # It may be refused first, where a renewal was applied after it was given up; and
                # on a busy machine it takes longer than its caller waits for it.
                gcs_server.wait(lambda: freed(name, fence))  # noqa: B023
            return 2

        with ThreadPoolExecutor(20) as pool:
            assert list(pool.map(cycles, range(20))) == 20 * [2]
        backend.close()
    assert not [event for event in events if isinstance(event, (Lost, ReleaseUnconfirmed))]
    held = gcs_server.count("write", when=is_held)
    assert held > 50, "the trial has hardly any heartbeat in it"


# --- Granted too late -------------------------------------------------------------------------


@pytest.mark.parametrize("contended", [True, False])
def test_an_own_record_found_after_its_deadline_is_no_grant(
    world: GCSWorld, contended: bool
) -> None:
    """Applied at once, then nothing is answered for longer than the ttl."""
    a, b = world.host("a"), world.host("b")
    late, other = Work(world), Work(world)
    a.fails("*", Stall(after=True), times=None, when=lambda request: request.kind == "write")
    a.fails("read", Status(503), times=None, when=lambda request: len(a.writes()) > 0)
    start = world.now
    first = world.start(lambda: a.lock().do(late), "a")
    second = world.start(lambda: b.lock().do(other), "b") if contended else None
    world.advance(TTL + WIDTHS + POLL)
    assert not late.began, "the body was started on a dead grant"

    world.let_go()
    world.advance(3.0)  # the longest pause between two attempts on a storage that fails

    if second is not None:
        assert len(other.began) == 1 and other.began[0] - start >= TTL
        assert not late.began and not other.ctx.cancelled
        other.end()
        world.advance(POLL)
        assert second.result() == 42
    else:
        world.advance(3.0)
    assert len(late.began) == 1 and late.ctx.remaining() > ASSURED - 6.0
    late.end()
    assert first.result() == 42


def test_try_do_whose_grant_is_never_answered_is_unresolved_and_runs_nothing(
    world: GCSWorld,
) -> None:
    host = world.host()
    host.fails("write", Stall(after=True), times=None)
    work = Work(world)
    running = world.start(lambda: host.lock().try_do(work))
    host.fails("read", Stall(), times=None)
    world.advance(TTL)
    with pytest.raises(BackendUnavailableError):
        running.result()
    assert not work.began and not host.told(Acquired)


def test_the_validity_of_a_grant_counts_from_before_its_request(world: GCSWorld) -> None:
    """What is left when the answer comes is what was sent for, less the time that it took."""
    host = world.host()
    host.fails("write", Stall(after=True))
    work = Work(world)
    start = world.now
    running = world.start(lambda: host.lock().do(work))
    world.advance(4.0)
    assert not work.began

    world.let_go()

    assert work.began == [start + 4.0]
    assert host.writes()[0].at == start
    assert work.ctx.remaining() == pytest.approx(ASSURED - 4.0)
    work.end()
    assert running.result() == 42
