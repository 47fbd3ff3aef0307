"""Clocks that disagree, step or are missing, over HTTP: nobody enters early or waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import datetime
from email.utils import formatdate
from typing import Any

import pytest

from gcs import kit
from gcs.actions import Ending, Exchange, Proceed, Reply, Reset, Status
from gcs.answers import Answer
from gcs.faults import Fault
from gcs.hosts import (
    ASSURED,
    KEY,
    MARGIN,
    NAME,
    POLL,
    TTL,
    WIDTHS,
    GCSHost,
    GCSWorld,
    Work,
    a_world,
    record,
)
from gcs.server import GCSServer
from kit import Running
from tako_sync.abc import Interval
from tako_sync.backends.gcs import GCSLease
from tako_sync.ctx import Ctx
from tako_sync.errors import LeaseLostError, LossReason
from tako_sync.events import Acquired, Lost
from tako_sync.policy import LeasePolicy

HOUR = 3600.0
YEARS = 10 * 365 * 24 * HOUR


@pytest.fixture
def world() -> Iterator[GCSWorld]:
    with a_world() as world:
        yield world


def a_hold_and_a_rival(
    world: GCSWorld, a: GCSHost, b: GCSHost
) -> tuple[Work, Work, Running[int], Running[int]]:
    mine, theirs = Work(world, listens=True), Work(world, 0.0)
    holding = world.start(lambda: a.lock().do(mine), "a")
    return mine, theirs, holding, world.start(lambda: b.lock().do(theirs), "b")


def crash(world: GCSWorld, host: GCSHost) -> float:
    """Cut it off, as far as others can tell; return when it wrote last: its age counts from it."""
    host.fails("*", Reset(), times=None)
    return max(request.at for request in host.writes() if request.committed)


def lost(world: GCSWorld, running: Running[Any]) -> LeaseLostError:
    world.server.faults.clear()
    world.advance(2.0)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    return caught.value


# --- Hosts whose clocks disagree -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("skew", "observing"),
    [
        *((skew, False) for skew in (45.0, -45.0, HOUR, YEARS, -YEARS)),
        *((skew, True) for skew in (45.0, -YEARS)),
    ],
)
def test_at_any_skew_a_live_lease_is_not_stolen_and_a_dead_one_is_taken_over(
    world: GCSWorld, skew: float, observing: bool
) -> None:
    """No host's clock is compared with another's, nor with the bucket's."""
    world.server.set(send_date=not observing)
    a, b = world.host("a"), world.host("b", wall_offset=skew, offset=skew)
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(10 * TTL)
    assert not theirs.began, "it never enters while the other renews"
    assert not mine.ended
    died = crash(world, a)
    world.advance(TTL + WIDTHS + MARGIN + POLL)
    assert rival.result() == 42
    (entered,) = theirs.began
    slack = MARGIN + 2 * POLL if observing else WIDTHS + POLL
    assert mine.ended[0] < entered and TTL <= entered - died <= TTL + slack
    assert lost(world, holding).reason is LossReason.UNREACHABLE


@pytest.mark.parametrize("shift", [45.0, -HOUR, YEARS])
def test_a_bucket_whose_whole_clock_is_off_is_as_good_as_another(
    world: GCSWorld, shift: float
) -> None:
    """Only differences of its own times count."""
    world.server.set(clock_shift=shift)
    a, b = world.host("a"), world.host("b")
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(3 * TTL)
    assert not theirs.began and not mine.ended
    died = crash(world, a)
    world.advance(TTL + WIDTHS + POLL)
    assert rival.result() == 42
    assert TTL <= theirs.began[0] - died <= TTL + WIDTHS + POLL
    lost(world, holding)


@pytest.mark.parametrize(("slow", "fast"), [(0.9995, 1.0005), (1.04, 0.96)])
def test_clocks_that_run_apart_within_the_margin_do_not_overlap(
    world: GCSWorld, slow: float, fast: float
) -> None:
    world.server.set(send_date=False)
    a, b = world.host("a", rate=slow), world.host("b", rate=fast)
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(3 * TTL)
    assert not theirs.began
    crash(world, a)
    world.advance(1.05 * (TTL + MARGIN + 2 * POLL))
    assert rival.result() == 42 and mine.ended[0] < theirs.began[0]
    lost(world, holding)


