"""The lease over real HTTP: lost replies, takeovers, renewals, clocks, records, and GCS's ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from google.auth.exceptions import RefreshError

from gcs import canned
from gcs.actions import Action, Drop, Reset, Status
from gcs.cloud import GO, KEY, MARGIN, NAME, POLL, TTL, WIDTHS, Cloud, Work, cloud
from gcs.faults import Fault
from kit import Host
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    LeaseLostError,
    LossReason,
    NameCollisionError,
    RecordUnreadableError,
)
from tako_sync.events import Acquired, Lost, ReleaseUnconfirmed, UnreadableTakenOver
from tako_sync.flag import Flag
from tako_sync.policy import LeasePolicy
from tako_sync.record import Foreign, Record, read

AFTER: list[Action] = [Status(503, after=True), Reset(after=True), Drop()]
"""Faults that lose the reply of a write that was applied."""


@pytest.fixture
def world() -> Iterator[Cloud]:
    with cloud() as world:
        yield world


def kinds(world: Cloud) -> list[str]:
    return [request.kind for request in world.server.requests()]


# --- A: lost acknowledgements ------------------------------------------------------------------


@pytest.mark.parametrize("action", AFTER)
@pytest.mark.parametrize("way", ["do", "try_do"])
def test_a_create_whose_reply_is_lost_is_recognised_and_runs_once_at_once(
    world: Cloud, action: Action, way: str
) -> None:
    host, work = world.host(), Work(world, 1.0)
    world.server.faults.add(Fault("write", action))
    start = world.clock.monotonic()
    running = world.start(lambda: getattr(host.lock(), way)(work))
    world.advance(5)
    assert running.result() in (42, (True, 42))
    assert len(work.began) == 1 and work.began[0] - start < 1
    (acquired,) = host.told(Acquired)
    assert acquired.fence == work.ctxs[0].fence


@pytest.mark.parametrize("action", AFTER)
def test_so_is_a_takeover_whose_reply_is_lost(world: Cloud, action: Action) -> None:
    world.server.put(NAME, GO)
    world.advance(TTL + WIDTHS)
    host, work = world.host(), Work(world)
    world.server.faults.add(Fault("write", action))
    running = world.start(lambda: host.lock().try_do(work))
    world.advance(1)
    assert len(work.began) == 1
    work.finish.set()
    world.advance(1)
    assert running.result().ran


@pytest.mark.parametrize("action", AFTER)
def test_renewals_whose_replies_are_lost_lose_nothing(world: Cloud, action: Action) -> None:
    host, work = world.host(), Work(world, 2 * TTL)
    running = world.start(lambda: host.lock().do(work))
    for _ in range(5):
        world.server.faults.add(Fault("write", action))
        world.advance(10)
    world.advance(TTL)
    assert running.result() == 42
    assert not host.told(Lost)


@pytest.mark.parametrize("action", AFTER)
def test_a_release_whose_reply_is_lost_is_a_release(world: Cloud, action: Action) -> None:
    host, other = world.host("a"), world.host("b")
    work = Work(world, 1.0)
    running = world.start(lambda: host.lock().do(work))
    world.server.faults.add(Fault("write", action))
    world.advance(2)
    assert running.result() == 42
    assert not host.told(ReleaseUnconfirmed)
    assert other.lock().holder() is None


def test_an_object_that_vanishes_between_the_refusal_and_the_look_is_free(world: Cloud) -> None:
    host, work = world.host(), Work(world, 1.0)
    world.server.faults.add(Fault("write", Status(412)))
    running = world.start(lambda: host.lock().do(work))
    world.advance(2)
    assert running.result() == 42
    assert kinds(world)[:4] == ["read", "write", "read", "write"]


def test_contenders_in_great_haste_all_get_through(world: Cloud) -> None:
    hosts = [world.host(f"host {number}") for number in range(5)]
    counts: list[int] = []

    def many(host: Host) -> None:
        counts.extend(host.lock().do(lambda ctx: 1) for _ in range(5))

    runs = [world.start(partial(many, host), host.name) for host in hosts]
    world.advance(200)
    for run in runs:
        run.result()
    assert len(counts) == 25


# --- B: takeover and release races -------------------------------------------------------------


def test_a_release_after_a_takeover_leaves_the_successors_record_as_it_is(world: Cloud) -> None:
    a, b = world.host("a"), world.host("b")
    old, new = Work(world), Work(world)
    first = world.start(lambda: a.lock().do(old), "a")
    world.dies(a)
    second = world.start(lambda: b.lock().do(new), "b")
    world.advance(TTL + WIDTHS + POLL)
    assert new.began and old.cancelled
    theirs = world.server.object(NAME)
    a.storage.heal()
    old.finish.set()
    world.advance(1)
    with pytest.raises(LeaseLostError):
        first.result()
    assert world.server.object(NAME) == theirs
    assert not new.cancelled
    new.finish.set()
    world.advance(1)
    assert second.result() == 42


def test_of_two_who_see_one_expired_record_the_slower_one_goes_back_to_polling(
    world: Cloud,
) -> None:
    world.server.put(NAME, GO)
    world.advance(TTL + WIDTHS)
    a, b = world.host("a"), world.host("b", prompt=False)
    gate = b.storage.gate("write")
    slow, fast = Work(world), Work(world)
    world.start(lambda: b.lock().do(slow), "slow")
    world.start(lambda: a.lock().do(fast), "fast")
    assert fast.began
    stands = world.body()
    gate.open()
    world.advance(POLL)
    assert world.body() == stands and not slow.began and not fast.cancelled
    fast.finish.set()
    world.advance(2 * POLL)
    assert slow.began
    slow.finish.set()


def test_a_former_holder_revives_no_record_that_was_deleted(world: Cloud) -> None:
    host, work = world.host(), Work(world)
    running = world.start(lambda: host.lock().do(work))
    world.server.delete(NAME)
    world.advance(11)
    assert work.cancelled
    (lost,) = host.told(Lost)
    assert lost.reason is LossReason.DELETED
    work.finish.set()
    world.advance(5)
    with pytest.raises(LeaseLostError):
        running.result()
    assert world.server.object(NAME) is None


def test_after_do_has_returned_no_write_leaves_for_that_name(world: Cloud) -> None:
    host = world.host()
    for _ in range(20):
        assert host.lock().do(lambda ctx: 1) == 1
    count = world.server.count("write")
    world.advance(5 * TTL)
    assert world.server.count("write") == count == 40


# --- C: heartbeat failures ---------------------------------------------------------------------


@pytest.mark.parametrize("action", [Status(503), Status(500), Status(408), Reset(), Drop(False)])
def test_an_outage_shorter_than_what_is_left_loses_nothing(world: Cloud, action: Action) -> None:
    host, work = world.host(), Work(world)
    running = world.start(lambda: host.lock().do(work))
    world.advance(9)
    world.server.faults.add(Fault("*", action, times=None))
    world.advance(15)
    world.server.faults.clear()
    world.advance(5 * TTL)
    assert not host.told(Lost) and not work.cancelled
    work.finish.set()
    world.advance(1)
    assert running.result() == 42


def test_one_that_is_longer_cancels_at_the_deadline_and_changes_the_holder_once(
    world: Cloud,
) -> None:
    hosts = [world.host(f"host {number}") for number in range(3)]
    works = [Work(world) for _ in hosts]
    runs = [
        world.start(partial(host.lock().do, work), host.name)
        for host, work in zip(hosts, works, strict=True)
    ]
    world.advance(9)
    world.server.faults.add(Fault("*", Status(503), times=None))
    world.advance(TTL - MARGIN - 9 - 0.1)
    assert not works[0].cancelled
    world.advance(0.1)
    assert works[0].cancelled
    world.advance(300)
    assert sum(len(work.began) for work in works) == 1
    world.server.faults.clear()
    world.advance(2 * POLL)
    assert sum(len(work.began) for work in works) == 2, "one holder soon after the recovery"
    for work in works:
        work.finish.set()
    world.advance(3 * POLL)
    with pytest.raises(LeaseLostError):
        runs[0].result()
    assert [runs[1].result(), runs[2].result()] == [42, 42]


def test_a_refused_renewal_is_a_loss_at_the_deadline_that_says_so(world: Cloud) -> None:
    host, work = world.host(), Work(world)
    running = world.start(lambda: host.lock().do(work))
    world.server.faults.add(Fault("write", canned.forbidden(), times=None))
    world.advance(TTL)
    assert work.cancelled
    work.finish.set()
    world.advance(1)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.DENIED
    assert isinstance(caught.value.__cause__, BackendDeniedError)


# --- G: clocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [45.0, -45.0, 3600.0, 86_400.0 * 3650, -86_400.0 * 3650])
def test_hosts_whose_clocks_are_far_apart_steal_nothing_and_take_over_in_time(
    world: Cloud, ahead: float
) -> None:
    a, b = world.host("a"), world.host("b", wall_offset=ahead)
    first, second = Work(world), Work(world)
    world.start(lambda: a.lock().do(first), "a")
    world.start(lambda: b.lock().do(second), "b")
    world.advance(10 * TTL)
    assert not second.began
    world.dies(a)
    died = world.clock.monotonic()
    world.advance(TTL + WIDTHS + POLL)
    assert second.began and first.cancelled
    assert second.began[0] - died <= TTL + WIDTHS + POLL
    first.finish.set()
    second.finish.set()


@pytest.mark.parametrize("shift", [-5.0, -60.0, -3600.0])
def test_a_date_that_steps_back_steals_nothing_and_blocks_nobody_for_long(
    world: Cloud, shift: float
) -> None:
    a, b = world.host("a"), world.host("b")
    first, second = Work(world), Work(world)
    world.start(lambda: a.lock().do(first), "a")
    world.start(lambda: b.lock().do(second), "b")
    world.advance(TTL)
    world.server.set(date_shift=shift)
    world.advance(5 * TTL)
    assert not second.began
    world.dies(a)
    world.advance(TTL + MARGIN + 2 * POLL)
    assert second.began and first.cancelled, "its own observation is enough"
    first.finish.set()
    second.finish.set()


@pytest.mark.parametrize("shift", [3.0, 60.0, 3600.0])
def test_a_clock_of_the_storage_that_jumps_ahead_cannot_make_a_live_lease_look_old(
    world: Cloud, shift: float
) -> None:
    """Both of its times come from it: only what was written before the jump looks older."""
    a, b = world.host("a"), world.host("b")
    first, second = Work(world), Work(world)
    world.start(lambda: a.lock().do(first), "a")
    world.start(lambda: b.lock().do(second), "b")
    world.advance(TTL)
    world.server.set(clock_shift=shift)
    world.advance(0.0)
    first.finish.set()
    world.advance(2 * POLL)
    assert len(second.began) == 1
    second.finish.set()


def test_an_old_record_is_taken_over_with_one_look(world: Cloud) -> None:
    world.server.put(NAME, GO)
    world.advance(600)
    host, work = world.host(), Work(world, 1.0)
    running = world.start(lambda: host.lock().try_do(work))
    world.advance(2)
    assert running.result().ran
    assert kinds(world) == ["read", "write", "write"]


def test_without_last_modified_one_more_request_judges_a_takeover_and_no_other_poll(
    world: Cloud,
) -> None:
    world.server.set(send_last_modified=False)
    a, b = world.host("a"), world.host("b")
    first, second = Work(world), Work(world)
    world.start(lambda: a.lock().do(first), "a")
    world.start(lambda: b.lock().do(second), "b")
    world.advance(5 * TTL)
    assert world.server.count("metadata") == 1, "the first sight of a record that is held"
    assert world.server.count("read") > 50
    world.dies(a)
    world.advance(TTL + WIDTHS + POLL)
    assert second.began and first.cancelled
    assert world.server.count("metadata") == 2
    first.finish.set()
    second.finish.set()


def test_there_a_single_attempt_takes_over_too(world: Cloud) -> None:
    world.server.set(send_last_modified=False)
    world.server.put(NAME, GO)
    world.advance(600)
    host = world.host()
    assert host.lock().holder() is None
    assert host.lock().try_do(lambda ctx: 1).ran
    assert kinds(world) == ["read", "metadata", "read", "write", "write"]


def test_without_any_date_ones_own_observation_decides(world: Cloud) -> None:
    world.server.set(send_date=False)
    world.server.put(NAME, GO)
    world.advance(600)
    host, work = world.host(), Work(world)
    assert not host.lock().try_do(lambda ctx: 1).ran, "one attempt cannot observe"
    start = world.clock.monotonic()
    world.start(lambda: host.lock().do(work))
    world.advance(TTL + MARGIN - 0.1)
    assert not work.began
    world.advance(0.1 + POLL)
    assert work.began and work.began[0] - start >= TTL + MARGIN
    assert world.server.count("metadata") == 0
    work.finish.set()


def test_a_clock_that_is_set_during_a_hold_changes_nothing(world: Cloud) -> None:
    a, b = world.host("a"), world.host("b")
    first, second = Work(world), Work(world)
    world.start(lambda: a.lock().do(first), "a")
    world.start(lambda: b.lock().do(second), "b")
    offsets = (3600.0, -7200.0, 3600.0)
    server_time = world.server.options.clock_shift
    for step in offsets:
        world.clock.step_wall(step)
        server_time -= step  # that of the hosts alone
        world.server.set(clock_shift=server_time)
        world.advance(2 * TTL)
        assert not first.cancelled and not second.began
    first.finish.set()
    world.advance(POLL)
    assert second.began
    second.finish.set()


# --- H: records and names ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"\xff\xfe", b"x" * 5_000_000, b'{"format":1}', b'{"owner":3}'],
)
def test_what_cannot_be_read_is_neither_stolen_at_once_nor_held_for_ever(
    world: Cloud, body: bytes
) -> None:
    world.server.put(NAME, body)
    host, work = world.host(), Work(world)
    with pytest.raises(RecordUnreadableError, match="break_"):
        host.lock().try_do(lambda ctx: 1)
    world.start(lambda: host.lock().do(work))
    world.advance(TTL - 1)
    assert not work.began
    world.advance(1 + WIDTHS + POLL)
    assert work.began
    assert len(host.told(UnreadableTakenOver)) == 1
    work.finish.set()


def test_a_record_of_another_application_under_the_same_name_is_a_collision(world: Cloud) -> None:
    host = world.host()
    host.lock().do(lambda ctx: 1)
    document = json.loads(world.body())
    world.server.put(NAME, json.dumps({**document, "app": "shop-test"}).encode())
    with pytest.raises(NameCollisionError):
        host.lock().try_do(lambda ctx: 1)


def test_a_go_record_is_respected_and_taken_over_when_it_has_aged(world: Cloud) -> None:
    """It carries ``owner`` and ``expires`` alone, and its holder renews it."""
    host, work = world.host(), Work(world)
    world.server.put(NAME, GO)
    world.start(lambda: host.lock().do(work))
    for number in range(20):
        world.advance(10)
        world.server.put(NAME, GO.replace(b"00:30Z", b"00:%02dZ" % number))
        assert not work.began
    world.advance(TTL - 1)
    assert not work.began
    world.advance(1 + WIDTHS + POLL)
    assert work.began
    work.finish.set()


def test_ours_is_readable_for_such_a_reader_in_every_state(world: Cloud) -> None:
    host, work = world.host(), Work(world)
    world.start(lambda: host.lock().do(work))
    held: dict[str, Any] = json.loads(world.body())
    work.finish.set()
    world.advance(1)
    for document in (held, json.loads(world.body())):
        assert isinstance(document["owner"], str) and document["owner"]
        assert document["expires"].endswith("Z")
        theirs = {"owner": document["owner"], "expires": document["expires"]}
        snapshot = host.storage.backend.read(KEY, timeout=5)
        assert isinstance(read(snapshot), Record)
        assert theirs.keys() <= document.keys()
    stored = world.server.object(NAME)
    assert stored is not None


def test_what_a_go_process_wrote_is_read_as_its_own(world: Cloud) -> None:
    world.server.put(NAME, GO)
    assert isinstance(read(world.store.read(KEY, timeout=5)), Foreign)


def test_a_crash_between_any_two_requests_leaves_the_name_obtainable(world: Cloud) -> None:
    """Acquire, renew, release: whatever is the last thing that a process sends."""
    for crash in range(5):
        host, other = world.host(f"crashes at {crash}"), world.host(f"after {crash}")
        sent: list[int] = []

        def passes(call: Any, proceed: Any, sent: list[int] = sent, crash: int = crash) -> Any:
            sent.append(1)
            if len(sent) > crash:
                raise BackendUnavailableError("the process has crashed")
            return proceed()

        host.storage.always("*", passes)
        work = Work(world, 12.0)
        run = world.start(partial(host.lock().do, work, timeout=20), host.name)
        world.advance(21)
        finish = Work(world, 0.0)
        after = world.start(partial(other.lock().do, finish), other.name)
        world.advance(TTL + WIDTHS + POLL)
        assert after.result() == 42
        world.advance(TTL)
        assert run.done


# --- I: the ways of GCS ------------------------------------------------------------------------


def test_a_write_a_second_slows_down_and_loses_nothing(world: Cloud) -> None:
    world.server.set(write_interval=1.0)
    hosts = [world.host(f"host {number}") for number in range(8)]
    counts: list[int] = []

    def short(ctx: Ctx) -> int:
        world.clock.wait(ctx.done, 0.005)
        return 1

    def twice(host: Host) -> None:
        counts.extend(host.lock().do(short) for _ in range(2))

    runs = [world.start(partial(twice, host), host.name) for host in hosts]
    world.advance(300)
    for run in runs:
        run.result()
    assert len(counts) == 16
    assert not any(host.told(Lost) for host in hosts)
    refused = [request for request in world.server.requests("write") if request.status == 429]
    for request in refused:
        assert not request.committed


def test_heartbeats_right_after_the_grant_and_releases_right_after_them_get_through(
    world: Cloud,
) -> None:
    policy = LeasePolicy(ttl=3.0)
    world.server.set(write_interval=1.0)
    host = world.host(policy=policy)
    work = Work(world, 1.05)
    run = world.start(lambda: host.lock().do(work))
    world.advance(30)
    assert run.result() == 42
    assert world.document()["state"] == "released"


def test_429_alone_is_no_loss_within_the_assured_time(world: Cloud) -> None:
    host, work = world.host(), Work(world)
    world.start(lambda: host.lock().do(work))
    world.advance(9)
    world.server.faults.add(Fault("write", canned.TOO_MANY, times=None))
    before = world.server.count("write")
    world.advance(15)
    assert world.server.count("write") - before <= 15, "a second apart at least"
    world.server.faults.clear()
    world.advance(TTL)
    assert not host.told(Lost)
    work.finish.set()


def test_a_token_that_cannot_be_refreshed_for_a_while_loses_nothing(world: Cloud) -> None:
    host, work = world.host(), Work(world)
    world.start(lambda: host.lock().do(work))
    world.advance(9)

    def fails(*_: object) -> Any:
        from tako_sync.backends.gcs.faults import translate

        error = translate(RefreshError("503"), "write", NAME)  # type: ignore[no-untyped-call]
        assert error is not None
        raise error

    host.storage.always("*", fails)
    world.advance(12)
    host.storage.heal()
    world.advance(TTL)
    assert not host.told(Lost)
    host.storage.always("*", fails)
    world.advance(TTL)
    (lost,) = host.told(Lost)
    assert lost.reason is LossReason.UNREACHABLE
    work.finish.set()


@pytest.mark.parametrize("refusal", [canned.RETENTION, canned.HOLD, canned.KMS_DISABLED])
def test_a_bucket_that_cannot_be_written_is_an_error_at_once_and_no_endless_campaign(
    world: Cloud, refusal: Action
) -> None:
    host = world.host()
    world.server.faults.add(Fault("write", refusal, times=None))
    for way in ("do", "try_do"):
        run = world.start(partial(getattr(host.lock(), way), lambda ctx: 1))
        world.advance(1)
        with pytest.raises(BackendDeniedError):
            run.result()


def test_a_retention_policy_is_told_as_the_cause_of_the_loss_and_nobody_flaps(
    world: Cloud,
) -> None:
    """Creating is allowed there, replacing is not."""
    host, other = world.host("a"), world.host("b")
    only_creates = Fault(
        "write", canned.RETENTION, times=None, when=lambda request: request.generation_match != 0
    )
    world.server.faults.add(only_creates)
    work = Work(world)
    run = world.start(lambda: host.lock().do(work), "a")
    second = world.start(lambda: other.lock().do(lambda ctx: 1), "b")
    world.advance(TTL + WIDTHS + POLL)
    assert work.cancelled
    with pytest.raises(BackendDeniedError, match="retention policy"):
        second.result()
    work.finish.set()
    world.advance(1)
    with pytest.raises(LeaseLostError) as caught:
        run.result()
    assert "retention policy" in str(caught.value.__cause__)


def test_a_missing_bucket_is_told_apart_from_a_missing_object(world: Cloud) -> None:
    host = world.host()
    world.server.set(bucket_missing=True)
    with pytest.raises(BackendDeniedError, match="the bucket does not exist"):
        host.lock().do(lambda ctx: 1)
    world.server.set(bucket_missing=False)
    assert host.lock().do(lambda ctx: 1) == 1


@pytest.mark.parametrize("random", [False, True])
def test_fences_rise_over_deletions_whatever_the_generations_do(world: Cloud, random: bool) -> None:
    world.server.set(random_generations=random)
    host, fences = world.host(), []
    for number in range(60):
        fences.append(host.lock().do(lambda ctx: ctx.fence))
        if number % 3 == 0:
            world.server.delete(NAME)
        world.advance(4)
    assert fences == sorted(set(fences))


# --- Requests, counted at the server -----------------------------------------------------------


def test_the_counts_of_the_design(world: Cloud) -> None:
    a, b = world.host("a"), world.host("b")
    work = Work(world)
    run = world.start(lambda: a.lock().do(work), "a")
    assert kinds(world) == ["read", "write"], "a cold acquisition"
    world.server.forget()
    assert not b.lock().try_do(lambda ctx: 1).ran
    assert kinds(world) == ["read"], "a busy attempt"
    world.server.forget()
    world.advance(10)
    assert kinds(world) == ["write"], "a heartbeat"
    world.server.forget()
    work.finish.set()
    world.advance(0)
    assert run.result() == 42
    assert kinds(world) == ["write"], "a release"
    world.server.forget()
    world.advance(2 * POLL)
    world.start(lambda: a.lock().do(lambda ctx: 1), "a")
    assert kinds(world) == ["write", "write"], "a warm acquisition, and its release"
    world.server.forget()
    work = Work(world)
    world.start(lambda: a.lock().do(work), "a")
    world.server.forget()
    waiting = world.start(lambda: b.lock().do(lambda ctx: 1), "b")
    world.advance(9)
    assert set(kinds(world)) == {"read"} and 4 <= len(kinds(world)) <= 7, "a poll is one"
    work.finish.set()
    world.advance(POLL)
    assert waiting.result() == 1


def test_a_hundred_holds_of_one_process_make_no_connection_for_each(world: Cloud) -> None:
    host, finish = world.host(), Flag()

    def body(ctx: Ctx) -> bool:
        world.clock.wait(finish)
        return ctx.cancelled

    runs = [world.start(partial(host.lock(f"job-{number}").do, body)) for number in range(100)]
    world.advance(TTL)
    finish.set()
    world.advance(1)
    assert [run.result() for run in runs] == 100 * [False]
    assert world.server.connections <= 4
    assert world.server.count("bucket") == 0
