"""What each step costs in requests, exactly, as the server counts them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gcs import kit
from gcs.actions import Status
from gcs.hosts import (
    POLL,
    TTL,
    WIDTHS,
    GCSHost,
    GCSWorld,
    Work,
    a_world,
    record,
    states,
)
from gcs.server import GCSServer
from kit import Running
from tako_sync.backends.gcs import GCSLease
from tako_sync.errors import LeaseBusyError
from tako_sync.events import Renewed, Waiting
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

SHORTEST_POLL = 1.5


@pytest.fixture
def world() -> Iterator[GCSWorld]:
    with a_world() as world:
        yield world
        everything = {request.kind for request in world.server.requests()}
        assert everything <= {"read", "write"}, "nothing else is asked, of the bucket least of all"


def occupied(world: GCSWorld, host: GCSHost) -> tuple[Work, Running[int]]:
    work = Work(world)
    running = world.start(lambda: host.lock().do(work), f"{host.name}'s")
    assert work.began
    return work, running


def enter_and_leave(host: GCSHost) -> int:
    with host.lock().hold():
        return 42


DOORS: dict[str, Callable[[GCSHost], Any]] = {
    "do": lambda host: host.lock().do(lambda ctx: 42),
    "try_do": lambda host: host.lock().try_do(lambda ctx: 42).value,
    "hold": enter_and_leave,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_cold_acquisition_takes_two_requests_a_warm_one_one_and_a_release_one(
    world: GCSWorld, door: str
) -> None:
    host = world.host()
    assert world.run(lambda: DOORS[door](host)) == 42
    assert states(host.requests()) == ["read", "held", "released"]
    for _ in range(3):
        before = len(host.requests())
        assert world.run(lambda: DOORS[door](host)) == 42
        assert states(host.requests(before)) == ["held", "released"]


def test_a_takeover_takes_two_requests(world: GCSWorld) -> None:
    world.put(record())
    world.advance(TTL + WIDTHS)
    host = world.host()
    assert world.run(lambda: host.lock().try_do(Work(world, 0.0))) == (True, 42)
    assert states(host.requests()) == ["read", "held", "released"]


def test_a_lease_that_others_had_meanwhile_costs_one_look_more_than_a_warm_one(
    world: GCSWorld,
) -> None:
    a, b = world.host("a"), world.host("b")
    for host in (a, b):
        assert world.run(lambda host=host: DOORS["do"](host)) == 42  # type: ignore[misc]
    before = len(a.requests())
    assert world.run(lambda: DOORS["do"](a)) == 42
    assert [request.status for request in a.requests(before)] == [412, 206, 200, 200]
    assert a.kinds(before) == ["write", "read", "write", "write"]


@pytest.mark.parametrize("whose", ["another process", "this process"])
def test_a_busy_try_do_takes_one_request(world: GCSWorld, whose: str) -> None:
    host = world.host()
    holder = host if whose == "this process" else world.host("b")
    work, running = occupied(world, holder)
    before = len(host.requests())
    result = world.run(lambda: host.lock().try_do(lambda ctx: 42))
    assert not result and result.holder is not None
    assert host.kinds(before) == ["read"]
    with pytest.raises(LeaseBusyError):
        world.run(lambda: host.lock().hold(timeout=0).__enter__())
    assert host.kinds(before) == ["read", "read"]
    work.end()
    assert running.result() == 42


def test_to_ask_for_the_holder_takes_one_request(world: GCSWorld) -> None:
    host = world.host()
    assert world.run(lambda: host.lock().holder()) is None
    assert host.kinds() == ["read"]


def test_a_poll_takes_one_request_the_first_comes_at_once_the_others_jittered(
    world: GCSWorld,
) -> None:
    a, b = world.host("a"), world.host("b")
    work, running = occupied(world, b)
    start = world.now
    waited = Work(world, 0.0)
    waiting = world.start(lambda: a.lock().do(waited))
    world.advance(2 * TTL)
    polls = [request.at for request in a.requests()]
    assert set(a.kinds()) == {"read"} and polls[0] == start
    gaps = [later - earlier for earlier, later in itertools.pairwise(polls)]
    assert all(SHORTEST_POLL <= gap <= POLL for gap in gaps)
    assert len(set(gaps)) == len(gaps), "no two pauses are the same"
    assert len(a.told(Waiting)) == 1

    work.end()
    world.advance(POLL)
    assert waiting.result() == 42 and running.result() == 42
    assert waited.began[0] - work.ended[0] <= POLL
    assert states(a.requests(len(polls))) == ["read", "held", "released"]


def test_a_heartbeat_takes_one_request_each_third_of_a_ttl(world: GCSWorld) -> None:
    host = world.host()
    work = Work(world, 5 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    world.advance(5 * TTL + 1)
    assert running.result() == 42
    assert states(host.requests()) == ["read", "held"] + 15 * ["held"] + ["released"]
    beats = [request.at - work.began[0] for request in host.requests()[2:-1]]
    for beat, at in enumerate(beats, 1):
        assert 10.0 * beat - 0.5 <= at <= 10.0 * beat, "early by its jitter, never late"
    assert len(host.told(Renewed)) == 15


def test_each_write_names_the_generation_that_the_one_before_it_made(world: GCSWorld) -> None:
    """A chain of compare-and-swaps, without a look in between."""
    host = world.host()
    work = Work(world, 2 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    world.advance(2 * TTL + 1)
    assert running.result() == 42
    writes = host.writes()
    assert writes[0].generation_match == 0
    for earlier, later in itertools.pairwise(writes):
        assert later.generation_match == earlier.generation


FAULTS: dict[str, tuple[Status, list[str]]] = {
    "503 once": (Status(503), ["read", "held", "held", "released"]),
    "412": (Status(412), ["read", "held", "read", "held", "released"]),
    "429 once": (Status(429), ["read", "held", "held", "released"]),
    "404 of an object": (Status(404), ["read", "held"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_fails_is_tied_to_one_attempt_of_ours(world: GCSWorld, fault: str) -> None:
    """The client's library repeats none of them: each retry is a new write with a new name."""
    action, expected = FAULTS[fault]
    host = world.host()
    host.fails("write", action)
    running = world.start(lambda: host.lock().try_do(lambda ctx: 42))
    world.advance(3.0)
    assert running.done
    assert states(host.requests()) == expected
    names = [request.document["write"] for request in host.writes()]
    assert len(set(names)) == len(names)