# --- A Date that steps ---------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-5.0, -60.0, -HOUR])
def test_a_date_that_steps_back_frees_nothing_and_locks_nobody_out(
    world: GCSWorld, step: float
) -> None:
    """Records seem younger then; one's own observation takes over where ``Date`` is of no use."""
    a, b = world.host("a"), world.host("b")
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(TTL)
    world.server.set(date_shift=step)
    world.advance(3 * TTL)
    assert not theirs.began and not mine.ended
    died = crash(world, a)
    world.advance(TTL + MARGIN + 2 * POLL)
    assert rival.result() == 42
    assert mine.ended[0] < theirs.began[0]
    assert TTL <= theirs.began[0] - died <= TTL + MARGIN + 2 * POLL
    lost(world, holding)


@pytest.mark.parametrize("step", [-0.9, -2.0, 0.9])
def test_front_ends_that_disagree_by_a_second_or_so_do_not_let_a_rival_in_early(
    world: GCSWorld, step: float
) -> None:
    """``Date`` is taken to be a second off either way; what steps back only makes one wait."""
    a, b = world.host("a"), world.host("b")
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(10.3)
    died = crash(world, a)
    world.server.set(date_shift=step)
    world.advance(TTL + WIDTHS + 2 * POLL + MARGIN)
    assert rival.result() == 42
    assert mine.ended[0] < theirs.began[0] and theirs.began[0] - died >= TTL
    lost(world, holding)


# --- No Date, no Last-Modified -------------------------------------------------------------------


def test_without_a_date_a_dead_lease_is_taken_over_by_observation_alone(world: GCSWorld) -> None:
    world.server.set(send_date=False)
    world.put(record())
    world.advance(1000)  # what went before counts for nothing: nobody has seen it
    host = world.host()
    start = world.now
    result = world.run(lambda: host.lock().try_do(Work(world)))
    assert result.holder is not None and result.holder.left == TTL + MARGIN
    work = Work(world, 0.0)
    running = world.start(lambda: host.lock().do(work))
    world.advance(TTL + MARGIN - 0.01)
    assert not work.began
    world.advance(POLL)
    assert running.result() == 42
    assert TTL + MARGIN <= work.began[0] - start <= TTL + MARGIN + POLL
    assert set(host.kinds()) == {"read", "write"}, "no metadata: they would tell nothing"


def test_without_last_modified_one_more_request_tells_of_a_dead_lease(world: GCSWorld) -> None:
    world.server.set(send_last_modified=False)
    world.put(record())
    world.advance(600)
    host = world.host()
    start = world.now
    assert world.run(lambda: host.lock().try_do(Work(world, 0.0))) == (True, 42)
    assert world.now == start
    assert host.kinds() == ["read", "metadata", "write", "write"]


def test_without_last_modified_a_long_campaign_asks_for_metadata_where_a_takeover_hangs_on_it(
    world: GCSWorld,
) -> None:
    """Only where a takeover hangs on it: a version that came a moment ago cannot have aged."""
    world.server.set(send_last_modified=False)
    a, b = world.host("a"), world.host("b")
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(19 * TTL)
    assert not theirs.began and not mine.ended
    polls, asked = b.kinds().count("read"), b.kinds().count("metadata")
    assert polls > 230
    assert asked <= 1, "the first look could not know; no later one had to ask"
    died = crash(world, a)
    world.advance(TTL + WIDTHS + POLL)
    assert rival.result() == 42 and mine.ended[0] < theirs.began[0]
    assert TTL <= theirs.began[0] - died <= TTL + WIDTHS + POLL
    assert b.kinds().count("metadata") <= asked + 1
    lost(world, holding)


