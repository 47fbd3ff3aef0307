"""The real thing in threads: a state machine over hosts, and orders of events once wrong."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kit import Host, Running, World
from tako_sync import campaign
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    LeaseLostError,
    LossReason,
    TakoError,
    VersionConflictError,
)
from tako_sync.events import Lost, ReleaseUnconfirmed
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.record import Holder
from tako_sync.runtime import Known
from tako_sync.testing.faults import Call, Proceed, applied_then, delay, fail, lands_later

DRIFT = 0.001


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503")


# --- Orders of events --------------------------------------------------------------------------


def break_by_operator(host: Host) -> None:
    holder = host.lock().holder()
    assert holder is not None
    host.lock().break_(holder)


@pytest.mark.parametrize("waiters", [1, 3])
def test_waiters_do_not_spin_while_a_lost_body_of_their_process_goes_on(waiters: int) -> None:
    world = World()
    host, operator = world.host("a"), world.host("b")
    ended = Flag()
    holder = world.start(lambda: host.lock().do(lambda ctx: world.clock.wait(ended)), "holder")
    break_by_operator(operator)
    world.advance(11)  # its heartbeat learns of it; its body does not care
    waiting = [
        Running(lambda: host.lock().do(lambda ctx: "in"), f"waiter {i}") for i in range(waiters)
    ]
    before = host.storage.count("read")
    for waiter in waiting:
        waiter.start_on(world.clock)
    world.advance(10)
    assert host.storage.count("read") - before <= 8
    ended.set()
    world.advance(5)
    with pytest.raises(LeaseLostError):
        holder.result()
    assert [waiter.result() for waiter in waiting] == ["in"] * waiters


def test_a_hold_freed_between_the_poll_and_the_sleep_wakes_the_local_waiter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    host = world.host()
    ended, slept = Flag(), Flag()
    sleep = campaign.Campaign._sleep

    def late(self: Any, seconds: float, *args: Any) -> None:
        if threading.current_thread().name == "waiter" and not slept.is_set():
            slept.set()
            ended.set()
            holder.thread.join(10)  # it is released before this one sleeps
        sleep(self, seconds, *args)

    holder = world.start(lambda: host.lock().do(lambda ctx: world.clock.wait(ended)), "holder")
    monkeypatch.setattr(campaign.Campaign, "_sleep", late)
    waiter = world.start(lambda: host.lock().do(lambda ctx: "in"), "waiter")
    world.advance(1)
    assert slept.is_set()
    assert waiter.result() == "in"


def test_a_line_of_local_waiters_goes_through_at_once() -> None:
    """The next one polls while the one before releases: it must not miss the end of that."""
    world = World()
    host = world.host()
    ended = Flag()
    times: list[float] = []
    world.start(lambda: host.lock().do(lambda ctx: world.clock.wait(ended)), "holder")
    world.advance(5)
    for number in range(4):
        world.start(
            lambda: host.lock().do(lambda ctx: times.append(world.clock.monotonic())),
            f"waiter {number}",
        )
    ended.set()
    world.advance(0.1)
    assert len(times) == 4


def test_a_record_of_ones_own_that_was_broken_and_cannot_be_overwritten_is_no_hot_loop() -> None:
    world = World()
    host, operator = world.host("a"), world.host("b")

    def broken_at_once(call: Call, proceed: Proceed) -> None:
        proceed()
        break_by_operator(operator)
        raise unavailable()

    host.storage.script("write", broken_at_once)
    host.storage.always(
        "write", fail(unavailable), when=lambda call: call.document["state"] == "released"
    )
    attempt = world.start(lambda: host.lock().try_do(lambda ctx: None))
    world.advance(10)
    with pytest.raises(BackendUnavailableError):
        attempt.result()
    assert host.storage.count("read") < 40
    host.storage.heal()
    world.advance(30)
    assert host.lock().try_do(lambda ctx: None).ran


def test_conflicts_over_a_record_that_nobody_has_changed_are_unresolved_and_not_busy() -> None:
    world = World()
    host = world.host()
    host.lock().do(lambda ctx: None)
    host.storage.always("write", fail(VersionConflictError))
    attempt = world.start(lambda: host.lock().try_do(lambda ctx: None))
    world.advance(15)
    with pytest.raises(BackendUnavailableError):
        attempt.result()


def test_a_look_refused_while_releasing_in_doubt_does_not_cost_the_result() -> None:
    world = World()
    host = world.host()

    def body(ctx: Ctx) -> int:
        host.storage.script("write", applied_then(unavailable))
        host.storage.always("read", fail(BackendDeniedError("no")))
        return 42

    work = world.start(lambda: host.lock().do(body))
    world.advance(5)
    assert work.result() == 42
    assert len(host.told(ReleaseUnconfirmed)) == 1


def test_a_version_and_since_when_it_stands_are_taken_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between any two instructions of one thread's look, another's must not see it as old."""
    known = Known()
    known.first_seen("1", 0.0)
    seen: list[float] = []

    def step(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is not Known.first_seen.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not nested:
            nested.append(True)
            # A copy, or the other thread's look would change what this one goes on to see.
            other = Known(**{name: getattr(known, name) for name in fields})
            seen.append(other.first_seen("2", 1_000.5))
            nested.clear()
        return step

    fields = [field.name for field in Known.__attrs_attrs__]
    nested: list[bool] = []
    before = sys.gettrace()
    sys.settrace(step)
    try:
        known.first_seen("2", 1_000.0)
    finally:
        sys.settrace(before)
    assert len(seen) > 3
    assert min(seen) >= 1_000.0


# --- The state machine -------------------------------------------------------------------------

HOSTS = st.sampled_from([0, 0, 1, 2])
STEPS = st.sampled_from([0.05, 0.4, 1.0, 2.5, 5.0, 9.9, 10.0, 26.9, 27.0, 30.0, 33.0, 40.0])
FAULTS: dict[str, Callable[[], Any]] = {
    "503": lambda: fail(unavailable),
    "lost reply": lambda: applied_then(unavailable),
    "slow": lambda: delay(2.0, 2.0),
    "slow reply": lambda: delay(0.0, 4.9),
    "too slow": lambda: delay(3.0, 9.0),
    "drips": lambda: delay(1.0, 31.0, deaf=True),
    "lands later": lambda: lands_later(7.0),
    "lands much later": lambda: lands_later(28.0),
}


class Hosts(RuleBasedStateMachine):
    """Three hosts with clocks of their own, one name, and all that may go wrong around them."""

    @initialize(
        offsets=st.lists(st.sampled_from([0.0, -500_000.0, 7e6]), min_size=3, max_size=3),
        rates=st.lists(
            st.sampled_from([1.0, 1 - DRIFT / 2, 1 + DRIFT / 2]), min_size=3, max_size=3
        ),
        prompt=st.booleans(),
    )
    def begin(self, offsets: list[float], rates: list[float], prompt: bool) -> None:
        self.before = set(threading.enumerate())
        self.world = World()
        self.prompt = prompt
        for name, offset, rate in zip("abc", offsets, rates, strict=True):
            self.world.host(name, offset=offset, rate=rate, wall_offset=offset, prompt=prompt)
        self.jobs: list[Running[Any]] = []
        self.parents: list[Ctx] = []
        self.broken = self.broken_now = False

    def host(self, number: int) -> Host:
        return self.world.hosts[number]

    # --- What may happen

    @rule(
        number=HOSTS,
        how=st.sampled_from(["do", "try_do", "hold"]),
        work=st.sampled_from([0.0, 0.3, 12.0, 45.0]),
        heeds=st.booleans(),
        timeout=st.sampled_from([None, 4.0, 50.0]),
    )
    def start(self, number: int, how: str, work: float, heeds: bool, timeout: float | None) -> None:
        if sum(not job.done for job in self.jobs) >= 6:
            return
        host, world, meter = self.host(number), self.world, self.world.meter
        parent = Ctx.background(host.clock)

        def body(ctx: Ctx) -> None:
            with meter.running(ctx):
                if heeds:
                    ctx.wait(work)
                else:
                    host.clock.wait(Flag(), work)

        def work_at(lock: Lock) -> None:
            if how == "do":
                lock.do(body, ctx=parent, timeout=timeout)
            elif how == "try_do":
                lock.try_do(body, ctx=parent)
            else:
                with lock.hold(ctx=parent, timeout=timeout) as ctx:
                    body(ctx)

        self.parents.append(parent)
        self.jobs.append(world.start(lambda: work_at(host.lock()), f"{how} on {host.name}"))

    @rule(seconds=STEPS)
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(
        number=HOSTS,
        fault=st.sampled_from(sorted(FAULTS)),
        op=st.sampled_from(["read", "write", "*"]),
        times=st.sampled_from([1, 1, 2, 3, 0]),
    )
    def break_the_way(self, number: int, fault: str, op: str, times: int) -> None:
        """The next requests of a host meet a fault; with 0, all of them until it is healed."""
        if self.prompt and fault in ("too slow", "drips"):
            fault = "lost reply"  # a prompt storage answers at once, or not at all
        storage = self.host(number).storage
        if times:
            storage.script(op, *(FAULTS[fault]() for _ in range(times)))
        else:
            storage.always(op, FAULTS[fault]())

    @rule(
        holder=HOSTS,
        rival=HOSTS,
        fault=st.sampled_from(sorted(FAULTS)),
        before=st.sampled_from([0.4, 9.7, 10.5, 14.0, 20.2]),
        broken=st.sampled_from([False, False, True]),
    )
    def duel(self, holder: int, rival: int, fault: str, before: float, broken: bool) -> None:
        """A holder is cut off, or broken and does not care; someone waits for its end."""
        self.start(holder, "do", 45.0, False, None)
        self.world.advance(before)
        if broken:
            self.operate("break")
        else:
            self.break_the_way(holder, fault, "*", 2)
            self.world.advance(1.0)
            self.break_the_way(holder, "503", "*", 0)
        self.start(rival, "do", 0.3, True, None)
        for _ in range(8):
            self.world.advance(5.0)
            self.nobody_overlaps_and_fences_rise()
        self.heal(holder)

    @rule(number=HOSTS)
    def heal(self, number: int) -> None:
        self.host(number).storage.heal()

    @rule(number=HOSTS)
    def release_all(self, number: int) -> None:
        self.host(number).storage.release_all()
        self.world.advance(0)

    @rule(seconds=st.sampled_from([3600.0, -3600.0, -30.0]))
    def step_the_wall(self, seconds: float) -> None:
        self.world.clock.step_wall(seconds)

    @rule(how=st.sampled_from(["break", "hand over", "hand over", "break", "break now"]))
    def operate(self, how: str) -> None:
        operator = Host("operator", self.world.store, self.world.clock, self.world.policy, True)
        lock = operator.lock()
        holder: Holder | None = lock.holder()
        if holder is None:
            return
        try:
            if how == "hand over":
                lock.request_handover(holder, by="operator")
            else:
                self.broken = True
                self.broken_now = self.broken_now or how == "break now"
                lock.break_(holder, now=how == "break now")
        except TakoError:
            pass  # asked already, or broken and not to be asked
        self.world.advance(0)

    @rule(number=st.integers(0, 50))
    def cancel(self, number: int) -> None:
        if self.parents:
            self.parents[number % len(self.parents)].cancel("enough")
            self.world.advance(0)

    # --- What must hold

    @invariant()
    def nobody_overlaps_and_fences_rise(self) -> None:
        if hasattr(self, "world") and not self.broken_now:
            self.world.meter.check()

    @invariant()
    def a_loss_is_told_once_and_not_for_nothing(self) -> None:
        possible = {LossReason.EXPIRED, LossReason.UNREACHABLE, LossReason.TAKEN}
        if hasattr(self, "world"):
            for host in self.world.hosts:
                reasons = {event.reason for event in host.told(Lost)}
                assert reasons <= (possible | {LossReason.BROKEN} if self.broken else possible)
                told = Counter(event.fence for event in host.told(Lost))
                assert not [fence for fence, times in told.items() if times > 1]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for host in self.world.hosts:
            host.storage.release_all()
        # A broken record ages a ttl; each in the line may work for 45 s, and rest a poll.
        for _ in range(8):
            self.world.advance(60)
        running = [job._name for job in self.jobs if not job.done]
        assert not running, f"{running} have not ended; waiting: {self.world.clock.waiters}"
        for job in self.jobs:
            assert job.error is None or isinstance(job.error, TakoError), repr(job.error)
        assert not self.world.clock.waiters
        left = [thread for thread in threading.enumerate() if thread not in self.before]
        for thread in left:
            thread.join(5)
        assert not [thread.name for thread in left if thread.is_alive()]
        self.nobody_overlaps_and_fences_rise()
        self.a_loss_is_told_once_and_not_for_nothing()
        assert self.host(0).lock().holder() is None
        assert self.host(0).lock().try_do(lambda ctx: None).ran


TestHosts = Hosts.TestCase
TestHosts.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, print_blob=False
)
