"""Our write is in the bucket, its answer is not here: what is ours is found, at once, over HTTP."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gcs.actions import Action, Both, Cut, Drip, Drop, Pass, Reset, Stall, Status, Substitute
from gcs.faults import Fault
from gcs.hosts import (
    ASSURED,
    NAME,
    POLL,
    TTL,
    WIDTHS,
    GCSHost,
    GCSWorld,
    Meanwhile,
    Work,
    a_world,
    is_release,
    record,
    states,
)
from kit import Running
from tako_sync.errors import (
    BackendUnavailableError,
    CampaignTimeoutError,
    LeaseLostError,
    LossReason,
)
from tako_sync.events import Acquired, Busy, Lost, Released, ReleaseUnconfirmed
from tako_sync.lock import TryResult

HTML = "<html><body>The service is temporarily unavailable.</body></html>"
LOST: dict[str, tuple[Callable[[], Action], float]] = {
    "503": (lambda: Status(503, after=True), 0.2),
    "504 of a proxy": (lambda: Substitute(HTML, 504, "text/html"), 0.2),
    "200 of a proxy": (lambda: Substitute(HTML, content_type="text/html"), 0.2),
    "reset": (lambda: Reset(after=True), 0.2),
    "closed": (Drop, 0.2),
    "cut": (lambda: Cut(100), 0.2),
    "no answer": (lambda: Stall(after=True), 5.2),
    "dripping": (lambda: Drip(interval=60), 5.2),
}
"""How an answer is lost, and within how many seconds the doubt is settled then."""
QUICK = [loss for loss, (_, within) in LOST.items() if within < 1]
NEW_FENCE = 99 * 10**15


@pytest.fixture
def world() -> Iterator[GCSWorld]:
    with a_world() as world:
        yield world


def call_by(way: str, host: GCSHost, work: Work, name: str = "reindex") -> Callable[[], Any]:
    lock = host.lock(name)
    return (lambda: lock.try_do(work)) if way == "try_do" else (lambda: lock.do(work))


def value_of(running: Running[Any]) -> int:
    result: object = running.result()
    if isinstance(result, TryResult):
        assert result.ran, "its own record was reported as busy"
        result = result.value
    assert isinstance(result, int)
    return result


def leave_an_expired_record(world: GCSWorld) -> int:
    generation = world.put(record())
    world.advance(TTL + WIDTHS)
    return generation


# --- The acquiring write -----------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOST)
@pytest.mark.parametrize("before", ["nothing", "expired"])
@pytest.mark.parametrize("way", ["try_do", "do"])
def test_an_acquisition_whose_answer_is_lost_runs_the_body_once_and_at_once(
    world: GCSWorld, way: str, before: str, loss: str
) -> None:
    """The retry gets 412; the look finds our own write, and adopts it with its own deadline."""
    expected = leave_an_expired_record(world) if before == "expired" else 0
    action, within = LOST[loss]
    host = world.host()
    host.fails("write", action())
    work = Work(world, 1.0)
    start = world.now

    running = world.start(call_by(way, host, work))
    world.advance(within)

    assert len(work.began) == 1 and work.began[0] - start <= within
    look, first, retry, found = host.requests()
    assert (look.kind, first.kind, retry.kind, found.kind) == ("read", "write", "write", "read")
    assert first.generation_match == retry.generation_match == expected
    assert first.committed and retry.status == 412
    assert first.document["write"] != retry.document["write"]
    assert world.body == first.body
    assert work.ctx.fence == first.document["fence"]
    assert work.ctx.remaining() == pytest.approx(first.at + ASSURED - world.now)

    world.advance(1.0)
    assert value_of(running) == 42 and len(work.began) == 1
    assert states(host.requests()[4:]) == ["released"]
    assert len(host.told(Acquired)) == len(host.told(Released)) == 1
    assert not host.told(Busy) and not host.told(Lost)


@pytest.mark.parametrize("landing", ["before the retry", "after the retry", "after the release"])
@pytest.mark.parametrize("before", ["nothing", "expired"])
def test_an_acquisition_that_is_applied_late_runs_the_body_once(
    world: GCSWorld, before: str, landing: str
) -> None:
    """Whichever of the two writes is applied, the other does no harm when its turn comes."""
    if before == "expired":
        leave_an_expired_record(world)
    host = world.host()
    stall = Stall()
    host.fails("write", Both(Drop(), stall))
    work = Work(world, 4.0)
    running = world.start(lambda: host.lock().do(work))
    first = host.requests()[1]

    def land() -> None:
        stall.release()
        world.until(lambda: first.outcome == "dropped")

    world.advance(5.001)
    assert len(host.requests()) == 2, "it has given up the first, and sent no other yet"
    if landing == "before the retry":
        land()
    world.advance(1.0)
    if landing == "after the retry":
        land()

    assert len(work.began) == 1
    retry = host.requests()[2]
    adopted = first if landing == "before the retry" else retry
    assert adopted.committed and world.body == adopted.body
    assert work.ctx.remaining() == pytest.approx(adopted.at + ASSURED - world.now)
    world.advance(5.0)
    assert running.result() == 42
    free = world.stands
    assert b'"released"' in free[0]
    land()
    assert world.stands == free, "what comes so late is refused"
    assert len(work.began) == 1 and not host.told(Lost)


def test_try_do_that_cannot_settle_its_doubt_raises_and_never_says_busy(world: GCSWorld) -> None:
    """The write is applied, then nothing answers: neither ran nor busy is known to be true."""
    host = world.host()
    host.fails("write", Status(503, after=True))
    host.fails("*", Status(503), times=None, when=lambda request: request.number > 2)
    work = Work(world)
    start = world.now

    running = world.start(lambda: host.lock().try_do(work))
    world.advance(12.0)

    with pytest.raises(BackendUnavailableError):
        running.result()
    assert not work.began and not host.told(Busy) and not host.told(Acquired)
    sent = host.requests()
    assert sent[-1].at - start <= 10.0
    assert b'"held"' in world.body
    world.advance(15.0)
    assert host.requests() == sent, "nothing keeps the abandoned record alive"


def test_what_an_abandoned_campaign_leaves_behind_ages_out_by_itself(world: GCSWorld) -> None:
    """It is applied after its caller has gone, and nobody is told: a ttl later it is free."""
    gone, other = world.host("gone"), world.host("other")
    stall = Stall()
    gone.fails("write", Both(Drop(), stall))
    left, work = Work(world), Work(world, 0.0)
    abandoned = world.start(lambda: gone.lock().do(left, timeout=2))
    world.advance(3.0)
    with pytest.raises(CampaignTimeoutError):
        abandoned.result()
    stall.release()
    world.until(lambda: gone.requests()[1].committed)
    landed = world.now

    running = world.start(lambda: other.lock().do(work))
    world.advance(TTL + WIDTHS + POLL)

    assert running.result() == 42 and not left.began
    assert TTL <= work.began[0] - landed <= TTL + WIDTHS + POLL
    assert gone.kinds() == ["read", "write"]


def test_a_grant_whose_caller_has_gone_is_given_back_when_its_answer_comes(
    world: GCSWorld,
) -> None:
    """The answer reaches the request's own thread, which frees the lease for the others."""
    gone, other = world.host("gone"), world.host("other")
    gone.fails("write", Stall())
    left = Work(world)
    abandoned = world.start(lambda: gone.lock().do(left, timeout=4))
    world.advance(4.5)
    with pytest.raises(CampaignTimeoutError):
        abandoned.result()

    world.let_go()
    world.until(lambda: len(gone.requests()) == 3)

    assert not left.began and states(gone.requests()) == ["read", "held", "released"]
    world.until(lambda: b'"released"' in world.body)
    assert world.run(lambda: other.lock().try_do(Work(world, 0.0))) == (True, 42)