def test_a_busy_try_do_without_last_modified_asks_once_per_version(world: GCSWorld) -> None:
    world.server.set(send_last_modified=False)
    host = world.host()
    world.put(record())
    for _ in range(3):
        assert not world.run(lambda: host.lock().try_do(Work(world)))
    assert host.kinds() == ["read", "metadata", "read", "read"]
    world.put(record(write="another"))
    assert not world.run(lambda: host.lock().try_do(Work(world)))
    assert host.kinds()[4:] == ["read"], "it came after our last look: it cannot have aged"


def test_metadata_that_cannot_be_had_leave_it_to_observation(world: GCSWorld) -> None:
    world.server.set(send_last_modified=False)
    world.server.faults.add(Fault("metadata", Status(403), times=None))
    world.put(record())
    world.advance(600)
    host = world.host()
    work = Work(world, 0.0)
    start = world.now
    running = world.start(lambda: host.lock().do(work))
    world.advance(TTL + MARGIN + POLL)
    assert running.result() == 42
    assert TTL + MARGIN <= work.began[0] - start <= TTL + MARGIN + POLL


# --- The time of day is set ----------------------------------------------------------------------


@pytest.mark.parametrize("step", [-HOUR, 13 * HOUR, -YEARS])
def test_setting_the_time_of_day_during_a_hold_neither_loses_nor_prolongs_it(
    world: GCSWorld, step: float
) -> None:
    a, b = world.host("a"), world.host("b")
    mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
    world.advance(45)
    world.clock.step_wall(step)
    world.advance(3 * TTL)
    assert not mine.ended, "no false loss"
    assert not theirs.began, "no early takeover, whatever the record says of its expiry"
    world.clock.step_wall(-2 * step)
    world.advance(15)
    assert not mine.ended and not theirs.began and not a.told(Lost)
    died = crash(world, a)
    world.clock.step_wall(step)
    world.advance(TTL + WIDTHS + POLL)
    assert rival.result() == 42, "nor is the dead holder immortal"
    assert theirs.began[0] - died <= TTL + WIDTHS + POLL
    lost(world, holding)


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_setting_the_time_of_day_during_a_campaign_changes_no_pause_and_no_timeout(
    world: GCSWorld, step: float
) -> None:
    world.put(record())
    host = world.host()
    begun = world.now
    work = Work(world, 0.0)
    running = world.start(lambda: host.lock().do(work))
    world.advance(10)
    world.clock.step_wall(step)
    world.advance(10)
    world.clock.step_wall(-step)
    world.advance(TTL + WIDTHS + POLL - 20)
    assert running.result() == 42
    assert TTL <= work.began[0] - begun <= TTL + WIDTHS + POLL
    reads = [request.at for request in host.requests() if request.kind == "read"]
    assert all(later - earlier <= POLL for earlier, later in itertools.pairwise(reads))


def test_the_expiry_in_the_record_is_right_for_people_and_decides_nothing(
    world: GCSWorld,
) -> None:
    host = world.host()
    work = Work(world)
    running = world.start(lambda: host.lock().do(work))
    world.clock.step_wall(HOUR)
    world.advance(10)
    document = host.writes()[-1].document
    expires = datetime.fromisoformat(document["expires"].replace("Z", "+00:00"))
    assert abs((expires - world.clock.wall()).total_seconds() - TTL) < 1
    work.end()
    assert running.result() == 42
    for expires_text in ("1970-01-01T00:00:30Z", "2999-01-01T00:00:30Z", "soon", ""):
        world.put(record(expires=expires_text))
        assert not world.run(lambda: host.lock().try_do(Work(world)))
        world.advance(TTL + WIDTHS)
        assert world.run(lambda: host.lock().try_do(Work(world, 0.0))) == (True, 42)


# --- A record that is long dead ------------------------------------------------------------------


@pytest.mark.parametrize("call", ["try_do", "do", "do with no time"])
def test_a_newcomer_takes_over_a_long_dead_lease_at_once(world: GCSWorld, call: str) -> None:
    """The bucket's clock knows its age: nobody need watch it for a ttl."""
    world.put(record())
    world.advance(600)
    host = world.host()
    calls: dict[str, Callable[[Work], Any]] = {
        "try_do": lambda work: host.lock().try_do(work).value,
        "do": lambda work: host.lock().do(work),
        "do with no time": lambda work: host.lock().do(work, timeout=0),
    }
    start = world.now
    assert world.run(lambda: calls[call](Work(world, 0.0))) == 42
    assert world.now == start
    assert host.kinds() == ["read", "write", "write"]
    assert [event.how for event in host.told(Acquired)] == ["expired"]


