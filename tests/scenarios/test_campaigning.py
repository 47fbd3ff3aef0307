"""Trying until held: no herd, no starvation, no endless hope, and no write after the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from kit import Host, Running, World
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    CampaignTimeoutError,
    CtxCancelledError,
    CtxDeadlineError,
    LeaseLostError,
    NameCollisionError,
)
from tako_sync.events import Acquired, Event, Recovered, Unreachable, Waiting
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.record import Identity, Record, State, read
from tako_sync.runtime import Runtime
from tako_sync.testing.faults import Call, FaultyBackend, Gate, applied_then, delay, fail, hang

KEY = "run-shop-test-reindex"
TTL = 30.0
POLL = 2.5
"""Seconds between two looks of a campaign, at most."""


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(2 * TTL)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503 service unavailable")


def denied() -> BackendDeniedError:
    return BackendDeniedError("403 forbidden")


def stored(world: World) -> Record:
    content = read(world.store.read(KEY, timeout=1.0))
    assert isinstance(content, Record)
    return content


def held_by_someone(world: World, *, ttl: float = TTL, margin: float = 3.0) -> None:
    """Put the record of a holder there that is never heard of again."""
    record = Record(
        identity=Identity("shop", "test", "reindex"),
        owner="elsewhere:7:gone",
        write="theirs",
        state=State.HELD,
        ttl=ttl,
        margin=margin,
        fence=7,
        acquired="2026-01-01T00:00:00Z",
        expires="2026-01-01T00:00:30Z",
    )
    version = world.store.read(KEY, timeout=1.0).version
    world.store.write(KEY, record.encode(), expect=version, timeout=1.0)


def writes(host: Host) -> list[Call]:
    return [call for call in host.storage.calls if call.op == "write"]


def looks(host: Host) -> list[float]:
    return [call.at for call in host.storage.calls if call.op == "read"]


class Blocker:
    """A hold of the lease, by a host of its own, until the test ends it."""

    def __init__(self, world: World, name: str = "reindex") -> None:
        self._finish = Flag()
        self._world = world
        self.host = world.host("blocker")
        self._running = world.start(
            lambda: self.host.lock(name).do(lambda ctx: world.clock.wait(self._finish))
        )

    def end(self) -> None:
        self._finish.set()
        self._world.advance(0)
        self._running.result()


# --- The herd ----------------------------------------------------------------------------------


class Herd:
    """Campaigners that start at one instant, each as a process of its own, one log for all."""

    def __init__(self, world: World, size: int, seconds_of_work: float) -> None:
        self.storage = FaultyBackend(world.store, world.clock, prompt=True)
        self.parent = Ctx.background(world.clock)
        self.held = 0
        self.ended = 0
        self._world = world
        self._work = seconds_of_work
        for number in range(size):
            runtime = Runtime(self.storage, app="shop", env="test", clock=world.clock)
            lock = Lock("reindex").bound_to(runtime)
            world.clock.spawn(lambda lock=lock: self._campaign(lock), f"campaigner-{number}")

    def _campaign(self, lock: Lock) -> None:
        try:
            lock.do(self._body, ctx=self.parent)
        except CtxCancelledError:
            pass
        self.ended += 1

    def _body(self, ctx: Ctx) -> None:
        with self._world.meter.running(ctx):
            self.held += 1
            ctx.wait(self._work)

    def calls(self, op: str) -> list[Call]:
        return [call for call in self.storage.calls if call.op == op]

    def busiest(self, since: float, seconds: float) -> float:
        """Return how many times the mean the fullest bucket of 100 ms has, of reads."""
        buckets = Counter(int((call.at - since) * 10) for call in self.calls("read"))
        return max(buckets.values()) / (sum(buckets.values()) / (seconds * 10))


@pytest.mark.timeout(120)
def test_a_thousand_campaigners_started_at_one_instant_spread_and_do_not_crowd_a_hand_over(
    world: World,
) -> None:
    """A fixed delay keeps them together for ever, and has them all hit the store at a release."""
    blocker = Blocker(world)
    herd = Herd(world, 1000, seconds_of_work=0.25)
    started = world.clock.monotonic()
    world.advance(0)
    assert [call.at for call in herd.calls("read")] == [started] * 1000, "the first look at once"

    herd.storage.clear()
    world.advance(6)
    assert herd.busiest(started, 6) <= 3
    assert 2000 <= len(herd.calls("read")) <= 4000, "one look each per two seconds"
    assert not herd.calls("write"), "polls are reads"

    herd.storage.clear()
    released = world.clock.monotonic()
    blocker.end()
    world.advance(2)
    assert herd.busiest(released, 2) <= 3, "also at the release"
    assert herd.held >= 7, "the lease moves from hand to hand"
    assert len(herd.calls("write")) in (2 * herd.held, 2 * herd.held - 1), "grant and release"

    herd.storage.clear()
    herd.parent.cancel("that will do")
    world.advance(0)
    assert herd.ended == 1000, "all wake at once"
    assert len(herd.calls("write")) <= 1, "and nothing is written but a last release"


@pytest.mark.timeout(120)
def test_five_hundred_who_wait_for_a_dead_holder_do_not_come_at_the_instant_of_its_expiry(
    world: World,
) -> None:
    """All of them see the same expiry, and none polls later than that and a poll."""
    blocker = Blocker(world)
    blocker.host.storage.always("*", fail(unavailable))
    herd = Herd(world, 500, seconds_of_work=600.0)
    world.advance(TTL - 4.0)
    herd.storage.clear()
    since = world.clock.monotonic()
    world.advance(8.0)
    assert herd.held == 1
    steady = 500 / 2.0 / 10  # looks in 100 ms, each looking once in two seconds
    buckets = Counter(int((call.at - since) * 10) for call in herd.calls("read"))
    assert max(buckets.values()) <= 3 * steady
    herd.parent.cancel()
    blocker.host.storage.heal()
    with pytest.raises(LeaseLostError):
        blocker.end()


def test_a_slow_storage_makes_a_hand_over_no_stampede(world: World) -> None:
    """Whoever looks between a release and the next grant finds it free, and writes in vain."""
    herd = Herd(world, 200, seconds_of_work=1.0)
    herd.storage.always("*", delay(0.02, 0.02))
    world.advance(20)
    herd.parent.cancel()
    world.advance(1)
    assert herd.ended == 200
    refused = sum(call.outcome == "VersionConflictError" for call in herd.calls("write"))
    first_of_all = 199  # all looked at one instant, and found nothing
    assert herd.held >= 14
    assert refused - first_of_all <= 6 * herd.held, "100 looks a second, 40 ms: about four"


def test_a_hundred_waiting_threads_of_one_process_look_no_more_often_than_one(
    world: World,
) -> None:
    blocker = Blocker(world)
    crowd, loner = world.host("crowd"), world.host("loner")
    order: list[int] = []
    waiting = [
        world.start(lambda number=number: crowd.lock().do(lambda ctx: order.append(number)))
        for number in range(100)
    ]
    alone = world.start(lambda: loner.lock().do(lambda ctx: None))
    world.advance(60)
    assert len(looks(crowd)) <= len(looks(loner)) + 6
    blocker.end()
    world.advance(POLL)
    assert order == list(range(100)), "first come, first served, in one instant"
    for one in [*waiting, alone]:
        one.result()


# --- Polls -------------------------------------------------------------------------------------


def test_polls_are_two_seconds_apart_give_or_take_a_quarter_and_never_regular(
    world: World,
) -> None:
    blocker, host = Blocker(world), world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: None))
    world.advance(100)
    gaps = [later - earlier for earlier, later in pairwise(looks(host))]
    assert len(gaps) >= 40
    assert all(1.5 <= gap <= 2.5 for gap in gaps)
    assert len({round(gap, 3) for gap in gaps}) > 30
    assert abs(sum(gaps) / len(gaps) - 2.0) < 0.2
    blocker.end()
    world.advance(POLL)
    running.result()


@pytest.mark.parametrize("poll", [0.2, 2.0, 10.0, 60.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_poll_is_never_later_than_the_expiry_and_a_poll(poll: float, seed: int) -> None:
    """So a slow poll does not add to the time that a dead holder keeps others out."""
    world = World(LeasePolicy(poll=poll))
    for _ in range(seed):
        world.clock.random()
    held_by_someone(world)
    begun = world.clock.monotonic()
    host = world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: world.clock.monotonic() - begun))
    world.advance(120)
    assert TTL <= running.result() <= TTL + min(poll, TTL / 3)
    (acquired,) = host.told(Acquired)
    assert (acquired.how, acquired.contended) == ("expired", True)


def test_a_poll_that_knows_the_expiry_is_not_later_than_its_usual_pause_either(
    world: World,
) -> None:
    """A record that will be there for long may still be released at any time."""
    held_by_someone(world, ttl=600.0, margin=60.0)
    host = world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: None))
    world.advance(60)
    assert all(later - earlier <= 2.5 for earlier, later in pairwise(looks(host)))
    world.advance(600)
    running.result()


# --- Starvation --------------------------------------------------------------------------------


class Greedy:
    """A host that takes the lease again as soon as it has released it."""

    def __init__(self, world: World, host: Host, work: float = 0.02) -> None:
        self.parent = Ctx.background(world.clock)
        self.times: list[float] = []
        self._world = world
        self._work = work
        self._lock = host.lock()
        self.running: Running[None] = world.start(self._loop)

    def _loop(self) -> None:
        while not self.parent.cancelled:
            try:
                self._lock.do(self._body, ctx=self.parent)
            except CtxCancelledError:
                return

    def _body(self, ctx: Ctx) -> None:
        with self._world.meter.running(ctx):
            self.times.append(self._world.clock.monotonic())
            self._world.clock.wait(Flag(), self._work)


def test_one_that_holds_back_to_back_lets_others_in_every_ten_seconds(world: World) -> None:
    """Polling is no queue; without a rule an unlucky waiter never gets in."""
    greedy, b = world.host("greedy"), world.host("b")
    begun = world.clock.monotonic()
    grabs = Greedy(world, greedy)
    entered: list[float] = []

    def body(ctx: Ctx) -> None:
        with world.meter.running(ctx):
            entered.append(world.clock.monotonic())

    def patient() -> None:
        for _ in range(3):
            b.lock().do(body)

    waiting = world.start(patient)
    world.advance(45)
    grabs.parent.cancel()
    world.advance(1)
    grabs.running.result()
    waiting.result()
    assert entered[0] - begun <= 10 + 2 * POLL, "within the first rest"
    assert entered[2] - begun <= 3 * (10 + 2 * POLL)
    gaps = [later - earlier for earlier, later in pairwise(grabs.times)]
    first_rest = next(at for at, gap in zip(grabs.times, gaps) if gap > 1)
    assert 9.9 <= first_rest - begun <= 10.1, "and not before ten seconds"
    assert max(gaps) <= 2 * POLL, "the greedy one gets in again, too"


def test_a_slow_waiter_wins_against_a_greedy_one_within_twenty_polls(world: World) -> None:
    """A slow opener must not lose each race to a fast writer, deterministically."""
    greedy, slow = world.host("greedy"), world.host("slow", prompt=False)
    slow.storage.always("*", delay(0.25, 0.25))
    grabs = Greedy(world, greedy)
    waiting = world.start(lambda: slow.lock().do(lambda ctx: ctx.fence))
    world.advance(50)
    assert waiting.done
    assert len(looks(slow)) <= 20
    waiting.result()
    grabs.parent.cancel()
    world.advance(1)
    grabs.running.result()


def test_one_that_is_not_back_to_back_never_rests(world: World) -> None:
    """The rest is for others: who leaves a poll free anyway need not wait another one."""
    host = world.host()
    for _ in range(20):
        before = world.clock.monotonic()
        assert host.lock().do(lambda ctx: world.clock.monotonic()) == before
        world.advance(3)


def test_threads_of_one_process_do_not_keep_the_lease_among_themselves(world: World) -> None:
    """A hand-over inside a process costs nothing, but others must get in as well."""
    home, b = world.host("home"), world.host("b")
    parents = [Greedy(world, home, work=0.5) for _ in range(4)]
    begun = world.clock.monotonic()
    waiting = world.start(lambda: b.lock().do(lambda ctx: world.clock.monotonic() - begun))
    world.advance(60)
    assert waiting.done
    assert waiting.result() <= 10 + 3 * POLL
    for one in parents:
        one.parent.cancel()
    world.advance(10)
    for one in parents:
        one.running.result()


# --- Errors for good ---------------------------------------------------------------------------

CALLS: dict[str, Callable[[Lock], object]] = {
    "do": lambda lock: lock.do(lambda ctx: pytest.fail("ran")),
    "try_do": lambda lock: lock.try_do(lambda ctx: pytest.fail("ran")),
    "hold": lambda lock: lock.hold(timeout=60).__enter__(),
    "guard": lambda lock: lock.guard(busy="skip")(lambda: pytest.fail("ran"))(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("prompt", [True, False])
def test_an_error_for_good_ends_the_campaign_at_the_first_answer(
    world: World, prompt: bool, op: str, call: str
) -> None:
    """A missing permission that is retried for ever is noticed by nobody."""
    host = world.host(prompt=prompt)
    host.storage.always(op, fail(denied))
    running = world.start(lambda: CALLS[call](host.lock()))
    with pytest.raises(BackendDeniedError, match=r"^403 forbidden$"):
        running.result()
    assert host.requests() == (["read"] if op == "read" else ["read", "write"])


def test_an_error_for_good_in_mid_campaign_ends_it_at_that_poll(world: World) -> None:
    blocker, host = Blocker(world), world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: pytest.fail("ran")))
    world.advance(20)
    assert not running.done
    host.storage.always("read", fail(denied))
    count = len(host.requests())
    world.advance(POLL)
    with pytest.raises(BackendDeniedError):
        running.result()
    assert len(host.requests()) == count + 1
    blocker.end()


def test_an_error_for_good_that_clears_leaves_nothing_behind(world: World) -> None:
    host = world.host()
    host.storage.script("read", fail(denied), fail(denied))
    for _ in range(2):
        with pytest.raises(BackendDeniedError):
            host.lock().do(lambda ctx: pytest.fail("ran"))
    assert host.lock().do(lambda ctx: "in") == "in"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("x"), MemoryError()])
def test_a_fault_of_the_backend_itself_is_raised_and_not_retried(
    world: World, error: Exception
) -> None:
    host = world.host()
    host.storage.script("read", fail(error))
    with pytest.raises(type(error)) as caught:
        host.lock().do(lambda ctx: pytest.fail("ran"))
    assert caught.value is error
    assert host.lock().do(lambda ctx: "in") == "in"


def test_an_error_for_good_reaches_each_waiting_thread(world: World) -> None:
    """The first in line gets the answer; the next must not wait for a poller that is gone."""
    blocker, host = Blocker(world), world.host()
    running = [world.start(lambda: host.lock().do(lambda ctx: None)) for _ in range(5)]
    world.advance(5)
    host.storage.always("read", fail(denied))
    world.advance(POLL)
    for one in running:
        with pytest.raises(BackendDeniedError):
            one.result()
    blocker.end()


def test_a_collision_of_names_in_mid_campaign_is_raised(world: World) -> None:
    """Another application came to use the same key: waiting for it would be endless."""
    host = world.host()
    held_by_someone(world)
    running = world.start(lambda: host.lock().do(lambda ctx: pytest.fail("ran")))
    world.advance(5)
    theirs = stored(world).but(identity=Identity("shop", "test-reindex", "x"))
    version = world.store.read(KEY, timeout=1.0).version
    world.store.write(KEY, theirs.encode(), expect=version, timeout=1.0)
    world.advance(POLL)
    with pytest.raises(NameCollisionError):
        running.result()
    assert not writes(host)


# --- Faults that pass --------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("seconds", [1, 10, 300])
def test_a_campaign_goes_on_through_an_outage_and_wins_soon_after_it(
    world: World, seconds: float, op: str
) -> None:
    host = world.host()
    host.storage.always(op, fail(unavailable))
    running = world.start(lambda: host.lock().do(lambda ctx: world.clock.monotonic()))
    world.advance(seconds)
    assert not running.done
    host.storage.heal()
    healed = world.clock.monotonic()
    world.advance(3.1)
    assert running.result() - healed <= 3.0, "the longest pause is a poll and a half"
    assert len(host.told(Unreachable)) == 1
    assert len(host.told(Recovered)) == 1


@pytest.mark.parametrize(("seconds", "turns"), [(10.0, 1), (29.0, 2), (31.0, 2), (300.0, 2)])
def test_an_outage_for_everyone_changes_the_holder_once_at_most(
    world: World, seconds: float, turns: int
) -> None:
    """Nobody enters before the holder is cancelled, one does soon after it; and no flapping."""
    stop = Ctx.background(world.clock)
    began: list[float] = []
    ended: list[float] = []

    def body(ctx: Ctx) -> None:
        with world.meter.running(ctx):
            began.append(world.clock.monotonic())
            ctx.wait(10**6)
            ended.append(world.clock.monotonic())

    def lead(host: Host) -> None:
        while not stop.cancelled:
            try:
                host.lock().do(body, ctx=stop)
            except (LeaseLostError, CtxCancelledError):
                pass

    hosts = [world.host(name) for name in "abc"]
    running = [world.start(lambda host=host: lead(host)) for host in hosts]
    world.advance(15.0)
    last = max(call.at for host in hosts for call in writes(host))
    for host in hosts:
        host.storage.always("*", fail(unavailable))
    world.advance(seconds)
    healed = world.clock.monotonic()
    for host in hosts:
        host.storage.heal()
    world.advance(3 * TTL)
    assert len(began) == turns
    if turns == 2:
        assert ended == [last + 27.0], "at the deadline, while nobody could ask"
        assert last + TTL <= began[1] <= healed + 3.0, "the longest pause is a poll and a half"
    stop.cancel()
    world.advance(POLL)
    for one in running:
        one.result()


def test_an_outage_is_asked_after_less_and_less_often_and_never_less_than_each_poll(
    world: World,
) -> None:
    host = world.host()
    host.storage.always("read", fail(unavailable))
    running = world.start(lambda: host.lock().do(lambda ctx: None))
    world.advance(60)
    gaps = [later - earlier for earlier, later in pairwise(looks(host))]
    assert 0.05 <= gaps[0] <= 0.15
    assert max(gaps) <= 3.0
    assert all(gap >= 1.0 for gap in gaps[6:]), "no storm on a store that is down"
    host.storage.heal()
    world.advance(3)
    running.result()


def test_a_store_that_asks_for_patience_is_given_it(world: World) -> None:
    host = world.host()
    host.storage.script("read", *[fail(lambda: BackendUnavailableError("429", 7.0))] * 3)
    running = world.start(lambda: host.lock().do(lambda ctx: None))
    world.advance(60)
    running.result()
    gaps = [later - earlier for earlier, later in pairwise(looks(host))]
    assert all(7.0 <= gap <= 10.5 for gap in gaps)


def test_each_campaign_has_its_own_retry_state(world: World) -> None:
    """One that has failed for long does not make the next begin with the longest pause."""
    host, other = world.host(), world.host("other")
    host.storage.always("read", fail(unavailable))
    other.storage.always("read", fail(unavailable))
    first = world.start(lambda: host.lock().do(lambda ctx: None, timeout=60))
    world.advance(61)
    with pytest.raises(CampaignTimeoutError):
        first.result()
    host.storage.clear()
    begun = world.clock.monotonic()
    second = world.start(lambda: host.lock().do(lambda ctx: None, timeout=60))
    third = world.start(lambda: other.lock().do(lambda ctx: None, timeout=60))
    world.advance(1)
    for one in (host, other):
        assert looks(one)[0] == begun, "at once"
        assert 0.05 <= looks(one)[1] - begun <= 0.15, "and with the shortest pause"
    for one in (host, other):
        one.storage.heal()
    world.advance(5)
    second.result()
    third.result()


def test_two_campaigns_of_one_process_do_not_share_an_owner_or_a_write(world: World) -> None:
    host = world.host()
    for _ in range(50):
        host.lock().do(lambda ctx: None)
        host.lock().try_do(lambda ctx: None)
    granting = [call for call in writes(host) if call.document["state"] == "held"]
    assert len(granting) == 100
    assert len({call.document["owner"] for call in granting}) == 100
    assert len({call.document["write"] for call in writes(host)}) == 200


# --- After a loss ------------------------------------------------------------------------------


def test_every_process_goes_back_to_campaigning_after_each_loss(world: World) -> None:
    """One that drops out after its first loss is a zombie; after the last, nobody leads."""
    stop = Ctx.background(world.clock)
    losses: Counter[str] = Counter()
    inside: list[str] = []

    def loop(host: Host) -> None:
        def body(ctx: Ctx) -> None:
            with world.meter.running(ctx):
                inside.append(host.name)
                ctx.wait(10**6)
                inside.remove(host.name)

        while not stop.cancelled:
            try:
                host.lock().do(body, ctx=stop)
            except LeaseLostError:
                losses[host.name] += 1
            except CtxCancelledError:
                return

    hosts = [world.host(name) for name in "abc"]
    running = [world.start(lambda host=host: loop(host)) for host in hosts]
    led: set[str] = set()
    for number in range(10):
        (leader,) = inside
        led.add(leader)
        host = next(host for host in hosts if host.name == leader)
        error = unavailable if number % 2 else denied
        host.storage.always("write", fail(error))
        host.storage.always("read", fail(unavailable))
        world.advance(45)
        host.storage.heal()
        world.advance(10)
        assert len(inside) == 1, "exactly one leads"
    assert losses.total() == 10
    assert led == {"a", "b", "c"}
    stop.cancel()
    world.advance(POLL)
    for one in running:
        one.result()
    assert not inside


# --- The end of a campaign: at once, and silent --------------------------------------------------


@pytest.mark.parametrize("prompt", [True, False])
def test_a_cancelled_campaign_wakes_at_once_and_never_writes_again(
    world: World, prompt: bool
) -> None:
    blocker, host = Blocker(world), world.host(prompt=prompt)
    parent = Ctx.background(world.clock)
    running = world.start(lambda: host.lock().do(lambda ctx: pytest.fail("ran"), ctx=parent))
    world.advance(20.3)
    parent.cancel("shutting down")
    world.advance(0)
    with pytest.raises(CtxCancelledError, match=r"^shutting down$"):
        running.result()
    count = len(host.requests())
    blocker.end()
    world.advance(120)
    assert len(host.requests()) == count, "it is free now, and nobody here takes it"
    assert not writes(host)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("timeout", [0.1, 7, 31.5])
def test_a_campaign_out_of_time_ends_at_that_instant_and_never_writes_again(
    world: World, timeout: float, prompt: bool
) -> None:
    blocker, host = Blocker(world), world.host(prompt=prompt)
    begun, ended = world.clock.monotonic(), list[float]()

    def campaign() -> None:
        try:
            host.lock().do(lambda ctx: pytest.fail("ran"), timeout=timeout)
        finally:
            ended.append(world.clock.monotonic())

    running = world.start(campaign)
    world.advance(60)
    with pytest.raises(CampaignTimeoutError) as caught:
        running.result()
    assert ended == [pytest.approx(begun + timeout, abs=1e-6)]
    assert caught.value.holder is not None
    assert caught.value.holder.owner == stored(world).owner
    count = len(host.requests())
    blocker.end()
    world.advance(120)
    assert len(host.requests()) == count


def test_a_campaign_ends_with_its_parents_time_and_says_that_it_was_that(world: World) -> None:
    blocker, host = Blocker(world), world.host()
    parent = Ctx.background(world.clock)
    short = world.start(
        lambda: host.lock().do(lambda ctx: None, ctx=parent.child(timeout=5), timeout=50)
    )
    long = world.start(
        lambda: host.lock().do(lambda ctx: None, ctx=parent.child(timeout=50), timeout=5)
    )
    world.advance(4.9)
    assert not short.done
    assert not long.done
    world.advance(0.2)
    with pytest.raises(CtxDeadlineError):
        short.result()
    with pytest.raises(CampaignTimeoutError):
        long.result()
    blocker.end()


def test_a_parents_time_that_is_over_in_the_last_moment_leaves_no_grant(world: World) -> None:
    """It frees itself at the very instant: one of both, never a hold that nobody has."""
    host, parent = world.host(), Ctx.background(world.clock).child(timeout=TTL)
    held_by_someone(world)
    running = world.start(lambda: host.lock().do(lambda ctx: None, ctx=parent))
    world.advance(60)
    with pytest.raises(CtxDeadlineError):
        running.result()
    assert stored(world).owner == "elsewhere:7:gone"


def test_a_campaign_with_no_time_is_one_attempt(world: World) -> None:
    blocker, host = Blocker(world), world.host()
    with pytest.raises(CampaignTimeoutError) as caught:
        host.lock().do(lambda ctx: pytest.fail("ran"), timeout=0)
    assert host.requests() == ["read"]
    assert (caught.value.timeout, caught.value.lease) == (0.0, "reindex")
    blocker.end()
    assert host.lock().do(lambda ctx: "in", timeout=0) == "in"


def test_a_timeout_without_any_answer_says_that_the_holder_is_not_known(world: World) -> None:
    host = world.host()
    host.storage.always("read", fail(unavailable))
    running = world.start(lambda: host.lock().do(lambda ctx: None, timeout=3))
    world.advance(4)
    with pytest.raises(CampaignTimeoutError) as caught:
        running.result()
    assert caught.value.holder is None
    assert str(caught.value) == ('lease "reindex" was not free within 3 s: its holder is not known')


def test_a_timeout_behind_other_threads_of_the_process_names_the_holder(world: World) -> None:
    """Only the first in line looks; the others have waited for the same holder."""
    blocker, host = Blocker(world), world.host()
    first = world.start(lambda: host.lock().do(lambda ctx: None))
    second = world.start(lambda: host.lock().do(lambda ctx: None, timeout=9))
    world.advance(10)
    with pytest.raises(CampaignTimeoutError) as caught:
        second.result()
    assert caught.value.holder is not None
    assert caught.value.holder.owner == stored(world).owner
    blocker.end()
    world.advance(POLL)
    first.result()


ENDS: dict[str, Callable[[Lock, Ctx], object]] = {
    "cancelled": lambda lock, parent: lock.do(lambda ctx: pytest.fail("ran"), ctx=parent),
    "out of time": lambda lock, parent: lock.do(lambda ctx: pytest.fail("ran"), timeout=1),
    "cancelled try_do": lambda lock, parent: lock.try_do(
        lambda ctx: pytest.fail("ran"), ctx=parent
    ),
}


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_campaign_that_ends_while_a_request_is_under_way_does_not_wait_for_it(
    world: World, end: str, op: str, after: bool
) -> None:
    """And what lands late is given back, at once, and is never renewed."""
    host, other = world.host(prompt=False), world.host("other")
    gate = host.storage.gate(op, after=after, when=lambda call: call.number <= 2)
    parent = Ctx.background(world.clock)
    begun, ended = world.clock.monotonic(), list[float]()

    def campaign() -> None:
        try:
            ENDS[end](host.lock(), parent)
        finally:
            ended.append(world.clock.monotonic())

    running = world.start(campaign)
    assert gate.arrived.is_set(), "the request is under way"
    world.advance(0.5)
    if "cancelled" in end:
        parent.cancel("no more")
    world.advance(0.6)
    assert running.done
    assert type(running.error) is (
        CtxCancelledError if "cancelled" in end else CampaignTimeoutError
    )
    assert ended == [pytest.approx(begun + (0.5 if "cancelled" in end else 1.0), abs=1e-6)]

    gate.open()
    world.advance(0.1)
    landed = [call.document["state"] for call in writes(host)]
    if op == "read":
        assert landed == [], "a look that comes late is followed by nothing"
        assert world.store.read(KEY, timeout=1).body == b""
    else:
        assert landed == ["held", "released"], "the grant came late, and was given back"
        assert stored(world).state is State.RELEASED
        assert stored(world).last is not None
        assert stored(world).last.outcome == "given back"  # type: ignore[union-attr]
    assert other.lock().try_do(lambda ctx: "in") == (True, "in")
    count = len(host.requests())
    world.advance(120)
    assert len(host.requests()) == count


@pytest.mark.parametrize("end", ["cancelled", "out of time"])
def test_a_grant_whose_answer_was_lost_before_the_end_ages_out_at_the_latest(
    world: World, end: str
) -> None:
    """Nobody heard of it, nobody renews it; the next one has it within a ttl and a poll."""
    host, other = world.host(prompt=False), world.host("other")
    parent = Ctx.background(world.clock)
    host.storage.always("write", applied_then(unavailable))
    host.storage.script("read", None, *[fail(unavailable)] * 99)
    running = world.start(lambda: ENDS[end](host.lock(), parent))
    world.advance(0.02)
    parent.cancel()
    world.advance(3)
    assert running.done
    begun = world.clock.monotonic()
    waiting = world.start(lambda: other.lock().do(lambda ctx: world.clock.monotonic() - begun))
    world.advance(TTL + POLL)
    assert waiting.result() <= TTL + POLL
    assert sum(call.applied for call in writes(host)) <= 2, "no renewals"


def test_a_grant_that_lands_as_its_caller_is_cancelled_is_given_back(world: World) -> None:
    """The answer is there, the caller is gone: a body must not start for nobody."""
    host, other = world.host(), world.host("other")
    parent = Ctx.background(world.clock)

    def cancel_after(call: Call, proceed: Callable[[], Any]) -> Any:
        version = proceed()
        parent.cancel("in that very moment")
        return version

    host.storage.script("write", cancel_after)
    calls: list[Callable[[], object]] = [
        lambda: host.lock().do(lambda ctx: pytest.fail("ran"), ctx=parent),
        lambda: host.lock().try_do(lambda ctx: pytest.fail("ran"), ctx=parent),
    ]
    for call in calls:
        with pytest.raises(CtxCancelledError, match="in that very moment"):
            call()
    assert other.lock().try_do(lambda ctx: "in") == (True, "in")


def test_a_campaign_that_was_given_up_makes_room_in_the_line(world: World) -> None:
    blocker, host = Blocker(world), world.host()
    parent = Ctx.background(world.clock)
    first = world.start(lambda: host.lock().do(lambda ctx: None, ctx=parent))
    second = world.start(lambda: host.lock().do(lambda ctx: "second"))
    world.advance(10)
    parent.cancel()
    world.advance(0)
    with pytest.raises(CtxCancelledError):
        first.result()
    before = len(looks(host))
    world.advance(10)
    assert len(looks(host)) >= before + 3, "the second polls now"
    blocker.end()
    world.advance(POLL)
    assert second.result() == "second"


def test_a_campaign_says_once_whom_it_waits_for_and_once_that_it_has_it(world: World) -> None:
    blocker, host = Blocker(world), world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: None))
    world.advance(100)
    blocker.end()
    world.advance(POLL)
    running.result()
    (waiting,) = host.told(Waiting)
    (acquired,) = host.told(Acquired)
    assert waiting.holder.owner.split(":")[0] == waiting.holder.host
    assert acquired.contended is True
    assert 100 <= acquired.waited <= 100 + POLL
    assert acquired.how == "released"


def test_two_gates_show_that_only_one_of_two_late_grants_is_anyones(world: World) -> None:
    """An attempt, its retry, and a caller who is gone: both writes end, neither is renewed."""
    host, other = world.host(prompt=False), world.host("other")
    parent = Ctx.background(world.clock)
    gates = [Gate(), Gate()]
    host.storage.script("write", *gates)
    running = world.start(lambda: host.lock().do(lambda ctx: pytest.fail("ran"), ctx=parent))
    world.advance(5.5)  # the first attempt is given up after 5 s, and written again
    assert [gate.arrived.is_set() for gate in gates] == [True, True]
    parent.cancel()
    world.advance(0)
    assert type(running.error) is CtxCancelledError
    for gate in reversed(gates):
        gate.open()
        world.advance(0.1)
    states = [call.document["state"] for call in writes(host) if call.applied]
    assert states == ["held", "released"]
    assert other.lock().try_do(lambda ctx: "in") == (True, "in")


@pytest.mark.parametrize("end", ["cancelled", "out of time"])
def test_a_campaign_that_is_over_does_not_wait_for_a_give_back_that_hangs(
    world: World, end: str
) -> None:
    """Its first write was answered late, so there is something to give back; a moment is enough."""
    host = world.host(prompt=False)
    parent = Ctx.background(world.clock)
    first = Gate()
    host.storage.script("write", first, hang(), hang())
    begun, ended = world.clock.monotonic(), list[float]()

    def campaign() -> None:
        try:
            host.lock().do(lambda ctx: pytest.fail("ran"), ctx=parent, timeout=6.0)
        finally:
            ended.append(world.clock.monotonic())

    running = world.start(campaign)
    world.advance(5.5)  # the first attempt is given up after 5 s, and written again
    first.open()
    world.advance(0.25)
    if end == "cancelled":
        parent.cancel()
    world.advance(5.0)
    assert type(running.error) is (
        CtxCancelledError if end == "cancelled" else CampaignTimeoutError
    )
    over = begun + (5.75 if end == "cancelled" else 6.0)
    assert ended == [pytest.approx(over + TTL / 60, abs=1e-6)]
    assert [call.document["state"] for call in writes(host)] == ["held", "held", "released"]


@pytest.mark.parametrize("hanging", ["read", "write"])
def test_ctrl_c_with_a_write_in_doubt_is_not_held_up_by_a_storage_that_hangs(
    world: World, hanging: str
) -> None:
    """It is looked for, and given back: each a moment's work, as the process may be ending."""
    host = world.host(prompt=False)
    ended: list[float] = []

    def strike(event: Event) -> None:
        if isinstance(event, Unreachable):
            raise KeyboardInterrupt

    def campaign() -> None:
        try:
            host.lock().do(lambda ctx: pytest.fail("ran"))
        finally:
            ended.append(world.clock.monotonic())

    host.runtime.listeners += (strike,)
    host.storage.script("write", applied_then(unavailable))
    host.storage.always(hanging, hang(), when=lambda call: call.number > 2)
    begun = world.clock.monotonic()
    running = world.start(campaign)
    world.advance(10.0)
    assert type(running.error) is KeyboardInterrupt
    assert ended == [pytest.approx(begun + TTL / 60, abs=1e-6)]
    after = ["read"] if hanging == "read" else ["read", "write"]
    assert host.requests() == ["read", "write", *after]
