"""Tasks under a lease in real workers: one body at a time, whatever becomes of its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from celery.result import AsyncResult

from contrib.celery.programs import Part, Shop
from contrib.program import PATIENCE
from tako_sync.lock import Lock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Celery's workers fork")

POOLS = ("prefork", "threads", "gevent")
READY = " ready."


@pytest.fixture(params=POOLS)
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def state(result: AsyncResult[Any]) -> str:
    """Wait until a task has ended, and return how."""
    try:
        result.get(timeout=PATIENCE, propagate=False)
    finally:
        ended = str(result.state)
    return ended


@pytest.mark.parametrize("uses", ["", "1"], ids=["", "used before the fork"])
def test_of_tasks_at_once_one_runs_at_a_time(shop: Shop, pool: str, uses: str) -> None:
    with shop.worker(pool, SHOP_USES_IT_AT_IMPORT=uses) as worker:
        worker.says(READY)
        shop.send("reindex", 1)
        shop.journal.expect("begin")
        refused, skipped = shop.send("reindex"), shop.send("skipping")
        again = shop.send("coming_again")
        patient = [shop.send("patient") for _ in range(8)]
        assert state(refused) == "FAILURE" and "was not free" in repr(refused.result)
        assert skipped.get(timeout=PATIENCE) is None
        assert {state(result) for result in [*patient, again]} == {"SUCCESS"}
    assert len(shop.journal.all("begin")) == 10
    shop.journal.never_two_at_once()


def test_a_child_does_not_touch_the_lease_of_its_parent(shop: Shop) -> None:
    lock = Lock("at-import").bound_to(shop.runtime)
    each_its_own = "--max-tasks-per-child=1"
    with shop.worker("prefork", 2, each_its_own, SHOP_USES_IT_AT_IMPORT="1") as worker:
        worker.says(READY)
        before = lock.holder()
        assert before is not None and before.owner.split(":")[1] == str(worker.process.pid)
        children = [shop.send("reindex").get(timeout=PATIENCE) for _ in range(4)]
        assert len(set(children)) == 4, "and each has ended after its task"
        after = lock.holder()
        assert after is not None and (after.owner, after.fence) == (before.owner, before.fence)


def test_a_child_that_is_killed_frees_the_name_within_the_ttl(shop: Shop) -> None:
    with shop.worker("prefork") as worker:
        worker.says(READY)
        cut = shop.send("reindex", 30)
        os.kill(shop.journal.expect("begin")["pid"], signal.SIGKILL)
        shop.journal.write("killed")
        assert state(shop.send("patient")) == "SUCCESS"
        assert state(cut) == "FAILURE"
    shop.journal.never_two_at_once()


def test_a_message_that_comes_again_waits_for_the_lease_that_its_worker_left(
    on_redis: None, shop: Shop
) -> None:
    with shop.worker("prefork") as worker:
        worker.says(READY)
        late = shop.send("late", 30)
        begun = shop.journal.expect("begin")
        os.kill(begun["pid"], signal.SIGKILL)
        shop.journal.write("killed")
        again = shop.journal.expect("begin", 2)
        assert state(late) == "SUCCESS"
        assert again["at"] >= begun["deadline"] and worker.log.count("received") == 2
    shop.journal.never_two_at_once()


def test_a_task_that_is_revoked_while_it_runs_frees_the_name_within_the_ttl(shop: Shop) -> None:
    with shop.worker("prefork") as worker:
        worker.says(READY)
        revoked = shop.send("reindex", 30)
        shop.journal.expect("begin")
        shop.app.control.revoke(revoked.id, terminate=True)
        assert state(revoked) == "REVOKED"
        shop.journal.write("killed")
        assert state(shop.send("patient")) == "SUCCESS"
    shop.journal.never_two_at_once()


def test_a_soft_limit_unwinds_and_frees_the_name_at_once(shop: Shop) -> None:
    with shop.worker("prefork", 2) as worker:
        worker.says(READY)
        cut = shop.send("cut_short", 30, soft_time_limit=1)
        assert cut.get(timeout=PATIENCE) == "cut short"
        assert shop.send("reindex").get(timeout=PATIENCE), "with one attempt"
        failed = shop.send("reindex", 30, soft_time_limit=1)
        assert state(failed) == "FAILURE" and "SoftTimeLimitExceeded" in repr(failed.result)
        assert shop.relock.holder() is None
    shop.journal.never_two_at_once()


def test_a_hard_limit_frees_the_name_within_the_ttl(shop: Shop) -> None:
    with shop.worker("prefork", 2) as worker:
        worker.says(READY)
        cut = shop.send("reindex", 30, time_limit=1)
        assert state(cut) == "FAILURE" and "TimeLimitExceeded" in repr(cut.result)
        shop.journal.write("killed")
        assert state(shop.send("patient")) == "SUCCESS"
    shop.journal.never_two_at_once()


def test_a_warm_shutdown_lets_a_task_finish_and_frees_the_name_at_once(
    shop: Shop, pool: str
) -> None:
    with shop.worker(pool) as worker:
        worker.says(READY)
        running = shop.send("reindex", 1.5)
        shop.journal.expect("begin")
        worker.send(signal.SIGTERM)
        assert worker.ends() == 0
        assert state(running) == "SUCCESS" and shop.relock.holder() is None


def test_a_warm_shutdown_cancels_a_task_that_asked_for_it(shop: Shop, pool: str) -> None:
    with shop.worker(pool) as worker:
        worker.says(READY)
        running = shop.send("draining")
        shop.journal.expect("begin")
        worker.send(signal.SIGTERM)
        assert worker.ends() == 0
        assert running.get(timeout=PATIENCE) == "ShutdownError"
        assert shop.relock.holder() is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="SIGQUIT as on Linux")
def test_a_cold_shutdown_frees_the_name_within_the_ttl(shop: Shop) -> None:
    with shop.worker("prefork") as worker:
        worker.says(READY)
        shop.send("reindex", 30)
        shop.journal.expect("begin")
        worker.send(signal.SIGQUIT)
        try:
            worker.ends(within=10)
        except subprocess.TimeoutExpired:
            # billiard's task handler waits at times for the lock of a queue that one of the
            # children had which were just ended; then a supervisor goes on to this.
            worker.kill()
    shop.journal.write("killed")
    with shop.worker("prefork") as worker:
        assert state(shop.send("patient")) == "SUCCESS"
    shop.journal.never_two_at_once()


def test_a_worker_that_is_killed_frees_the_name_within_the_ttl(shop: Shop, pool: str) -> None:
    with shop.worker(pool) as first, shop.worker(pool) as second:
        _both_ready(first, second)
        shop.send("reindex", 30)
        holder = shop.journal.expect("begin")["pid"]
        (victim,) = [
            worker
            for worker in (first, second)
            if holder == worker.process.pid or os.getpgid(holder) == worker.process.pid
        ]
        os.killpg(victim.process.pid, signal.SIGKILL)
        victim.ends()
        shop.journal.write("killed")
        assert state(shop.send("patient")) == "SUCCESS"
    shop.journal.never_two_at_once()


def _both_ready(first: Part, second: Part) -> None:
    first.says(READY)
    second.says(READY)