# --- The intervals -------------------------------------------------------------------------------


class Dated:
    """An action: an answer whose time headers are what the test says."""

    def __init__(self, date: str | None, modified: str | None) -> None:
        self._headers = {"Date": date, "Last-Modified": modified}

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        ending = proceed()
        assert isinstance(ending, Reply)
        answer = ending.answer
        headers = {k: v for k, v in answer.headers.items() if k not in self._headers}
        headers.update({key: value for key, value in self._headers.items() if value is not None})
        return Reply(Answer(answer.status, answer.body, headers))


AT = 1_800_000_000.0
DATE = formatdate(AT, usegmt=True)


@pytest.mark.parametrize(
    ("date", "modified", "now", "written"),
    [
        (DATE, formatdate(AT - 40, usegmt=True), (AT - 1, AT + 2), (AT - 40, AT - 39)),
        (DATE, DATE, (AT - 1, AT + 2), (AT, AT + 1)),
        # Written in the future: by no more than what the answer's own time allows.
        (DATE, formatdate(AT + 60, usegmt=True), (AT - 1, AT + 2), (AT + 2, AT + 2)),
        (DATE, None, (AT - 1, AT + 2), None),
        (None, DATE, None, None),
        (DATE, "yesterday", (AT - 1, AT + 2), None),
        ("soon", DATE, None, None),
        ("", "", None, None),
    ],
)
def test_the_two_headers_become_intervals_exactly(
    gcs_server: GCSServer,
    date: str | None,
    modified: str | None,
    now: tuple[float, float] | None,
    written: tuple[float, float] | None,
) -> None:
    gcs_server.set(send_date=False)
    gcs_server.put(NAME, b"{}")
    gcs_server.faults.add(Fault("read", Dated(date, modified)))
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, client=client)
        found = backend.read(KEY, timeout=kit.PATIENCE)
        backend.close()
    assert found.now == (None if now is None else Interval(*now))
    assert found.written == (None if written is None else Interval(*written))


def test_a_lease_is_free_by_the_intervals_at_the_second_that_they_allow(world: GCSWorld) -> None:
    """Date - 1 s is 30 s after Last-Modified + 1 s: 32 s after the write, and not before."""
    world.put(record())
    host = world.host()
    world.advance(31.9)
    assert not world.run(lambda: host.lock().try_do(Work(world)))
    world.advance(0.1)
    assert world.run(lambda: host.lock().try_do(Work(world, 0.0))) == (True, 42)


def test_a_policy_of_a_short_ttl_still_waits_for_the_intervals() -> None:
    """Whole seconds tell little about a ttl of one: observation is the sooner of the two."""
    with a_world(LeasePolicy(ttl=1.0, poll=0.2)) as world:
        a, b = world.host("a"), world.host("b")
        mine, theirs, holding, rival = a_hold_and_a_rival(world, a, b)
        world.advance(10)
        assert not theirs.began and not mine.ended
        died = crash(world, a)
        world.advance(2.0)
        assert rival.result() == 42
        assert mine.ended[0] < theirs.began[0]
        assert 1.0 <= theirs.began[0] - died <= 1.0 + 0.1 + 0.5
        lost(world, holding)


def test_a_ctx_reads_cancelled_at_its_deadline_whatever_date_the_bucket_claims(
    world: GCSWorld,
) -> None:
    """The holder's own validity is counted on its own monotonic clock only."""
    host = world.host()
    seen: list[bool] = []

    def body(ctx: Ctx) -> None:
        crash(world, host)
        world.server.set(clock_shift=-YEARS)
        other = Ctx.background(world.clock)
        for pause in (ASSURED - 0.001, 0.002):
            other.wait(pause)
            seen.append(ctx.cancelled)

    running = world.start(lambda: host.lock().do(body))
    world.advance(TTL)
    assert seen == [False, True]
    lost(world, running)
