"""One loop's thread, started and stopped by several threads at once."""

from __future__ import annotations

import threading

from tako_sync.clock import SystemClock
from tako_sync.ctx import Ctx
from tako_sync.runner import Background, Runner

THREADS, ROUNDS = 8, 50


def test_started_by_several_threads_at_once_it_is_one_thread() -> None:
    clock = SystemClock()
    for _ in range(ROUNDS):
        background, gate = Background(), threading.Barrier(THREADS)
        runners: list[Runner] = []

        def start(
            background: Background = background,
            gate: threading.Barrier = gate,
            runners: list[Runner] = runners,
        ) -> None:
            gate.wait()
            runners.append(background.start("loop", clock, lambda ctx: ctx.wait(60)))

        threads = [threading.Thread(target=start) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(runners) == THREADS and len(set(map(id, runners))) == 1
        assert background.stop(10) is True and not runners[0].running


def test_two_that_follow_each_other_never_run_at_once() -> None:
    clock, background = SystemClock(), Background()
    running: list[int] = []
    most: list[int] = []
    go_on = threading.Event()

    def loop(ctx: Ctx) -> None:
        running.append(1)
        most.append(len(running))
        ctx.wait(60)
        go_on.wait(10)  # it drains
        running.pop()

    first = background.start("loop", clock, loop)
    while not running:
        first.wait(0.001)
    background.stop(0)
    second = background.start("loop", clock, loop)
    assert first.running and second is not first
    go_on.set()
    while len(most) < 2:
        second.wait(0.001)
    assert background.stop(10) is True
    assert most == [1, 1] and not running


def test_what_was_never_started_has_stopped() -> None:
    assert Background().stop(0) is True
