"""Cron: with single flight, each slot runs once across all processes, and none is lost quietly."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from kit import Host, Running, World
from tako_sync.cron import Cron, CronConfig
from tako_sync.ctx import Ctx, current_ctx
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    CampaignTimeoutError,
    CtxCancelledError,
    ShutdownError,
    UsageError,
)
from tako_sync.events import CronAhead, CronCutShort, CronMissed, CronRan, CronRefused
from tako_sync.flag import Flag
from tako_sync.record import Record, read, stamp
from tako_sync.testing.faults import fail

KEY = "run-shop-test-cron-sweep"
TTL, POLL = 30.0, 2.5
FIVE = "*/5 * * * *"
ONCE = CronConfig(singleflight=True)


class Process:
    """One process of the application, with its Cron running in a thread."""

    def __init__(
        self,
        world: World,
        host: Host,
        fn: Callable[[Ctx], object] | None,
        config: CronConfig,
        schedule: str,
    ) -> None:
        self.world = world
        self.host = host
        self.began: list[datetime] = []
        self.fences: list[int] = []
        self.ctx = Ctx.background(host.clock)
        self._fn = fn or (lambda ctx: ctx.wait(0.005))
        namespace: dict[str, Any] = {
            "__name__": "shop",
            "__file__": "shop.py",
            "Cron": Cron,
            "schedule": schedule,
            "fn": self._run,
            "config": config,
        }
        exec("sweep = Cron(schedule, fn, config)", namespace)
        self._namespace = namespace
        self.cron: Cron = namespace["sweep"].bound_to(host.runtime)
        self.running: Running[None] | None = None
        self.outcome: bool | Exception | None = None
        """Of one that was started for a slot."""

    def start(self) -> Process:
        self.running = self.world.start(lambda: self.cron.run(self.ctx), self.host.name)
        return self

    def start_for_a_slot(self) -> Process:
        def run_due() -> None:
            try:
                self.outcome = self.cron.run_due(self.ctx)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.outcome = error

        self.running = self.world.start(run_due, self.host.name)
        return self

    def _run(self, ctx: Ctx) -> object:
        self.began.append(self.world.clock.wall())
        if self.cron.config.singleflight:
            self.fences.append(ctx.fence)
            with self.world.meter.running(ctx):
                return self._fn(ctx)
        return self._fn(ctx)

    @property
    def ran(self) -> list[datetime]:
        """The slots that it has run."""
        return [event.slot for event in self.host.told(CronRan)]


class Shop(World):
    """An application on simulated hosts. It is a minute past a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[Process] = []
        now = self.clock.wall()
        hour = now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        self.clock.step_wall((hour - now).total_seconds() + 60)
        self.hour = hour

    def process(
        self,
        fn: Callable[[Ctx], object] | None = None,
        config: CronConfig = ONCE,
        schedule: str = FIVE,
        start: Callable[[Process], Process] = Process.start,
        **of_host: Any,
    ) -> Process:
        host = self.host(f"process {len(self.processes)}", **of_host)
        process = Process(self, host, fn, config, schedule)
        self.processes.append(process)
        return start(process)

    def at(self, minute: float) -> datetime:
        return self.hour + timedelta(minutes=minute)

    def advance_to(self, minute: float) -> None:
        self.advance((self.at(minute) - self.clock.wall()).total_seconds())

    def memo(self) -> dict[str, Any]:
        content = read(self.store.read(KEY, timeout=1.0))
        assert isinstance(content, Record)
        import json

        memo: dict[str, Any] = json.loads(content.memo)
        return memo


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    yield shop
    for process in shop.processes:
        process.host.storage.release_all()
        process.host.storage.heal()
        process.ctx.cancel()
    shop.advance(600 + TTL)
    shop.meter.check()
    for process in shop.processes:
        assert process.running is not None and process.running.done, "it has not ended"
        process.running.result()
    assert not shop.clock.waiters, "something goes on after the end"


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503")


