"""What each step costs in storage requests, exactly, and how soon the next in line is let in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit import Host, Running, World
from tako_sync.ctx import Ctx
from tako_sync.errors import BackendUnavailableError, LeaseBusyError
from tako_sync.events import Event, Lost, ReleaseUnconfirmed, Renewed, Unreachable, Waiting
from tako_sync.flag import Flag
from tako_sync.policy import LeasePolicy
from tako_sync.testing.faults import Call, Fault, Proceed, fail, hang, intercept

TTL = 30.0
SHORTEST_POLL, LONGEST_POLL = 1.5, 2.5


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(2 * TTL)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


@pytest.fixture(params=[True, False], ids=["inline", "in a thread"])
def prompt(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Work:
    """A body that lasts until the test ends it, or for some seconds."""

    def __init__(self, world: World, seconds: float | None = None) -> None:
        self._finish = Flag()
        self.began: list[float] = []
        self.ended: list[float] = []
        self._world = world
        self._seconds = seconds

    def end(self) -> None:
        """End it within an advance of a millisecond, where one thread runs at a time."""
        clock = self._world.clock
        clock.spawn(lambda: clock.wait(Flag(), 0.001) or self._finish.set(), "the end")
        clock.advance(0.001)

    def __call__(self, ctx: Ctx) -> int:
        with self._world.meter.running(ctx):
            self.began.append(self._world.clock.monotonic())
            self._world.clock.wait(self._finish, self._seconds)
            self.ended.append(self._world.clock.monotonic())
            assert not ctx.cancelled
        return 42


def occupied(world: World, host: Host) -> tuple[Work, Running[int]]:
    """Have ``host`` hold the lease until the work is finished."""
    work = Work(world)
    running = world.start(lambda: host.lock().do(work), f"{host.name}'s")
    assert work.began
    return work, running


def ops(host: Host, since: int = 0) -> list[str]:
    return host.requests()[since:]


def enter_and_leave(host: Host) -> int:
    with host.lock().hold():
        return 42


DOORS: dict[str, Callable[[Host], Any]] = {
    "do": lambda host: host.lock().do(lambda ctx: 42),
    "try_do": lambda host: host.lock().try_do(lambda ctx: 42).value,
    "hold": enter_and_leave,
}


# --- One request more would be seen here --------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
def test_a_cold_acquisition_takes_two_requests_a_warm_one_one_and_a_release_one(
    world: World, door: str, prompt: bool
) -> None:
    host = world.host(prompt=prompt)
    assert world.start(lambda: DOORS[door](host)).result() == 42
    assert ops(host) == ["read", "write", "write"]
    for _ in range(3):
        before = len(ops(host))
        assert world.start(lambda: DOORS[door](host)).result() == 42
        assert ops(host, before) == ["write", "write"]


def test_a_takeover_takes_two_requests(world: World) -> None:
    dead, host = world.host("dead"), world.host()
    work, running = occupied(world, dead)
    dead.storage.always("*", fail(lambda: BackendUnavailableError("dead")))
    world.advance(TTL)
    assert host.lock().try_do(lambda ctx: 42) == (True, 42)
    assert ops(host) == ["read", "write", "write"]
    work.end()
    world.advance(TTL + 2.0)
    assert running.done


def test_a_lease_that_others_had_meanwhile_costs_one_look_more_than_a_warm_one(
    world: World,
) -> None:
    a, b = world.host("a"), world.host("b")
    for host in (a, b):
        assert host.lock().do(lambda ctx: 42) == 42
    before = len(ops(a))
    assert a.lock().do(lambda ctx: 42) == 42
    assert ops(a, before) == ["write", "read", "write", "write"]


@pytest.mark.parametrize("whose", ["another process", "this process"])
def test_a_busy_try_do_takes_one_request(world: World, whose: str, prompt: bool) -> None:
    host = world.host(prompt=prompt)
    holder = host if whose == "this process" else world.host("b")
    work, running = occupied(world, holder)
    before = len(ops(host))
    result = world.start(lambda: host.lock().try_do(lambda ctx: 42)).result()
    assert not result and result.holder is not None
    assert ops(host, before) == ["read"]
    with pytest.raises(LeaseBusyError):
        world.start(lambda: host.lock().hold(timeout=0).__enter__()).result()
    assert ops(host, before) == ["read", "read"]
    work.end()
    assert running.result() == 42


def test_to_ask_for_the_holder_takes_one_request(world: World) -> None:
    host = world.host()
    assert host.lock().holder() is None
    assert ops(host) == ["read"]


def test_a_poll_takes_one_request_the_first_comes_at_once_the_others_jittered(
    world: World, prompt: bool
) -> None:
    a, b = world.host("a", prompt=prompt), world.host("b")
    work, running = occupied(world, b)
    start = world.clock.monotonic()
    waited = Work(world, 0.0)
    waiting = world.start(lambda: a.lock().do(waited))
    world.advance(2 * TTL)
    polls = [call.at for call in a.storage.calls]
    assert set(ops(a)) == {"read"} and polls[0] == start
    gaps = [later - earlier for earlier, later in itertools.pairwise(polls)]
    assert all(SHORTEST_POLL <= gap <= LONGEST_POLL for gap in gaps)
    assert len(set(gaps)) == len(gaps), "no two pauses are the same"
    assert len(a.told(Waiting)) == 1, "one event a change of state, none a poll"

    work.end()
    world.advance(LONGEST_POLL)
    assert waiting.result() == 42 and running.result() == 42
    assert waited.began[0] - work.ended[0] <= LONGEST_POLL
    assert ops(a, len(polls)) == ["read", "write", "write"]


def test_a_heartbeat_takes_one_request_each_third_of_a_ttl(world: World, prompt: bool) -> None:
    host = world.host(prompt=prompt)
    work = Work(world, 5 * TTL + 1)
    running = world.start(lambda: host.lock().do(work))
    world.advance(5 * TTL + 1)
    assert running.result() == 42
    assert ops(host) == ["read", "write"] + 15 * ["write"] + ["write"]
    renewals = [call.at - work.began[0] for call in host.storage.calls[2:-1]]
    for beat, at in enumerate(renewals, 1):
        assert 10.0 * beat - 0.5 <= at <= 10.0 * beat, "early by its jitter, never late"
    assert len(host.told(Renewed)) == 15


# --- Many threads of one process -------------------------------------------------------------


def reads_of_waiters(threads: int) -> int:
    """Have that many threads of one process wait for a minute; then each has its turn."""
    world = World()
    a, b = world.host("a"), world.host("b")
    work, running = occupied(world, b)
    waited = Work(world, 0.0)
    waiting = [world.start(lambda: a.lock().do(waited), f"waiter {n}") for n in range(threads)]
    world.advance(2 * TTL)
    assert set(ops(a)) == {"read"} and not waited.began
    reads = len(ops(a))

    work.end()
    world.advance(LONGEST_POLL)
    assert [thread.result() for thread in waiting] == threads * [42] and running.result() == 42
    assert len(set(waited.began)) == 1, "the hand-overs within the process take no time"
    # One look finds it free; then each turn costs its acquisition and its release.
    assert ops(a, reads) == ["read", *threads * ["write", "write"]]
    world.meter.check()
    assert not world.clock.waiters
    return reads


def test_a_hundred_waiting_threads_read_no_more_than_one() -> None:
    assert reads_of_waiters(100) == reads_of_waiters(1)


def test_threads_that_wait_for_their_own_process_read_nothing(world: World) -> None:
    """No look could tell them more than the process knows."""
    host = world.host()
    work, running = occupied(world, host)
    before = len(ops(host))
    waited = Work(world, 0.0)
    waiting = [world.start(lambda: host.lock().do(waited), f"waiter {n}") for n in range(20)]
    world.advance(9.0)
    assert ops(host, before) == []
    work.end()
    assert [thread.result() for thread in waiting] == 20 * [42] and running.result() == 42
    assert ops(host, before) == ["write", *20 * ["write", "write"]]


# --- The hand-over inside a process -------------------------------------------------------------


def test_a_release_hands_over_to_a_thread_of_the_same_process_at_once(
    world: World, prompt: bool
) -> None:
    """No time passes on the clock between the end of the one and the start of the other."""
    host = world.host(prompt=prompt)
    work, running = occupied(world, host)
    waited = Work(world, 1.0)
    waiting = world.start(lambda: host.lock().do(waited))
    world.advance(5.0)
    before = len(ops(host))
    work.end()
    assert running.result() == 42
    assert waited.began == work.ended
    assert ops(host, before) == ["write", "write"], "a release, and a warm acquisition"
    world.advance(1.0)
    assert waiting.result() == 42


def test_a_release_between_the_question_and_the_sleep_of_a_waiter_wakes_it(world: World) -> None:
    """It has found the lease held here; before it sleeps, the holder ends, and nobody tells it."""
    host = world.host()
    work, running = occupied(world, host)
    waited = Work(world, 1.0)

    def end_the_hold(event: Event) -> None:
        if isinstance(event, Waiting):
            work._finish.set()
            while not running.done:
                Ctx.background(world.clock).wait(0.001)

    host.runtime.listeners = (end_the_hold,)
    waiting = world.start(lambda: host.lock().do(waited))
    world.advance(0.1)
    assert running.result() == 42
    assert len(waited.began) == 1, "it sleeps beside a free lease"
    world.advance(1.0)
    assert waiting.result() == 42


def test_a_waiter_that_comes_during_a_release_is_let_in_at_its_end(world: World) -> None:
    """The body has ended, the release is on its way: no look, and no sleep beside a free lease."""
    host = world.host(prompt=False)
    work, running = occupied(world, host)
    gate = host.storage.gate("write", when=lambda call: call.document.get("state") == "released")
    before = len(ops(host))
    work.end()
    waited = Work(world, 1.0)
    waiting = world.start(lambda: host.lock().do(waited))
    world.advance(0.5)
    assert not running.done and not waited.began
    gate.open()
    world.advance(0)
    assert waited.began == [work.ended[0] + 0.5]
    assert running.result() == 42
    assert ops(host, before) == ["write", "write"]
    world.advance(1.0)
    assert waiting.result() == 42


def test_a_waiter_that_comes_during_a_release_that_hangs_does_not_trust_in_it(
    world: World,
) -> None:
    """The caller has its value after a moment; the waiter looks, and takes over as others would."""
    host = world.host(prompt=False)
    work, running = occupied(world, host)
    written = host.storage.calls[-1].at
    host.storage.always("write", hang(), when=lambda call: call.document["state"] == "released")
    work.end()
    waited = Work(world, 1.0)
    waiting = world.start(lambda: host.lock().do(waited))
    world.advance(TTL / 30)
    assert running.result() == 42
    world.advance(TTL + LONGEST_POLL - 1.0)
    assert len(waited.began) == 1
    assert TTL <= waited.began[0] - written <= TTL + LONGEST_POLL
    host.storage.release_all()
    world.advance(2.0)
    assert waiting.result() == 42


def test_a_hold_that_is_lost_here_lets_its_own_process_poll_again(world: World) -> None:
    """The deaf body runs on, cancelled; a thread beside it takes over as any process would."""
    host = world.host()
    deaf, waited = Flag(), Work(world, 1.0)

    def body(ctx: Ctx) -> None:
        world.clock.wait(deaf)

    start = world.clock.monotonic()
    running = world.start(lambda: host.lock().do(body))
    host.storage.always("write", fail(lambda: BackendUnavailableError("down")))
    waiting = world.start(lambda: host.lock().do(waited))
    world.advance(TTL - 3.5)
    assert "read" not in ops(host, 1)
    world.advance(1.0)
    host.storage.heal()
    world.advance(6.0)
    assert len(waited.began) == 1 and waited.began[0] - start >= TTL
    assert waiting.result() == 42
    deaf.set()
    world.advance(1.0)
    assert running.done


# --- Ten seconds back to back --------------------------------------------------------------------


def test_a_process_alone_leaves_one_poll_free_after_ten_seconds_back_to_back(
    world: World,
) -> None:
    host = world.host()
    work = Work(world, 1.0)

    def run() -> None:
        for _ in range(25):
            host.lock().do(work)

    running = world.start(run)
    world.advance(60.0)
    running.result()
    gaps = [begin - end for end, begin in zip(work.ended, work.began[1:])]
    assert gaps == pytest.approx([*9 * [0.0], LONGEST_POLL, *9 * [0.0], LONGEST_POLL, *4 * [0.0]])


@pytest.mark.parametrize("prompt", [True, False], ids=["inline", "in a thread"])
def test_a_process_that_holds_back_to_back_lets_another_in(world: World, prompt: bool) -> None:
    """The other polls as ever, and finds the lease free in the one poll that is left to it."""
    a, b = world.host("a", prompt=prompt), world.host("b", prompt=prompt)
    busy, other = Work(world, 0.25), Work(world, 0.25)

    def run() -> None:
        for _ in range(200):
            a.lock().do(busy)

    running = world.start(run)
    start = world.clock.monotonic()
    waiting = world.start(lambda: b.lock().do(other))
    world.advance(10.0 + 0.25 + LONGEST_POLL)
    assert len(other.began) == 1 and other.began[0] - start <= 10.0 + 0.25 + LONGEST_POLL
    world.advance(0.25)
    assert waiting.result() == 42
    world.advance(90.0)
    running.result()


def test_threads_of_a_process_that_held_for_long_rest_together(world: World) -> None:
    """A waiter wakes at the release, sleeps for the poll that is left free, and is let in."""
    host = world.host()
    work, running = occupied(world, host)
    waited = Work(world, 0.5)
    waiting = [world.start(lambda: host.lock().do(waited), f"waiter {n}") for n in range(3)]
    world.advance(11.0)
    before = len(ops(host))
    work.end()
    world.advance(LONGEST_POLL - 0.1)
    assert running.result() == 42
    assert not waited.began and ops(host, before) == ["write"]
    world.advance(2.0)
    assert [thread.result() for thread in waiting] == 3 * [42]
    begins = [began - work.ended[0] for began in waited.began]
    assert begins == pytest.approx([LONGEST_POLL, LONGEST_POLL + 0.5, LONGEST_POLL + 1.0])


@pytest.mark.parametrize(("timeout", "rest"), [(1.0, 0.5), (10.0, LONGEST_POLL)])
def test_a_caller_with_little_time_rests_for_half_of_it(
    world: World, timeout: float, rest: float
) -> None:
    """Rather than fail on a lease that nobody holds."""
    host = world.host()
    work, running = occupied(world, host)
    world.advance(11.0)
    work.end()
    assert running.result() == 42
    waited = Work(world, 0.0)
    waiting = world.start(lambda: host.lock().do(waited, timeout=timeout))
    world.advance(timeout)
    assert waiting.result() == 42
    assert waited.began[0] - work.ended[0] == pytest.approx(rest, abs=0.01)


def test_try_do_does_not_rest(world: World) -> None:
    """Busy when nobody holds the lease would be a lie, and it never waits."""
    host = world.host()
    work, running = occupied(world, host)
    world.advance(11.0)
    work.end()
    assert running.result() == 42
    assert host.lock().try_do(lambda ctx: 42) == (True, 42)


# --- One write a second, as some storages have it -----------------------------------------------


def one_write_a_second(world: World) -> Fault:
    """Return a fault, for all hosts, that refuses a write within a second of the last one."""
    last = [float("-inf")]

    def act(call: Call, proceed: Proceed) -> Any:
        now = world.clock.monotonic()
        if call.op == "write" and now - last[0] < 1.0:
            raise BackendUnavailableError("429 too many requests", retry_after=1.0)
        result = proceed()
        if call.op == "write":
            last[0] = now
        return result

    return intercept(act)


def writes(host: Host) -> list[Call]:
    return [call for call in host.storage.calls if call.op == "write"]


def test_campaigners_leave_the_writes_to_the_holder(world: World) -> None:
    """Twenty processes wait over two ttl, and none spends a write that a heartbeat needs."""
    limit = one_write_a_second(world)
    hosts = [world.host(f"h{n}") for n in range(21)]
    for host in hosts:
        host.storage.always("*", limit)
    holder, *others = hosts
    work, running = occupied(world, holder)
    waited = Work(world, 0.0)
    waiting = [world.start(lambda host=host: host.lock().do(waited), host.name) for host in others]
    world.advance(2 * TTL)
    assert {call.outcome for call in writes(holder)} == {"ok"}
    assert not any(writes(host) for host in others)
    assert not holder.told(Unreachable)

    work.end()
    for _ in range(20):
        world.advance(TTL)
        if all(thread.done for thread in waiting):
            break
    assert [thread.result() for thread in waiting] == 20 * [42] and running.result() == 42
    assert len(waited.began) == 20
    assert not any(host.told(Lost) or host.told(ReleaseUnconfirmed) for host in hosts)


def test_a_release_right_after_a_heartbeat_waits_its_second_and_frees_the_lease(
    world: World,
) -> None:
    limit = one_write_a_second(world)
    a, b = world.host("a"), world.host("b")
    for host in (a, b):
        host.storage.always("*", limit)
    work = Work(world)
    running = world.start(lambda: a.lock().do(work))
    waited = Work(world, 1.0)
    waiting = world.start(lambda: b.lock().do(waited))
    while len(writes(a)) < 2:
        world.advance(0.1)
    work.end()
    assert running.done and running.result() == 42, "the caller does not wait for that second"
    world.advance(2.0)
    refused, released = writes(a)[2:]
    assert (refused.outcome, released.outcome) == ("BackendUnavailableError", "ok")
    assert 1.0 <= released.at - refused.at <= 1.5
    world.advance(1.0 + LONGEST_POLL + 1.5 + 1.5)
    assert waiting.result() == 42 and not a.told(ReleaseUnconfirmed)


def test_a_heartbeat_right_after_the_acquisition_is_tried_again_in_time() -> None:
    """With a ttl of three seconds the first heartbeat is due just within the storage's second."""
    world = World(LeasePolicy(ttl=3.0))
    host = world.host()
    host.storage.always("*", one_write_a_second(world))
    work = Work(world, 9.0)
    running = world.start(lambda: host.lock().do(work))
    world.advance(12.0)
    assert running.result() == 42 and not host.told(Lost)
    refused = [call for call in writes(host) if call.outcome == "BackendUnavailableError"]
    assert refused, "the trial has tried nothing"
    assert not world.clock.waiters
