"""Crons in real processes, as the workers of a web server are: each tick is one run."""

from __future__ import annotations

import os
import signal
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from every import Every
from processes.kit_processes import Crew, Post, Report, Worker, check_order, clock
from tako_sync.cron import Cron, CronConfig
from tako_sync.ctx import Ctx
from tako_sync.events import CronMissed, CronRan, Event
from tako_sync.policy import LeasePolicy
from tako_sync.record import moment, stamp
from tako_sync.runtime import Runtime
from tako_sync.shutdown import install_signal_handlers

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no such processes here")

TTL = 2.0
WORKERS = 4
TICKS = 20


_here: list[tuple[Post, float, Cron]] = []


def _swept(ctx: Ctx) -> None:
    ((post, takes, cron),) = _here
    with post.running(ctx):
        run = cron.last()
        assert run is not None
        post.report("slot", slot=stamp(run.slot), tries=run.tries)
        ctx.wait(takes)


sweep = Cron("* * * * *", _swept, CronConfig(singleflight=True))


def prepared(post: Post, leases: str, takes: float, apart: int) -> Cron:
    def tell(event: Event) -> None:
        if isinstance(event, CronRan):
            post.report("ran", slot=stamp(event.slot), failed=repr(event.error or ""))
        if isinstance(event, CronMissed):
            post.report("missed", slots=[stamp(slot) for slot in event.slots])

    runtime = Runtime(
        post.runtime(leases, TTL, 0.1).backend,
        app="shop",
        env="test",
        policy=LeasePolicy(ttl=TTL, poll=0.1),
        clock=clock,
        listeners=[tell, post.tell],
    )
    sweep.schedule = Every(apart)
    bound = sweep.bound_to(runtime)
    _here[:] = [(post, takes, bound)]
    return bound


def worker(post: Post, leases: str, takes: float, apart: int) -> None:
    cron = prepared(post, leases, takes, apart)
    install_signal_handlers()
    cron.run()


def preloaded(post: Post, leases: str, takes: float) -> None:
    """A master that has made everything, and started nothing, forks its workers."""
    cron = prepared(post, leases, takes, apart=1)
    for number in range(WORKERS):
        if os.fork() == 0:
            post.name = f"child {number}"
            install_signal_handlers()
            runner = cron.start()
            post.report("up")
            runner.wait()
            os._exit(0)
    post.order()
    os.killpg(os.getpid(), signal.SIGTERM)


def slots(reports: list[Report]) -> Counter[datetime]:
    found = [moment(report["slot"]) for report in reports if report["what"] == "ran"]
    return Counter(slot for slot in found if slot is not None)


def each_once(reports: list[Report], apart: int = 1) -> None:
    """No slot ran twice, and none was left out but by a machine so busy that all came too late."""
    ran = slots(reports)
    told = {
        moment(slot) for report in reports if report["what"] == "missed" for slot in report["slots"]
    }
    slot = min(ran)
    while slot < max(ran):
        assert ran[slot] == 1 or (ran[slot] == 0 and slot in told), f"{slot}: {ran[slot]} runs"
        slot += timedelta(seconds=apart)
    assert set(ran.values()) == {1}


def started(crew: Crew, *arguments: object) -> list[Worker]:
    """Return workers that are inside their ``run``: SIGTERM before that ends them with 143."""
    workers = [crew.start(worker, *arguments) for _ in range(WORKERS)]
    for one in workers:
        one.expect("request")
    return workers


def test_four_processes_with_the_same_cron_run_each_tick_once(crew: Crew, tmp_path: Path) -> None:
    leases = str(tmp_path / "leases.sqlite3")
    workers = started(crew, leases, 0.005, 1)
    while len(slots(crew.reports)) < TICKS:
        workers[0].expect("request")
    for one in workers:
        one.send(signal.SIGTERM)
    for one in workers:
        one.ends_well()
    each_once(crew.reports)
    check_order(crew.reports)


def test_so_do_four_workers_of_one_preloaded_master(crew: Crew, tmp_path: Path) -> None:
    """APScheduler runs a job once per worker there."""
    master = crew.start(preloaded, str(tmp_path / "leases.sqlite3"), 0.005)
    for _ in range(WORKERS):
        master.expect("up")
    while len(slots(crew.reports)) < TICKS // 2:
        master.expect("ran")
    each_once(crew.reports)
    check_order(crew.reports)
    assert len({report["pid"] for report in master.all("up")}) == WORKERS
    assert master.pid not in {report["pid"] for report in master.all("ran")}


def test_the_slot_of_a_killed_process_is_run_again_by_another_and_the_schedule_goes_on(
    crew: Crew, tmp_path: Path
) -> None:
    leases, apart = str(tmp_path / "leases.sqlite3"), int(3 * TTL)
    workers = started(crew, leases, 0.5, apart)
    victim: Worker | None = None
    while victim is None:
        workers[0].expect("request")
        victim = next((one for one in workers if one.all("slot")), None)
    victim.send(signal.SIGKILL)
    victim.ends()
    others = [one for one in workers if one is not victim]
    while len(slots(crew.reports)) < 2:
        others[0].expect("request")
    for one in others:
        one.send(signal.SIGTERM)
    for one in others:
        one.ends_well()
    each_once(crew.reports, apart)
    begun = [report for report in crew.reports if report["what"] == "slot"]
    assert [report["tries"] for report in begun[:3]] == [1, 2, 1]
    assert begun[0]["slot"] == begun[1]["slot"], "the one that was cut short, again"
    check_order(crew.reports)


def fork_in_the_run(post: Post, leases: str) -> None:
    parent = os.getpid()

    def body(ctx: Ctx) -> None:
        post.report("begun", pid=os.getpid())
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            post.report("child has ended")

    namespace = {"__name__": "loops", "Cron": Cron, "CronConfig": CronConfig, "body": body}
    exec("forking = Cron('* * * * *', body, CronConfig(singleflight=True))", namespace)
    cron = namespace["forking"]
    assert isinstance(cron, Cron)
    cron.schedule = Every(1)
    cron.bound_to(post.runtime(leases, TTL, 0.1)).run()
    if os.getpid() != parent:
        os._exit(0)


def test_a_child_that_is_forked_in_a_run_and_returns_runs_no_slot(
    crew: Crew, tmp_path: Path
) -> None:
    master = crew.start(fork_in_the_run, str(tmp_path / "leases.sqlite3"))
    master.expect("child has ended")
    master.expect("child has ended")
    assert {report["pid"] for report in master.all("begun")} == {master.pid}
    master.clean_up()
    assert "cron forking: a child that was forked in a run has returned" in master.errors