def denied() -> BackendDeniedError:
    return BackendDeniedError("403 forbidden")


# --- Once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [0.0, 0.2, 2.0, 20.0])
def test_a_hundred_slots_are_a_hundred_runs_however_far_the_clocks_are_apart(
    shop: Shop, apart: float
) -> None:
    processes = [shop.process(wall_offset=apart * number) for number in range(3)]
    shop.advance(100 * 300)
    ran = Counter(slot for process in processes for slot in process.ran)
    assert sorted(ran) == [shop.at(5 * number) for number in range(1, 101)]
    assert set(ran.values()) == {1}
    assert not any(process.host.told(CronMissed) for process in processes)


def test_without_single_flight_each_process_runs_each_slot_and_asks_no_storage(
    shop: Shop,
) -> None:
    processes = [shop.process(config=CronConfig()) for _ in range(2)]
    shop.advance(10 * 300)
    assert [len(process.ran) for process in processes] == [10, 10]
    assert not any(process.host.requests() for process in processes)


def test_the_ctx_is_the_current_one_either_way(shop: Shop) -> None:
    found: list[bool] = []

    def fn(ctx: Ctx) -> None:
        found.append(current_ctx() is ctx)

    shop.process(fn)
    shop.process(fn, CronConfig())
    shop.advance_to(6)
    assert found == [True, True]


def test_the_record_tells_the_last_slot_its_result_and_who_ran_it(shop: Shop) -> None:
    process = shop.process(lambda ctx: ctx.wait(3))
    shop.advance_to(5.02)
    assert shop.memo() == {"slot": stamp(shop.at(5)), "state": "running", "tries": 1}
    shop.advance_to(6)
    memo = shop.memo()
    assert memo["slot"] == stamp(shop.at(5)) and memo["state"] == "done"
    assert memo["seconds"] == 3.0 and memo["by"].count(":") == 2
    last = process.cron.last()
    assert last is not None and (last.slot, last.state, last.seconds) == (shop.at(5), "done", 3.0)


