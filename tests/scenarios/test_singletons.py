"""Singleton: always exactly one loop, whatever ends it, and never a second one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit import Host, Running, World
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    HandoverRequestedError,
    LossReason,
    ShutdownError,
)
from tako_sync.events import (
    Lost,
    SingletonDown,
    SingletonRefused,
    SingletonReturned,
    SingletonUp,
)
from tako_sync.flag import Flag
from tako_sync.record import Record, State, read
from tako_sync.singleton import Singleton, SingletonConfig
from tako_sync.testing.faults import fail

KEY = "run-shop-test-singleton-invoicer"
TTL, POLL, RESTART = 30.0, 2.5, 6.25
"""Seconds; the latter two are the longest that the jitter makes them."""


class Process:
    """One process of the application: a host with its Singleton, running in a thread."""

    def __init__(
        self,
        world: World,
        host: Host,
        body: Callable[[Ctx], object] | None = None,
        config: SingletonConfig | None = None,
    ) -> None:
        self.world = world
        self.host = host
        self.began: list[float] = []
        self.ended: list[float] = []
        self.ctx = Ctx.background(world.clock)
        self._body = body or self.loop
        namespace: dict[str, Any] = {
            "__name__": "shop",
            "__file__": "shop.py",
            "Singleton": Singleton,
            "body": self._run,
            "config": config,
        }
        exec("invoicer = Singleton(body, config)", namespace)
        self._declared: Singleton = namespace["invoicer"]
        self._namespace = namespace
        self.singleton = self._declared.bound_to(host.runtime)
        self.running: Running[None] | None = None

    def start(self) -> Process:
        self.running = self.world.start(lambda: self.singleton.run(self.ctx), self.host.name)
        return self

    def loop(self, ctx: Ctx) -> None:
        while not ctx.wait(2.0):
            pass

    def _run(self, ctx: Ctx) -> object:
        with self.world.meter.running(ctx):
            self.began.append(self.world.clock.monotonic())
            try:
                return self._body(ctx)
            finally:
                self.ended.append(self.world.clock.monotonic())

    @property
    def runs(self) -> bool:
        return len(self.began) > len(self.ended)


class Shop(World):
    """An application on simulated hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[Process] = []

    def process(
        self,
        body: Callable[[Ctx], object] | None = None,
        config: SingletonConfig | None = None,
        **of_host: Any,
    ) -> Process:
        host = self.host(f"process {len(self.processes)}", **of_host)
        process = Process(self, host, body, config)
        self.processes.append(process)
        return process.start()

    @property
    def running(self) -> list[Process]:
        return [process for process in self.processes if process.runs]

    def record(self) -> Record:
        content = read(self.store.read(KEY, timeout=1.0))
        assert isinstance(content, Record)
        return content


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    yield shop
    for process in shop.processes:
        process.host.storage.release_all()
        process.host.storage.heal()
        process.ctx.cancel()
    shop.advance(3 * TTL)
    shop.meter.check()
    for process in shop.processes:
        assert process.running is not None and process.running.done, "it has not ended"
        process.running.result()
    assert not shop.clock.waiters, "something goes on after the end"


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503")


def denied() -> BackendDeniedError:
    return BackendDeniedError("403 forbidden")


def fall(ctx: Ctx) -> None:
    raise ValueError("no database")


# --- Exactly one -------------------------------------------------------------------------------


def test_of_three_processes_one_runs_the_loop(shop: Shop) -> None:
    processes = [shop.process() for _ in range(3)]
    shop.advance(10 * TTL)
    assert shop.running == [processes[0]]
    assert [len(process.began) for process in processes] == [1, 0, 0]
    assert [str(process.singleton.health()) for process in processes[1:]] == 2 * [
        f"standby: held by {shop.record().owner}"
    ]
    assert processes[0].singleton.health().state == "healthy"


