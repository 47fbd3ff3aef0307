"""Storms over HTTP, with three processes on each lease: no overlap, and one holder afterwards.

Each kind of fault has a server of its own, and the contenders' processes hold one lease at each: so
all storms of one length rage at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import pytest

from gcs import kit
from gcs.actions import Action, Drip, Drop, Reset, Stall, Status
from gcs.faults import Fault
from gcs.process import GCSProcess
from processes.kit_processes import PATIENCE, Crew, Post, Report, check_order, clock
from tako_sync.backends.gcs import GCSLease
from tako_sync.ctx import Ctx
from tako_sync.errors import LeaseLostError
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

TTL: Final = 2.0
POLL: Final = 0.2
CONTENDERS: Final = 3
WIDTHS: Final = 4.0
"""Seconds: of the two intervals in which GCS tells its time."""

STORMS: dict[str, tuple[str, Action]] = {
    "503": ("*", Status(503)),
    "reset": ("*", Reset()),
    "reply lost": ("write", Drop()),
    "stall": ("*", Stall()),
    "drip": ("*", Drip(interval=0.5)),
    "429": ("write", Status(429)),
}


def contend(post: Post, urls: dict[str, str]) -> None:
    """Contend for one lease at each server, in a thread each, until told to end."""
    stop = threading.Event()

    def forever(storm: str, url: str) -> None:
        with kit.client_of(url) as client:
            mine = Post(f"{post.name}/{storm}")
            runtime = Runtime(
                GCSLease("bucket", client=client),
                app="shop",
                env="test",
                policy=LeasePolicy(ttl=TTL, poll=POLL),
                clock=clock,
                listeners=[mine.tell],
            )
            until_stopped(mine, Lock("reindex").bound_to(runtime), stop)

    threads = [threading.Thread(target=forever, args=item) for item in urls.items()]
    for thread in threads:
        thread.start()
    post.order()
    stop.set()
    for thread in threads:
        thread.join()
    post.report("ended")


def until_stopped(post: Post, lock: Lock, stop: threading.Event) -> None:
    def body(ctx: Ctx) -> None:
        with post.running(ctx):
            while not stop.is_set() and not ctx.wait(TTL / 40):
                post.report("step", ctx)

    parent = Ctx.background(clock)

    def watch() -> None:
        stop.wait()
        parent.cancel()

    threading.Thread(target=watch, daemon=True).start()
    while not stop.is_set():
        try:
            lock.do(body, ctx=parent)
        except LeaseLostError as loss:
            post.report("loss", reason=loss.reason.value)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            if not stop.is_set():
                post.report("surprise", error=repr(error))


class Storm:
    """One fault at one server, and what the contenders there report."""

    def __init__(self, name: str, server: GCSProcess, crew: Crew) -> None:
        self.name = name
        self.server = server
        self._crew = crew

    @property
    def reports(self) -> list[Report]:
        return [r for r in self._crew.reports if r["who"].endswith(f"/{self.name}")]

    def said(self, what: str, since: float = 0.0) -> list[Report]:
        return [r for r in self.reports if r["what"] == what and r["at"] >= since]

    def begins(self) -> None:
        on, action = STORMS[self.name]
        self.server.faults.add(Fault(on, action, times=None))

    def is_held(self, since: float) -> bool:
        """Whether a body has said that it goes on, under a lease that it still believes in."""
        return bool(self.said("step", since))


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


def wait_for(what: Any, why: str) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until, why
        time.sleep(0.05)


@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize("length", [0.3, 0.9, 1.1, 10.0])
def test_a_storm_overlaps_nothing_and_leaves_one_holder(crew: Crew, length: float) -> None:
    servers = {name: GCSProcess() for name in STORMS}
    try:
        storms = [Storm(name, server, crew) for name, server in servers.items()]
        urls = {name: server.url for name, server in servers.items()}
        workers = [crew.start(contend, urls, name=f"c{number}") for number in range(CONTENDERS)]
        wait_for(lambda: all(storm.is_held(0.0) for storm in storms), "nobody began")

        started = clock.monotonic()
        for storm in storms:
            storm.begins()
        time.sleep(length * TTL)  # the storm's length is the subject
        for storm in storms:
            storm.server.faults.release()
        over = clock.monotonic()

        # The dead record may be a storm old, or as young as the last write that landed in it.
        soon = over + TTL + WIDTHS + 10 * POLL
        wait_for(lambda: clock.monotonic() > soon, "the clock stands still")
        for storm in storms:
            assert storm.is_held(soon - TTL), f"{storm.name}: nobody holds it after the storm"
        for worker in workers:
            worker.tell("stop")
        for worker in workers:
            worker.expect("ended")
            worker.ends_well()
    finally:
        for server in servers.values():
            server.close()

    for storm in storms:
        assert not storm.said("surprise"), storm.name
        runs = check_order(storm.reports)
        holders = [run.who for run in runs if run.began < soon]
        changes = sum(one != other for one, other in pairwise(holders))
        assert changes <= 1, f"{storm.name}: {runs}"
        if length == 0.3 and not starved(storm.reports, started, over):
            assert not storm.said("loss"), f"{storm.name}: so short a storm costs nobody a lease"
        if length == 10.0 and storm.name in ("503", "reset", "stall"):
            assert storm.said("loss"), f"{storm.name}: so long a storm leaves nobody a lease"


def starved(reports: list[Report], since: float, until: float) -> bool:
    """Whether a holder did not get to say anything for long: the machine was busy elsewhere."""
    steps = [r["at"] for r in reports if r["what"] == "step" and since - TTL <= r["at"]]
    return any(b - a > TTL / 6 for a, b in pairwise(steps))