def test_what_it_raises_is_told_and_remembered_and_the_slot_counts_as_run(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    def fall(ctx: Ctx) -> None:
        raise ValueError("no carts")

    processes = [shop.process(fall) for _ in range(2)]
    shop.advance_to(9)
    assert sum(len(process.began) for process in processes) == 1
    assert shop.memo()["state"] == "failed" and shop.memo()["error"] == "ValueError: no carts"
    assert any(record.exc_info for record in caplog.records)
    shop.advance_to(11)
    assert sum(len(process.began) for process in processes) == 2, "the next slot is another one"


# --- Missed, late and overlapping --------------------------------------------------------------


def test_a_job_longer_than_two_intervals_overlaps_nothing_and_is_caught_up_once(
    shop: Shop,
) -> None:
    process = shop.process(lambda ctx: ctx.wait(2.5 * 300))
    shop.advance_to(45)
    began = [(moment - shop.hour).total_seconds() / 60 for moment in process.began]
    assert began == pytest.approx([5, 17.5, 30, 42.5], abs=0.2)
    missed = [slot for event in process.host.told(CronMissed) for slot in event.slots]
    assert missed == [shop.at(10), shop.at(20), shop.at(25), shop.at(35)]
    assert process.ran == [shop.at(5), shop.at(15), shop.at(30)]


def test_so_it_is_with_several_processes(shop: Shop) -> None:
    processes = [shop.process(lambda ctx: ctx.wait(2.5 * 300)) for _ in range(3)]
    shop.advance_to(60)
    began = sorted(moment for process in processes for moment in process.began)
    gaps = [(b - a).total_seconds() for a, b in pairwise(began)]
    assert all(gap >= 2.5 * 300 for gap in gaps), "no overlap"
    assert all(gap <= 3 * 300 + 2 * POLL for gap in gaps)


def test_a_job_that_may_not_be_caught_up_waits_for_its_next_time(shop: Shop) -> None:
    config = CronConfig(singleflight=True, catch_up=0)
    process = shop.process(lambda ctx: ctx.wait(2.5 * 300), config)
    shop.advance_to(50)
    began = [(moment - shop.hour).total_seconds() / 60 for moment in process.began]
    assert began == pytest.approx([5, 20, 35, 50], abs=0.2)


def test_a_process_asleep_over_five_slots_runs_the_last_and_tells_the_others(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    process = shop.process()
    shop.advance_to(6)
    shop.clock.step_wall(5 * 300)
    shop.advance(60)
    assert process.ran == [shop.at(5), shop.at(30)]
    (told,) = process.host.told(CronMissed)
    assert told.slots == tuple(shop.at(minute) for minute in (10, 15, 20, 25))
    assert stamp(shop.at(15)) in told.message


def test_slots_only_go_forward_when_the_clock_is_set_back(shop: Shop) -> None:
    process = shop.process()
    shop.advance_to(11)
    shop.clock.step_wall(-360)
    shop.advance(30 * 60)
    slots = process.ran
    assert slots == sorted(set(slots))
    assert slots[:3] == [shop.at(5), shop.at(10), shop.at(15)]


@pytest.mark.parametrize("config", [ONCE, CronConfig()], ids=["single flight", "each"])
def test_a_clock_that_was_set_far_back_keeps_its_cron_from_running_and_it_says_so_once(
    shop: Shop, config: CronConfig
) -> None:
    process = shop.process(config=config)
    shop.advance_to(11)
    shop.clock.step_wall(-2 * 86400)
    shop.advance(3600)
    assert len(process.ran) == 2
    (told,) = process.host.told(CronAhead)
    assert told.slot == process.ran[-1] and told.ahead == pytest.approx(2 * 86400, abs=400)


def test_a_slot_that_was_run_by_a_clock_years_ahead_is_told_of_and_can_be_forgotten(
    shop: Shop,
) -> None:
    year = 365 * 86400.0
    ahead = shop.process(wall_offset=year)
    shop.advance_to(6)
    (wrong,) = ahead.ran
    ahead.ctx.cancel()
    right = [shop.process() for _ in range(2)]
    shop.advance_to(21)
    assert not any(process.began for process in right)
    for process in right:
        (told,) = process.host.told(CronAhead)
        assert (told.slot == wrong and ahead.host.name in told.message) or told.by
    last = right[0].cron.last()
    assert last is not None and last.slot == wrong
    right[1].cron.forget(last)
    with pytest.raises(UsageError, match="any more"):
        right[0].cron.forget(last)
    shop.advance_to(36)
    ran = [slot for process in right for slot in process.ran]
    assert sorted(ran) == [shop.at(25), shop.at(30), shop.at(35)]


def test_clocks_that_are_seconds_apart_are_not_told_of(shop: Shop) -> None:
    processes = [shop.process(wall_offset=offset) for offset in (0.0, 20.0)]
    shop.advance_to(31)
    assert not any(process.host.told(CronAhead) for process in processes)


def test_of_more_than_a_hundred_missed_slots_the_last_is_told_too(shop: Shop) -> None:
    process = shop.process(schedule="* * * * *")
    shop.advance_to(3.5)
    shop.clock.step_wall(300 * 60)
    shop.advance(60)
    (missed,) = process.host.told(CronMissed)
    assert len(missed.slots) == 100 and missed.slots[0] == shop.at(4)
    assert missed.until is not None and missed.until > missed.slots[-1]
    assert process.ran[-1] - missed.until <= timedelta(minutes=2)
    assert f"and all up to {stamp(missed.until)}" in missed.message


def test_started_for_a_slot_after_a_change_by_half_an_hour_it_runs_that(shop: Shop) -> None:
    at = datetime.fromisoformat("2026-04-04 15:00:03+00:00")
    shop.clock.step_wall((at - shop.clock.wall()).total_seconds())
    config = CronConfig(singleflight=True, tz="Australia/Lord_Howe")
    process = shop.process(None, config, "30 * * * *", Process.start_for_a_slot)
    shop.advance(10)
    assert process.outcome is True
    assert process.ran == [at.replace(second=0)] and not process.host.told(CronMissed)


def test_a_new_process_ten_seconds_after_a_slot_leaves_it_alone_if_it_was_run(
    shop: Shop,
) -> None:
    shop.process()
    shop.advance_to(5 + 1 / 6)
    newcomer = shop.process()
    shop.advance_to(9)
    assert not newcomer.began
    assert len(newcomer.host.requests()) == 1


def test_it_runs_a_slot_that_came_while_no_process_was_up(shop: Shop) -> None:
    first = shop.process()
    shop.advance_to(6)
    first.ctx.cancel()
    shop.advance_to(10 + 1 / 6)
    newcomer = shop.process()
    shop.advance_to(11)
    assert newcomer.ran == [shop.at(10)]


def test_the_first_process_ever_runs_nothing_that_was_before_it(shop: Shop) -> None:
    process = shop.process()
    shop.advance_to(4.9)
    assert not process.began


# --- Cut short ---------------------------------------------------------------------------------


def dies_at_first(shop: Shop) -> Callable[[Ctx], object]:
    """A function whose first run never ends, and whose process is cut off from the storage."""
    finish = Flag()

    def fn(ctx: Ctx) -> None:
        if not fn.__dict__:
            fn.__dict__["begun"] = True
            for process in shop.processes:
                if len(process.began) > 0:
                    process.host.storage.always("*", fail(unavailable))
            shop.clock.wait(finish, 600)

    return fn


def test_a_slot_whose_holder_dies_is_run_once_more_within_its_time(shop: Shop) -> None:
    fn = dies_at_first(shop)
    processes = [shop.process(fn) for _ in range(2)]
    shop.advance_to(6)
    began = [process for process in processes if process.began]
    assert len(began) == 2, "the other one has run it again"
    assert shop.memo() | {"by": "", "seconds": 0} == {
        "slot": stamp(shop.at(5)),
        "state": "done",
        "tries": 2,
        "by": "",
        "seconds": 0,
    }
    fences = [process.fences[0] for process in processes]
    assert len(set(fences)) == 2


def test_or_not_if_it_is_to_be_run_at_most_once(shop: Shop) -> None:
    fn = dies_at_first(shop)
    config = CronConfig(singleflight=True, on_crash="skip")
    processes = [shop.process(fn, config) for _ in range(2)]
    shop.advance_to(9)
    (survivor,) = [process for process in processes if not process.began]
    (told,) = survivor.host.told(CronCutShort)
    assert (told.slot, told.tries) == (shop.at(5), 1)
    shop.advance_to(10.5)
    assert survivor.ran == [shop.at(10)]


def test_one_that_is_cut_short_twice_is_given_up(shop: Shop) -> None:
    def fn(ctx: Ctx) -> None:
        for process in shop.processes:
            if process.fences and process.fences[-1] == ctx.fence:
                process.host.storage.always("*", fail(unavailable))
        shop.clock.wait(Flag(), 600)

    processes = [shop.process(fn) for _ in range(3)]
    shop.advance_to(9)
    assert sorted(len(process.began) for process in processes) == [0, 1, 1]
    (told,) = [event for process in processes for event in process.host.told(CronCutShort)]
    assert told.tries == 2


def test_a_shutdown_in_a_run_drains_it_and_another_process_runs_the_slot_again(
    shop: Shop,
) -> None:
    causes: list[str] = []

    def fn(ctx: Ctx) -> None:
        if ctx.wait(60):
            causes.append(str(ctx.cause))
            shop.clock.wait(Flag(), 5)

    processes = [shop.process(fn) for _ in range(2)]
    shop.advance_to(5.5)
    (holder,) = [process for process in processes if process.began]
    holder.ctx.cancel(ShutdownError("the process was sent SIGTERM"))
    shop.advance(4)
    assert sum(len(process.began) for process in processes) == 1, "it drains"
    shop.advance(1 + POLL + 61)
    (other,) = [process for process in processes if process is not holder]
    assert causes == ["the process was sent SIGTERM"]
    assert other.ran == [shop.at(5)] and shop.memo()["tries"] == 2


# --- The storage's faults ----------------------------------------------------------------------


def test_a_storage_that_refuses_is_told_once_and_the_next_slot_is_tried(shop: Shop) -> None:
    host = shop.host()
    host.storage.always("*", fail(denied))
    process = Process(shop, host, None, ONCE, FIVE)
    shop.processes.append(process.start())
    shop.advance_to(16)
    assert len(host.told(CronRefused)) == 1
    host.storage.heal()
    shop.advance_to(21)
    assert process.ran == [shop.at(20)]


def test_an_outage_that_ends_in_time_only_delays_the_slot(shop: Shop) -> None:
    process = shop.process()
    process.host.storage.always("*", fail(unavailable))
    shop.advance_to(7)
    assert not process.began
    process.host.storage.heal()
    shop.advance_to(7.5)
    assert process.ran == [shop.at(5)]


def test_one_that_lasts_over_the_next_slot_loses_it_and_says_so(shop: Shop) -> None:
    process = shop.process()
    process.host.storage.always("*", fail(unavailable))
    shop.advance_to(12)
    process.host.storage.heal()
    shop.advance_to(13)
    assert process.ran == [shop.at(10)]
    assert [event.slots for event in process.host.told(CronMissed)] == [(shop.at(5),)]


def test_a_reply_that_is_lost_runs_the_slot_once(shop: Shop) -> None:
    from tako_sync.testing.faults import applied_then

    process = shop.process()
    process.host.storage.script("write", applied_then(unavailable))
    shop.advance_to(6)
    assert process.ran == [shop.at(5)] and len(process.began) == 1
    assert shop.memo()["state"] == "done"


# --- Requests ----------------------------------------------------------------------------------


def test_a_slot_costs_the_runner_two_requests_and_each_other_process_one(shop: Shop) -> None:
    processes = [shop.process(wall_offset=-number) for number in range(3)]
    shop.advance_to(11)
    before = [len(process.host.requests()) for process in processes]
    shop.advance_to(16)
    since = [
        process.host.requests()[first:] for process, first in zip(processes, before, strict=True)
    ]
    assert since == [
        ["write", "write"],
        ["read"],
        ["read"],
    ]


def test_started_in_a_thread_it_stops(shop: Shop) -> None:
    process = Process(shop, shop.host(), None, ONCE, FIVE)
    runner = process.cron.start()
    assert process.cron.start() is runner
    shop.advance_to(6)
    assert process.ran == [shop.at(5)]
    stopping = shop.start(lambda: process.cron.stop(timeout=30), "stopping")
    shop.advance(1)
    assert stopping.result() is True and not runner.running


def test_a_run_is_narrated_in_one_line(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tako_sync"):
        shop.process(lambda ctx: ctx.wait(3))
        shop.advance_to(6)
    assert f"cron sweep, due {stamp(shop.at(5))}: ran for 3.000 s" in caplog.messages


# --- Started for one slot, by something else -------------------------------------------------

FOR_A_SLOT = Process.start_for_a_slot


def test_started_for_a_slot_it_runs_that_and_ends(shop: Shop) -> None:
    process = shop.process(start=FOR_A_SLOT)
    shop.advance(1)
    assert process.outcome is True
    assert process.ran == [shop.at(0)]
    assert process.running is not None and process.running.done


def test_started_twice_for_a_slot_it_runs_once(shop: Shop) -> None:
    """As Cloud Scheduler promises at least once."""
    first = shop.process(lambda ctx: ctx.wait(40), start=FOR_A_SLOT)
    second = shop.process(start=FOR_A_SLOT)  # while it runs
    shop.advance(60)
    third = shop.process(start=FOR_A_SLOT)  # when it has ended
    shop.advance(10)
    assert [process.outcome for process in (first, second, third)] == [True, False, False]
    assert [process.ran for process in shop.processes] == [[shop.at(0)], [], []]


def test_started_by_a_clock_that_is_ahead_it_waits_for_its_slot(shop: Shop) -> None:
    shop.advance_to(4.95)
    process = shop.process(start=FOR_A_SLOT)
    shop.advance_to(4.99)
    assert not process.began
    shop.advance_to(5.1)
    assert process.outcome is True
    assert process.ran == [shop.at(5)]


def test_started_too_late_it_says_so_and_runs_nothing(shop: Shop) -> None:
    process = shop.process(config=CronConfig(singleflight=True, catch_up=30), start=FOR_A_SLOT)
    shop.advance(1)
    assert process.outcome is False and not process.began
    (missed,) = process.host.told(CronMissed)
    assert missed.slots == (shop.at(0),) and "too late" in missed.why


def test_what_the_function_raises_is_raised_and_its_slot_counts_as_run(shop: Shop) -> None:
    def fail_(ctx: Ctx) -> None:
        raise ValueError("no carts")

    first = shop.process(fail_, start=FOR_A_SLOT)
    shop.advance(5)
    second = shop.process(start=FOR_A_SLOT)
    shop.advance(5)
    assert isinstance(first.outcome, ValueError) and second.outcome is False
    assert shop.memo()["state"] == "failed"


def test_one_that_is_told_to_end_in_its_run_says_so_and_its_retry_runs_the_slot_again(
    shop: Shop,
) -> None:
    first = shop.process(lambda ctx: ctx.wait(100), start=FOR_A_SLOT)
    shop.advance(10)
    first.ctx.cancel(ShutdownError("SIGTERM"))
    shop.advance(1)
    assert isinstance(first.outcome, ShutdownError)
    second = shop.process(start=FOR_A_SLOT)
    shop.advance(10)
    assert second.outcome is True
    assert shop.memo()["tries"] == 2


def test_one_whose_machine_dies_is_run_again_by_its_retry_when_the_lease_has_aged(
    shop: Shop,
) -> None:
    first = shop.process(lambda ctx: ctx.wait(400), start=FOR_A_SLOT)
    shop.advance(5)
    first.host.storage.always("*", fail(unavailable))
    second = shop.process(start=FOR_A_SLOT)
    shop.advance(2 * TTL)
    assert second.outcome is True and second.ran == [shop.at(0)]


def test_ended_while_it_waits_for_its_slot_it_says_that_it_has_not_run(shop: Shop) -> None:
    """A program that ended well would not be started again for it."""
    shop.advance_to(4.95)
    early = shop.process(start=FOR_A_SLOT)
    shop.advance(1)
    early.ctx.cancel()
    shop.advance(10)
    assert isinstance(early.outcome, CtxCancelledError) and not early.began


def test_a_storage_that_refuses_is_raised(shop: Shop) -> None:
    host = shop.host("refused")
    host.storage.always("*", fail(denied))
    process = Process(shop, host, None, ONCE, FIVE)
    shop.processes.append(process)
    process.start_for_a_slot()
    shop.advance(10)
    assert isinstance(process.outcome, BackendDeniedError)


def test_an_earlier_slot_that_takes_all_its_time_is_told_as_the_cause(shop: Shop) -> None:
    shop.process(lambda ctx: ctx.wait(700), start=FOR_A_SLOT)
    shop.advance_to(5.1)
    late = shop.process(start=FOR_A_SLOT)
    shop.advance_to(10.5)
    assert isinstance(late.outcome, CampaignTimeoutError)
    assert not late.began


def test_without_single_flight_it_runs_the_slot_and_asks_no_storage(shop: Shop) -> None:
    process = shop.process(config=CronConfig(), start=FOR_A_SLOT)
    shop.advance(1)
    assert process.outcome is True and process.host.requests() == []