def test_a_grant_adopted_by_the_retry_is_not_given_back_by_its_own_late_answer(
    world: GCSWorld,
) -> None:
    """The first answer comes while the body runs, held by the very record that it wrote."""
    host = world.host()
    host.fails("write", Stall(after=True))
    work = Work(world, 8.0)
    running = world.start(lambda: host.lock().do(work))
    world.advance(6.0)
    assert len(work.began) == 1
    before = world.stands

    world.let_go()
    world.advance(1.0)

    assert world.stands == before and b'"held"' in before[0]
    world.advance(8.0)
    assert running.result() == 42 and not host.told(Lost)


# --- The heartbeat -----------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOST)
def test_heartbeats_that_are_applied_without_an_answer_do_not_lose_the_lease(
    world: GCSWorld, loss: str
) -> None:
    """Six in a row, over two ttl: each is found by its own name, and prolongs from its sending."""
    host = world.host()
    work = Work(world, 2 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    action, within = LOST[loss]
    # The retry of each passes: it is refused, as what it expects has been replaced.
    host.fails("write", *[step for _ in range(6) for step in (action(), Pass())])

    world.advance(10.0 + within + 1.5)

    assert not work.ctx.cancelled
    first, retry, look = host.requests()[2:5]
    assert first.committed and (retry.status, look.kind) == (412, "read")
    assert work.ctx.remaining() == pytest.approx(first.at + ASSURED - world.now)
    world.advance(55.0)
    assert running.result() == 42
    beats = 6 * ["write", "write", "read"]
    assert host.kinds() == ["read", "write", *beats, "write"]
    assert not host.told(Lost)
    assert len({request.document["write"] for request in host.writes()}) == 14


@pytest.mark.parametrize("landing", ["before the retry", "after the retry"])
def test_a_heartbeat_that_is_applied_late_does_not_lose_the_lease(
    world: GCSWorld, landing: str
) -> None:
    """Before its retry it is adopted; after it, the bucket refuses it."""
    host = world.host()
    work = Work(world, TTL)
    running = world.start(lambda: host.lock().do(work))
    stall = Stall()
    host.fails("write", Both(Drop(), stall))
    world.advance(10.0)
    late = host.writes()[-1]
    world.advance(late.at + 5.001 - world.now)
    assert not late.committed and len(host.requests()) == 3

    def land() -> None:
        stall.release()
        world.until(lambda: late.outcome == "dropped")

    if landing == "before the retry":
        land()
    world.advance(2.0)
    if landing == "after the retry":
        land()
    assert late.committed is (landing == "before the retry")
    world.advance(TTL)
    assert running.result() == 42 and not host.told(Lost)
    assert b'"released"' in world.body


@pytest.mark.parametrize("loss", QUICK)
def test_another_holders_record_after_a_lost_answer_is_a_loss(world: GCSWorld, loss: str) -> None:
    """The contrast: between the lost answer and the retry somebody else's record has come."""
    host = world.host()
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    theirs = record(fence=NEW_FENCE)
    host.fails("write", LOST[loss][0](), Meanwhile(lambda: world.put(theirs)))

    world.advance(12.0)

    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert (caught.value.reason, caught.value.value) == (LossReason.TAKEN, 42)
    assert [event.reason for event in host.told(Lost)] == [LossReason.TAKEN]
    assert host.kinds() == ["read", "write", "write", "write", "read"]
    world.advance(TTL)
    assert len(host.requests()) == 5, "a lost lease is neither renewed nor released"
    assert world.body == theirs


def test_an_own_owner_in_a_record_that_we_did_not_write_prolongs_nothing(world: GCSWorld) -> None:
    """Names of writes are compared, never owners."""
    host = world.host()
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    theirs = world.body.replace(host.writes()[0].document["write"].encode(), b"someone's")
    host.fails("write", Meanwhile(lambda: world.put(theirs)))

    world.advance(12.0)

    with pytest.raises(LeaseLostError):
        running.result()
    assert [event.reason for event in host.told(Lost)] == [LossReason.BROKEN]
    assert world.body == theirs


# --- The release -------------------------------------------------------------------------------


NEWER = record("elsewhere:7:next", fence=NEW_FENCE)
RELEASES: dict[str, tuple[Callable[[GCSWorld], list[Action]], float]] = {
    "503, then 412": (lambda world: [Status(503, after=True)], 0.2),
    "reset, then 412": (lambda world: [Reset(after=True)], 0.2),
    "503, then 404": (
        lambda world: [
            Status(503, after=True),
            Meanwhile(lambda: world.server.delete(NAME)),
        ],
        0.2,
    ),
    "503, then 412 and a newer record": (
        lambda world: [Status(503, after=True), Meanwhile(lambda: world.put(NEWER))],
        0.2,
    ),
    "503 and not applied": (lambda world: [Status(503)], 0.2),
    "reset and not applied": (lambda world: [Reset()], 0.2),
    "no answer": (lambda world: [Stall(after=True)], 1.0),
    "412, then 404": (lambda world: [Meanwhile(lambda: world.server.delete(NAME))], 0.0),
}


@pytest.mark.parametrize("answers", RELEASES)
@pytest.mark.parametrize("way", ["try_do", "do"])
def test_a_release_whose_answer_is_lost_is_no_failure(
    world: GCSWorld, way: str, answers: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The body's value comes back, soon, with no error and no warning."""
    caplog.set_level(logging.DEBUG, "tako_sync")
    host = world.host()
    work = Work(world, 1.0)
    running = world.start(call_by(way, host, work))
    actions, within = RELEASES[answers]
    host.fails("write", *actions(world), when=is_release)

    world.advance(1.0 + within)

    assert running.done, "the caller is kept waiting"
    assert value_of(running) == 42 and len(work.began) == 1
    world.let_go()
    world.advance(2 * TTL)
    assert not host.told(ReleaseUnconfirmed) and not host.told(Lost)
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]
    if "newer record" in answers:
        assert world.body == NEWER
    elif "404" in answers:
        assert world.server.object(NAME) is None, "a release creates nothing"
    else:
        assert b'"released"' in world.body and len(host.told(Released)) == 1


def test_a_release_that_is_applied_after_its_own_retry_changes_nothing(world: GCSWorld) -> None:
    host, other = world.host("a"), world.host("b")
    work = Work(world, 1.0)
    running = world.start(lambda: host.lock().do(work))
    host.fails("write", Stall(), when=is_release)
    world.advance(2.0)
    assert running.result() == 42, "after a moment the caller has its value"
    world.advance(5.0)
    assert b'"released"' in world.body, "a retry has freed it meanwhile"
    held = Work(world)
    holding = world.start(lambda: other.lock().do(held))
    theirs = world.stands

    world.let_go()

    assert world.stands == theirs and not held.ctx.cancelled
    held.end()
    assert holding.result() == 42


def test_a_release_settled_by_a_look_leaves_a_warm_lease(world: GCSWorld) -> None:
    """The look shows the generation of our own release: the next acquisition is one request."""
    host = world.host()
    running = world.start(lambda: host.lock().do(Work(world, 1.0)))
    host.fails("write", Status(503, after=True), when=is_release)
    world.advance(1.2)
    assert running.result() == 42
    before = len(host.requests())

    again = world.start(lambda: host.lock().do(Work(world, 1.0)))

    assert states(host.requests(before)) == ["held"]
    world.advance(1.0)
    assert again.result() == 42


# --- Refused, and then nobody is there -----------------------------------------------------------


@pytest.mark.parametrize("way", ["try_do", "do"])
def test_a_record_that_vanishes_after_our_create_was_refused_is_free_now(
    world: GCSWorld, way: str
) -> None:
    """412 at the create, 404 at the read: again, at once; no time passes, nothing is raised."""
    host = world.host()

    def theirs_for_a_moment() -> None:
        world.put(record())

    host.fails("write", Meanwhile(theirs_for_a_moment))
    host.fails("read", Status(404, message="No such object: {object}"), when=lambda r: r.number > 1)
    host.fails("write", Meanwhile(lambda: world.server.delete(NAME)), when=lambda r: r.number > 2)
    work = Work(world, 1.0)
    start = world.now

    running = world.start(call_by(way, host, work))

    assert work.began == [start]
    assert [request.status for request in host.requests()] == [404, 412, 404, 200]
    world.advance(1.0)
    assert value_of(running) == 42


def test_do_waits_out_a_bucket_that_refuses_creates_and_shows_nobody(world: GCSWorld) -> None:
    """For 20 s: no exception leaves ``do``, the bucket is not hammered, then the body runs."""
    host = world.host()
    host.fails("write", Status(412), times=None)
    work = Work(world, 1.0)
    running = world.start(lambda: host.lock().do(work))
    world.advance(20.0)
    assert not running.done and not work.began
    assert len(host.requests()) <= 8 * 20

    world.server.faults.clear()
    world.advance(5.0)
    assert running.result() == 42 and len(work.began) == 1


def test_try_do_on_a_bucket_that_refuses_creates_and_shows_nobody_is_unresolved(
    world: GCSWorld,
) -> None:
    """Not busy, since nobody is there; not a crash either: the documented error, and soon."""
    host = world.host()
    host.fails("write", Status(412), times=None)
    work = Work(world)
    running = world.start(lambda: host.lock().try_do(work))
    world.advance(6.0)
    assert running.done
    with pytest.raises(BackendUnavailableError):
        running.result()
    assert not work.began and not host.told(Busy)


def test_twenty_threads_on_a_bucket_whose_reads_lie_all_get_their_turns(world: GCSWorld) -> None:
    """A third of the reads see nobody: refused creates by the dozen, and no exception at all."""
    hosts = [world.host(name) for name in "abcd"]
    chance = random.Random(4)
    world.server.faults.add(
        Fault("read", Status(404), times=None, when=lambda request: chance.random() < 0.3)
    )
    work = Work(world, 0.01)

    def several(host: GCSHost) -> int:
        return sum(host.lock().do(work) == 42 for _ in range(10))

    threads = [world.start(lambda h=hosts[n % 4]: several(h), f"worker {n}") for n in range(20)]  # type: ignore[misc]
    for _ in range(60):
        if all(thread.done for thread in threads):
            break
        world.advance(5.0)

    assert [thread.result() for thread in threads] == 20 * [10]
    assert len(work.began) == 200
    assert world.server.count("write", when=lambda request: request.status == 412)
    assert not any(host.told(Lost) for host in hosts)