def test_a_bucket_that_is_down_is_asked_with_growing_pauses(world: GCSWorld) -> None:
    host = world.host()
    host.fails("*", Status(503), times=None)
    running = world.start(lambda: host.lock().do(lambda ctx: 42, timeout=60))
    world.advance(61)
    assert running.done and running.error is not None
    gaps = [b.at - a.at for a, b in itertools.pairwise(host.requests())]
    assert len(gaps) < 50
    assert all(1.0 <= gap <= 3.0 for gap in gaps[6:]), "in the end about a poll, jittered"


# --- Many at once --------------------------------------------------------------------------------


def reads_of_waiters(threads: int) -> int:
    """Have that many threads of one process wait for a minute; then each has its turn."""
    with a_world() as world:
        a, b = world.host("a"), world.host("b")
        work, running = occupied(world, b)
        waited = Work(world, 0.0)
        waiting = [world.start(lambda: a.lock().do(waited), f"waiter {n}") for n in range(threads)]
        world.advance(2 * TTL)
        assert set(a.kinds()) == {"read"} and not waited.began
        reads = len(a.requests())
        work.end()
        world.advance(POLL)
        assert [one.result() for one in waiting] == threads * [42] and running.result() == 42
        assert len(set(waited.began)) == 1, "the hand-overs within the process take no time"
        # One look finds it free; then each turn costs its acquisition and its release.
        assert a.kinds(reads) == ["read", *threads * ["write", "write"]]
        return reads


def test_a_hundred_waiting_threads_read_no_more_than_one() -> None:
    assert reads_of_waiters(100) == reads_of_waiters(1)


def test_threads_that_wait_for_their_own_process_read_nothing(world: GCSWorld) -> None:
    host = world.host()
    work, running = occupied(world, host)
    before = len(host.requests())
    waited = Work(world, 0.0)
    waiting = [world.start(lambda: host.lock().do(waited), f"waiter {n}") for n in range(20)]
    world.advance(9.0)
    assert host.kinds(before) == []
    work.end()
    assert [one.result() for one in waiting] == 20 * [42] and running.result() == 42
    assert host.kinds(before) == ["write", *20 * ["write", "write"]]


def test_a_hundred_holds_at_once_warn_of_nothing_and_leave_nothing_behind(
    gcs_server: GCSServer, caplog: pytest.LogCaptureFixture
) -> None:
    """In real time: two acquisitions and two releases of each, and not a request beside them.

    A long ttl: a request that a busy machine has wait for its share, a ttl/30, is asked after.
    """
    before = set(threading.enumerate())
    barrier = threading.Barrier(100)
    with kit.client_of(gcs_server.url) as client, caplog.at_level(logging.WARNING):
        backend = GCSLease(gcs_server.bucket, client=client)
        runtime = Runtime(backend, app="shop", env="test", policy=LeasePolicy(ttl=600))

        def hold(number: int) -> int:
            lock = Lock(f"name-{number}").bound_to(runtime)
            fences = []
            for _ in range(2):
                with lock.hold(timeout=30) as ctx:
                    fences.append(ctx.fence)
                    barrier.wait(kit.PATIENCE)
            return len(set(fences))

        with ThreadPoolExecutor(100) as pool:
            assert list(pool.map(hold, range(100))) == 100 * [2]
        backend.close()
    assert not caplog.records, "no 'pool is full', for one"
    assert gcs_server.count("read") == 100 and gcs_server.count("write") == 400
    assert gcs_server.count() == 500
    assert gcs_server.connections <= 210, "they are kept and used again"
    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("tako")]
    for thread in threading.enumerate():
        if thread.name in left:
            thread.join(kit.PATIENCE)
            assert not thread.is_alive()