def test_registered_twice_in_one_process_it_runs_once(shop: Shop) -> None:
    first = shop.process()
    second = Process(shop, first.host)
    shop.processes.append(second)
    second.start()
    shop.advance(5 * TTL)
    assert len(shop.running) == 1
    assert first.host.storage.count("read") == 1, "and the second costs no request"


def test_the_holder_of_the_lease_is_found(shop: Shop) -> None:
    process = shop.process()
    holder = process.singleton.holder()
    assert holder is not None and holder.owner == shop.record().owner
    assert shop.record().identity.name == "singleton-invoicer"


# --- Restarts ----------------------------------------------------------------------------------


def test_a_loop_that_returns_is_narrated_and_restarted_in_five_seconds(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tako_sync"):
        process = shop.process(lambda ctx: ctx.wait(1))
        shop.advance(1)
    assert "♾ singleton invoicer returned — restarting in 5s." in caplog.messages
    shop.advance(RESTART)
    assert len(process.began) == 2


def returns(ctx: Ctx) -> None:
    return


def exits(ctx: Ctx) -> None:
    raise SystemExit(1)


@pytest.mark.parametrize("body", [returns, fall, exits])
def test_one_that_ends_at_once_starts_at_most_each_five_seconds(
    shop: Shop, body: Callable[[Ctx], object]
) -> None:
    process = shop.process(body)
    shop.advance(100)
    gaps = [b - a for a, b in zip(process.began, process.began[1:], strict=False)]
    assert all(5 <= gap <= RESTART for gap in gaps)
    assert 16 <= len(process.began) <= 21
    assert process.host.storage.count("write") <= 2 * len(process.began)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_setting_the_time_of_day_in_the_pause_changes_nothing(shop: Shop, step: float) -> None:
    process = shop.process(returns)
    shop.advance(1)
    shop.clock.step_wall(step)
    shop.advance(RESTART - 1)
    assert len(process.began) == 2
    assert 5 <= process.began[1] - process.ended[0] <= RESTART


def test_the_lease_is_given_up_for_the_pause_so_a_healthy_process_takes_over(shop: Shop) -> None:
    ill = shop.process(fall)
    well = shop.process()
    shop.advance(RESTART + POLL)
    assert well.runs, "within a poll of the failure"
    shop.advance(10 * TTL)
    assert shop.running == [well]
    assert len(ill.began) <= 2


def test_what_it_raises_is_logged_with_its_traceback(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    process = shop.process(fall)
    shop.advance(0)
    (told,) = process.host.told(SingletonReturned)
    assert "failed with ValueError: no database" in told.message
    (shown,) = [record for record in caplog.records if record.exc_info]
    assert "no database" in str(shown.exc_info)


def test_ctrl_c_ends_it_and_leaves_the_lease_free(shop: Shop) -> None:
    """In the main thread, which this test is in; the clock is the machine's."""
    host = shop.host()

    def strike(ctx: Ctx) -> None:
        raise KeyboardInterrupt

    process = Process(shop, host, strike)
    with pytest.raises(KeyboardInterrupt):
        process.singleton.run()
    assert shop.record().state is State.RELEASED


# --- Losses ------------------------------------------------------------------------------------


def breaks(shop: Shop, holder: Process) -> None:
    shown = holder.singleton.holder()
    assert shown is not None
    lock = holder.host.lock()
    lock._name = "singleton-invoicer"
    lock.break_(shown)
    shop.advance(15)


def cuts_off(shop: Shop, holder: Process) -> None:
    holder.host.storage.always("*", fail(unavailable))
    shop.advance(TTL + POLL)
    holder.host.storage.heal()


def denies(shop: Shop, holder: Process) -> None:
    holder.host.storage.always("*", fail(denied))
    shop.advance(2 * TTL)
    holder.host.storage.heal()


def fails_everywhere(shop: Shop, holder: Process) -> None:
    for process in shop.processes:
        process.host.storage.always("*", fail(denied))
    shop.advance(2 * TTL)
    for process in shop.processes:
        process.host.storage.heal()


LOSSES = [breaks, cuts_off, denies, fails_everywhere]


@pytest.mark.parametrize("lose", LOSSES)
def test_after_ten_losses_every_process_still_campaigns(
    shop: Shop, lose: Callable[[Shop, Process], None]
) -> None:
    for _ in range(3):
        shop.process()
    for _ in range(10):
        (holder,) = shop.running
        lose(shop, holder)
        shop.advance(TTL + RESTART + POLL)
        assert len(shop.running) == 1
        assert sum(map(len, (p.host.told(Lost) for p in shop.processes))) >= 1
    assert all(
        process.running is not None and not process.running.done for process in shop.processes
    )


def test_a_loop_that_lost_its_lease_is_not_restarted_before_it_has_ended(shop: Shop) -> None:
    deaf, finish = [], Flag()

    def body(ctx: Ctx) -> None:
        deaf.append(ctx)
        shop.clock.wait(finish)

    first, second = shop.process(body), shop.process()
    breaks(shop, first)
    shop.advance(TTL + POLL)
    assert second.runs and deaf[0].cancelled
    assert len(first.began) == 1
    assert first.singleton.health().reason.startswith("its loop is to end, and has not")
    finish.set()
    shop.advance(RESTART)
    assert first.host.told(SingletonReturned)[0].error.reason is LossReason.BROKEN


def test_a_storage_that_refuses_is_told_once_and_asked_each_five_seconds(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    host = shop.host()
    host.storage.always("*", fail(denied))
    process = Process(shop, host)
    shop.processes.append(process)
    process.start()
    shop.advance(60)
    (told,) = host.told(SingletonRefused)
    assert "singleton invoicer cannot campaign (BackendDeniedError: 403 forbidden)" in told.message
    assert 9 <= len(host.requests()) <= 13
    host.storage.heal()
    shop.advance(RESTART)
    assert process.runs, "it has not dropped out"


# --- Shutdown and hand-over --------------------------------------------------------------------


def test_stopped_it_drains_under_a_lease_that_is_renewed_and_then_the_next_enters(
    shop: Shop,
) -> None:
    causes: list[BaseException | None] = []

    def body(ctx: Ctx) -> None:
        ctx.wait(1000)
        causes.append(ctx.cause)
        shop.clock.wait(Flag(), 100)  # it drains for more than three ttls

    first, second = shop.process(body), shop.process()
    shop.advance(10)
    first.ctx.cancel(ShutdownError("the process was sent SIGTERM"))
    shop.advance(99)
    assert shop.running == [first] and shop.record().state is State.HELD
    shop.advance(1 + POLL)
    assert [str(cause) for cause in causes] == ["the process was sent SIGTERM"]
    assert shop.running == [second], "within one poll"
    assert first.running is not None
    first.running.result()
    assert not first.host.told(SingletonReturned), "it is not restarted"


def test_a_body_that_will_not_stop_keeps_its_lease(shop: Shop) -> None:
    finish = Flag()
    first, second = shop.process(lambda ctx: shop.clock.wait(finish)), shop.process()
    first.ctx.cancel()
    shop.advance(20 * TTL)
    assert shop.running == [first] and not second.began
    finish.set()
    shop.advance(POLL)
    assert shop.running == [second]


def test_a_hand_over_that_is_asked_for_goes_to_another_process(shop: Shop) -> None:
    causes: list[BaseException | None] = []

    def body(ctx: Ctx) -> None:
        ctx.wait(1000)
        causes.append(ctx.cause)
        ctx.check()

    first, second = shop.process(body), shop.process()
    shown = second.singleton.holder()
    assert shown is not None
    second.singleton.request_handover(shown, by="revision 2")
    shop.advance(TTL / 3 + POLL)
    assert shop.running == [second]
    assert isinstance(causes[0], HandoverRequestedError) and "revision 2" in str(causes[0])
    (told,) = first.host.told(SingletonReturned)
    assert told.error is None and told.level == logging.INFO


# --- A dead loop under a live heartbeat --------------------------------------------------------


def test_a_loop_that_is_not_heard_of_loses_its_lease_and_another_takes_over(shop: Shop) -> None:
    stuck = Flag()

    def body(ctx: Ctx) -> None:
        for _ in range(3):
            ctx.wait(8)
            ctx.beat()
        shop.clock.wait(stuck)

    watched = SingletonConfig(max_silence=10)
    first = shop.process(body, watched)
    second = shop.process()
    shop.advance(24 + 9.9)
    assert not first.host.told(Lost)
    shop.advance(0.2)
    (lost,) = first.host.told(Lost)
    assert lost.reason is LossReason.SILENT and lost.level == logging.ERROR
    shop.advance(TTL + POLL)
    assert second.runs
    stuck.set()
    shop.advance(RESTART)
    assert first.host.told(SingletonReturned)[0].error.reason is LossReason.SILENT


def test_one_that_beats_keeps_it(shop: Shop) -> None:
    def body(ctx: Ctx) -> None:
        while not ctx.wait(9):
            ctx.beat()

    process = shop.process(body, SingletonConfig(max_silence=10))
    shop.advance(20 * TTL)
    assert process.runs and len(process.began) == 1


def test_a_beat_after_the_end_revives_nothing(shop: Shop) -> None:
    kept: list[Ctx] = []
    finish = Flag()

    def body(ctx: Ctx) -> None:
        kept.append(ctx)
        shop.clock.wait(finish)
        ctx.beat()

    process = shop.process(body, SingletonConfig(max_silence=10))
    shop.advance(11)
    finish.set()
    shop.advance(1)
    assert kept[0].cancelled
    assert process.host.told(Lost)[0].reason is LossReason.SILENT


# --- Down --------------------------------------------------------------------------------------


def test_a_loop_that_fails_at_once_everywhere_is_down_and_up_again_when_it_runs(
    shop: Shop,
) -> None:
    ill = [True]

    def body(ctx: Ctx) -> None:
        if ill:
            raise ValueError("no database")
        ctx.wait(1000)

    processes = [shop.process(body, SingletonConfig(down_after=60)) for _ in range(2)]
    shop.advance(59)
    assert not any(process.host.told(SingletonDown) for process in processes)
    shop.advance(20)
    for process in processes:
        (told,) = process.host.told(SingletonDown)
        assert "singleton invoicer is down: its loop has not been running anywhere" in told.message
        assert process.singleton.health().state == "down"
        assert not process.singleton.health()
    ill.clear()
    shop.advance(60)
    assert [len(process.host.told(SingletonUp)) for process in processes] == [1, 1]
    assert {process.singleton.health().state for process in processes} == {"healthy", "standby"}


def test_a_storage_that_cannot_be_reached_is_seen_as_down_from_a_standby(shop: Shop) -> None:
    shop.process()
    standby = shop.process(config=SingletonConfig(down_after=60))
    shop.advance(100)
    assert standby.singleton.health().state == "standby"
    standby.host.storage.always("*", fail(unavailable))
    shop.advance(100)
    assert len(standby.host.told(SingletonDown)) == 1
    standby.host.storage.heal()
    shop.advance(30)
    assert len(standby.host.told(SingletonUp)) == 1


def test_a_long_run_and_a_quick_failure_do_not_make_it_down(shop: Shop) -> None:
    process = shop.process(lambda ctx: ctx.wait(20), SingletonConfig(down_after=30))
    shop.advance(300)
    assert not process.host.told(SingletonDown)


def test_a_loop_that_ignores_its_loss_needs_a_new_process_and_its_health_says_so(
    shop: Shop,
) -> None:
    """For whoever restarts processes: only this is a reason to, not that the storage is away."""
    hung = Flag()

    def ignore(ctx: Ctx) -> None:
        shop.clock.wait(hung)

    deaf = shop.process(ignore)
    shop.advance(20)
    other = shop.process()
    deaf.host.storage.always("*", fail(unavailable))
    shop.advance(2 * TTL)
    assert other.runs and deaf.singleton.health().alive, "it may yet end"
    shop.advance(60)
    health = deaf.singleton.health()
    assert not health.alive and "is to end, and has not" in health.reason
    assert other.singleton.health().alive
    hung.set()
    shop.advance(RESTART + POLL)
    assert deaf.singleton.health().alive


def test_neither_an_outage_nor_a_standby_nor_a_failing_loop_is_a_reason_to_restart_a_process(
    shop: Shop,
) -> None:
    holder, standby = shop.process(fall), shop.process(fall)
    shop.advance(100)
    for process in shop.processes:
        process.host.storage.always("*", fail(unavailable))
    shop.advance(100)
    for process in (holder, standby):
        health = process.singleton.health()
        assert health.state == "down" and health.alive


def test_what_has_ended_is_down_and_does_nothing_here(shop: Shop) -> None:
    process = shop.process()
    shop.advance(10)
    process.ctx.cancel()
    shop.advance(1)
    health = process.singleton.health()
    assert health.state == "down" and not health.alive
    assert "not run by this process any more" in health.reason


def test_what_was_not_started_is_down(shop: Shop) -> None:
    process = Process(shop, shop.host())
    assert str(process.singleton.health()) == "down: it was not started in this process"


# --- In a thread -------------------------------------------------------------------------------


def test_started_twice_it_is_one_thread_and_stop_waits_for_it(shop: Shop) -> None:
    process = Process(shop, shop.host())
    runner = process.singleton.start()
    assert process.singleton.start() is runner
    shop.advance(10)
    assert process.runs and runner.running
    stopping = shop.start(lambda: process.singleton.stop(timeout=30), "stopping")
    shop.advance(1)
    assert stopping.result() is True
    assert not runner.running and not process.runs
    assert shop.record().state is State.RELEASED
    again = process.singleton.start()
    shop.advance(POLL)  # held for ten seconds, it leaves the name to others for a poll
    assert again is not runner and process.runs
    again.stop(timeout=0)
    shop.advance(5)
    assert not again.running


def test_started_again_while_it_drains_it_goes_on_behind_that(shop: Shop) -> None:
    def drains(ctx: Ctx) -> None:
        ctx.wait(1e9)
        shop.clock.wait(Flag(), 10)

    process = Process(shop, shop.host(), drains)
    first = process.singleton.start()
    shop.advance(1)
    assert process.singleton.stop(timeout=0) is False
    second = process.singleton.start()
    assert second is not first and process.singleton.start() is second
    shop.advance(5)
    assert first.running and second.running
    shop.advance(10 + POLL)
    assert not first.running and process.singleton.holder() is not None
    stopping = shop.start(lambda: process.singleton.stop(timeout=60), "stopping")
    shop.advance(20)
    assert stopping.result() is True
    assert process.singleton.holder() is None


def test_stopped_twice_and_started_between_it_has_ended_when_it_says_so(shop: Shop) -> None:
    def drains(ctx: Ctx) -> None:
        ctx.wait(1e9)
        shop.clock.wait(Flag(), 10)

    process = Process(shop, shop.host(), drains)
    first = process.singleton.start()
    shop.advance(1)
    process.singleton.stop(timeout=0)
    process.singleton.start()
    stopping = shop.start(lambda: process.singleton.stop(timeout=60), "stopping")
    shop.advance(5)
    assert not stopping.done, "for the first drains"
    shop.advance(10)
    assert stopping.result() is True and not first.running


def test_stopped_by_its_own_loop_it_does_not_wait_for_itself(shop: Shop) -> None:
    process: Process
    told: list[bool] = []

    def stops(ctx: Ctx) -> None:
        told.append(process.singleton.stop())

    process = Process(shop, shop.host(), stops)
    runner = process.singleton.start()
    shop.advance(1)
    assert told == [False] and not runner.running
    assert process.singleton.holder() is None
