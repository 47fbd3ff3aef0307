"""Processes that are stopped, starved, interrupted or killed while they hold a lease."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from processes.kit_processes import PATIENCE, Crew, Post, Report, Worker, check_order, clock
from tako_sync.backends.memory import MemoryLease
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.ctx import Ctx
from tako_sync.errors import LeaseLostError
from tako_sync.events import Acquired, Event
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.record import Record, read
from tako_sync.runtime import Runtime
from tako_sync.testing.faults import Call, FaultyBackend

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signals here")

TTL = 1.5
POLL = 0.1
LONG = 120.0
"""A ttl that no test waits for: what comes sooner was not an expiry."""


def record(path: str) -> Record:
    store = SqliteLease(path)
    found = read(store.read("run-shop-test-reindex", timeout=20))
    store.close()
    assert isinstance(found, Record)
    return found


def hold(post: Post, path: str, ttl: float) -> None:
    """Hold the lease until told to go on, then ask the ctx, and end."""
    lock = post.lock(path, ttl, POLL)

    def body(ctx: Ctx) -> str:
        with post.running(ctx):
            while (order := post.order()) == "tell":
                post.report("step", ctx)
            first = ctx.cancelled
            post.report("asked", cancelled=first, remaining=ctx.remaining(), fence=ctx.fence)
            if order == "check":
                ctx.check()
        return "worked"

    post.report("ready")
    try:
        value = lock.do(body)
        post.report("outcome", value=value)
    except LeaseLostError as loss:
        post.report("outcome", reason=loss.reason.value, value=getattr(loss, "value", None))


def stop_outside_of_a_write(worker: Worker) -> None:
    """Right after a renewal: who is stopped in a transaction keeps the file locked as well."""
    worker.expect("Renewed")
    worker.send(signal.SIGSTOP)


# --- 20: stopped past the ttl --------------------------------------------------------------


@pytest.mark.parametrize("how", ["go on", "check"])
def test_a_process_stopped_past_its_ttl_finds_itself_cancelled_and_touches_nothing(
    crew: Crew, path: str, how: str
) -> None:
    stopped = crew.start(hold, path, TTL, name="stopped")
    stopped.expect("begin")
    other = crew.start(hold, path, TTL, name="other")
    other.expect("Waiting")
    stop_outside_of_a_write(stopped)
    taken = other.expect("begin")
    other.expect("Renewed")
    stopped.tell(how)
    stopped.send(signal.SIGCONT)
    asked = stopped.expect("asked")
    assert asked["cancelled"] and asked["remaining"] == 0
    outcome = stopped.expect("outcome")
    assert outcome["reason"] in ("expired", "unreachable", "taken")
    assert outcome["value"] == (None if how == "check" else "worked")
    stopped.ends_well()

    # Nothing that it sent after all has touched the other's record.
    assert record(path).fence == taken["fence"]
    assert record(path).owner == [one["owner"] for one in other.all("request") if one["owner"]][-1]
    other.expect("Renewed")
    other.tell("go on")
    assert not other.expect("asked")["cancelled"]
    assert other.expect("outcome")["value"] == "worked"
    assert taken["fence"] > asked["fence"]
    assert len(check_order(crew.reports)) == 2
    late = [one for one in stopped.all("request") if one["at"] > asked["at"]]
    assert not [one for one in late if one["state"] == "held"], "a lost hold is not renewed"


def test_a_process_stopped_past_its_ttl_is_cancelled_although_nobody_wanted_the_lease(
    crew: Crew, path: str
) -> None:
    stopped = crew.start(hold, path, TTL, name="stopped")
    began = stopped.expect("begin")
    stop_outside_of_a_write(stopped)
    # Past the deadline that the last renewal gave it, by the clock that counts.
    clock.wait(Flag(), TTL)
    stopped.tell("go on")
    stopped.send(signal.SIGCONT)
    assert stopped.expect("asked")["cancelled"]
    assert stopped.expect("outcome")["reason"] in ("expired", "unreachable")
    stopped.ends_well()
    # Its record was still its own: freed, so that the next one need not wait.
    found = record(path)
    assert (found.state.value, found.fence) == ("released", began["fence"])
    assert found.last is not None and found.last.outcome == "lost"


def stop_before_the_body(post: Post, path: str, ttl: float) -> None:
    """Stop between the grant and the body, where nobody asks a deadline any more."""
    runtime = post.runtime(path, ttl, POLL)

    def stop(event: Event) -> None:
        if isinstance(event, Acquired):
            os.kill(os.getpid(), signal.SIGSTOP)

    runtime.listeners += (stop,)

    def body(ctx: Ctx) -> None:
        post.report("asked", cancelled=ctx.cancelled)

    with contextlib.suppress(LeaseLostError):
        Lock("reindex").bound_to(runtime).do(body)


def test_a_process_stopped_between_its_grant_and_its_body_begins_cancelled(
    crew: Crew, path: str
) -> None:
    stopped = crew.start(stop_before_the_body, path, TTL)
    stopped.expect("Acquired")
    other = crew.start(hold, path, TTL)
    other.expect("begin")
    stopped.send(signal.SIGCONT)
    assert stopped.expect("asked")["cancelled"]
    stopped.ends_well()
    other.tell("go on")
    assert not other.expect("asked")["cancelled"]
    assert other.expect("outcome")["value"] == "worked"


# --- 19: starved ---------------------------------------------------------------------------


def hold_the_interpreter(post: Post, path: str, ttl: float, seconds: float) -> None:
    usleep = ctypes.PyDLL(None).usleep  # PyDLL: called with the interpreter's lock held
    lock = post.lock(path, ttl, POLL)

    def body(ctx: Ctx) -> None:
        with post.running(ctx):
            usleep(int(seconds * 1_000_000))
            post.report("asked", cancelled=ctx.cancelled, fence=ctx.fence)

    try:
        lock.do(body)
    except LeaseLostError as loss:
        post.report("outcome", reason=loss.reason.value)


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="no interpreter lock to hold"
)
def test_a_body_that_starves_its_heartbeat_past_the_ttl_is_told_at_its_next_question(
    crew: Crew, path: str
) -> None:
    other = crew.start(hold, path, TTL, name="other")
    first = other.expect("begin")
    starved = crew.start(hold_the_interpreter, path, TTL, 2 * TTL, name="starved")
    starved.expect("Waiting")
    other.tell("go on")
    other.ends_well()
    began = starved.expect("begin")
    next_one = crew.start(hold, path, TTL, name="next")
    taken = next_one.expect("begin")
    assert starved.expect("asked")["cancelled"]
    assert starved.expect("outcome")["reason"] in ("expired", "unreachable", "taken")
    next_one.tell("go on")
    assert next_one.expect("outcome")["value"] == "worked"
    assert first["fence"] < began["fence"] < taken["fence"], "the resource can tell them apart"
    assert len(check_order(crew.reports)) == 3


# --- 27: killed, or asked to go --------------------------------------------------------------


def hold_with_a_handler(post: Post, path: str, ttl: float) -> None:
    """As gunicorn and Celery do it: SIGTERM raises SystemExit in the main thread."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(7)

    signal.signal(signal.SIGTERM, leave)
    hold(post, path, ttl)


def hold_in_a_block(post: Post, path: str, ttl: float) -> None:
    with post.lock(path, ttl, POLL).hold() as ctx, post.running(ctx):
        ctx.wait(LONG)


def last_told(worker: Worker) -> float:
    return float(worker.all("step")[-1]["deadline"])


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_after_a_death_without_warning_the_next_one_gets_in_when_the_lease_has_expired(
    crew: Crew, path: str, number: str
) -> None:
    victim, heir = crew.start(hold, path, TTL, name="victim"), crew.start(hold, path, TTL)
    heir.expect("ready")
    victim, heir = sort_by_turn([victim, heir])
    victim.expect("Renewed")
    victim.tell("tell")
    victim.expect("step")
    killed = victim.send(getattr(signal, number))
    assert victim.ends() == -getattr(signal, number)
    acquired, began = heir.expect("Acquired"), heir.expect("begin")
    assert acquired["how"] == "expired"
    assert began["at"] >= last_told(victim), "not before the dead one's own deadline"
    # Its last record stands for a ttl; then each poll finds it free. Half a minute is for
    # a machine that has other things to do.
    assert began["at"] - killed <= TTL + 1.25 * POLL + 30
    heir.tell("go on")
    assert heir.expect("outcome")["value"] == "worked"


def sort_by_turn(workers: list[Worker]) -> tuple[Worker, Worker]:
    """Return who holds the lease and who waits for it, once both do."""
    until = clock.monotonic() + PATIENCE
    while clock.monotonic() < until:
        holding = [worker for worker in workers if worker.all("begin")]
        waiting = [worker for worker in workers if worker.all("Waiting")]
        if len(holding) == len(waiting) == 1:
            return holding[0], waiting[0]
        clock.wait(Flag(), 0.005)
    raise AssertionError("they do not come to a state where one holds and one waits")


@pytest.mark.parametrize(
    ("work", "number", "status"),
    [
        (hold_with_a_handler, "SIGTERM", 7),
        (hold, "SIGINT", -2),
        (hold_in_a_block, "SIGINT", -2),
    ],
)
def test_where_python_unwinds_the_next_one_gets_in_without_waiting_for_an_expiry(
    crew: Crew, path: str, work: Callable[..., None], number: str, status: int
) -> None:
    victim = crew.start(work, path, LONG, name="victim")
    began = victim.expect("begin")
    heir = crew.start(hold, path, LONG)
    heir.expect("Waiting")
    victim.send(getattr(signal, number))
    acquired = heir.expect("Acquired")
    assert acquired["how"] == "released"
    assert acquired["fence"] > began["fence"]
    assert victim.ends() == status
    assert victim.all("Released") and not victim.all("Lost")
    heir.tell("go on")
    assert heir.expect("outcome")["value"] == "worked"
    assert len(check_order(crew.reports)) == 2


def use_and_list_handlers(post: Post, path: str) -> None:
    numbers = sorted(signal.valid_signals())
    before = [str(signal.getsignal(number)) for number in numbers]
    post.lock(path, 30, POLL).do(lambda ctx: None)
    after = [str(signal.getsignal(number)) for number in numbers]
    post.report("handlers", same=before == after)


def test_no_signal_handler_is_installed_behind_the_users_back(crew: Crew, path: str) -> None:
    assert crew.start(use_and_list_handlers, path).expect("handlers")["same"]


# --- 33: interrupted anywhere ----------------------------------------------------------------

SHORT = 0.5
"""The ttl: what an interrupt leaves behind is free after that."""


class Range:
    """Two bindings on one storage; the first is shot at, the second finds what is left."""

    def __init__(self, post: Post, path: str) -> None:
        self.post = post
        policy = LeasePolicy(ttl=SHORT, poll=0.04)
        store = SqliteLease(path) if path else MemoryLease()
        other = SqliteLease(path) if path else store
        self.storage = FaultyBackend(store, prompt=store.prompt)
        self.told: list[Event] = []
        self.shot_at = self._lock(self.storage, policy)
        self.finder = self._lock(other, policy, self.told.append)
        self.threads = set(threading.enumerate())
        self.longest = 0.0
        self.struck = {"do": 0, "hold": 0, "campaign": 0}
        self.left_to_expire = 0
        self.stuck: list[str] = []

    def _lock(self, storage: Any, policy: LeasePolicy, *listeners: Callable[[Event], None]) -> Lock:
        runtime = Runtime(storage, app="shop", env="test", policy=policy, listeners=listeners)
        return Lock("reindex").bound_to(runtime)

    def work(self, how: str) -> None:
        """What is interrupted."""
        if how == "do":
            self.shot_at.do(lambda ctx: [ctx.wait(0.001), ctx.check()])
        elif how == "hold":
            with self.shot_at.hold() as ctx:
                ctx.wait(0.001)
        else:
            with self.finder.hold():
                self.shot_at.do(lambda ctx: None, timeout=0.1)

    def look_at_what_is_left(self, how: str, struck_at: float) -> None:
        """After an interrupt: the name becomes free, nothing renews it, nothing is stuck."""
        self.struck[how] += 1
        self.longest = max(self.longest, clock.monotonic() - struck_at)
        held = {call.document["owner"] for call in self.storage.calls if renews_or_takes(call)}
        ended = len(self.storage.calls)
        self.finder.do(lambda ctx: None, timeout=PATIENCE)
        acquired = [event for event in self.told if isinstance(event, Acquired)][-1]
        self.left_to_expire += acquired.how == "expired"
        # A write of the campaign's may have been on its way into its thread. A second one is
        # a renewal, or an attempt of a campaign that goes on.
        for call in self.storage.calls[ended:]:
            if renews_or_takes(call) and call.document["owner"] in held:
                self.stuck.append(f"{how}: written after the end: {call}")
        self._check("the line of local waiters", lambda: self.shot_at.do(lambda ctx: None))
        until = clock.monotonic() + 10
        while (left := set(threading.enumerate()) - self.threads) and clock.monotonic() < until:
            clock.wait(Flag(), 0.002)
        if left:
            self.stuck.append(f"{how}: threads go on: {left}")
            self.threads |= left
        self.storage.clear()
        self.told.clear()

    def _check(self, what: str, run: Callable[[], object]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        if thread.is_alive():
            self.stuck.append(what)
            self.threads.add(thread)

    def report(self) -> None:
        self.post.report(
            "range",
            struck=self.struck,
            longest=self.longest,
            left_to_expire=self.left_to_expire,
            stuck=self.stuck,
        )


def renews_or_takes(call: Call) -> bool:
    return call.document.get("state") == "held"


def take_interrupts(post: Post, path: str, times: int) -> None:
    """SIGINT's own handler, called by a timer's signal, which comes at the microsecond."""
    here, chance = Range(post, path), random.Random(33)
    struck_at: list[float] = []

    def strike(number: int, frame: Any) -> None:
        struck_at.append(clock.monotonic())
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGALRM, strike)
    usual: dict[str, float] = {}
    for number in range(times):
        how = ("do", "hold", "campaign")[number % 3]
        struck_at.clear()
        began = clock.monotonic()
        try:
            if how in usual:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + usual[how] * chance.random())
            with contextlib.suppress(TimeoutError):
                here.work(how)
            # It may have been faster than usual: let the signal come here. It may also have come
            # where Python swallows what is raised, in a destructor.
            while how in usual and not struck_at:
                clock.wait(Flag(), 0.01)
        except KeyboardInterrupt:
            pass
        # Outside of the handler: an interrupt at the first step of a block's __exit__ leaves it
        # to the end of its traceback.
        if struck_at:
            here.look_at_what_is_left(how, struck_at[0])
        else:
            usual[how] = clock.monotonic() - began
    here.report()


def take_exceptions(post: Post, path: str, times: int) -> None:
    """Exceptions thrown into a thread from another, as gevent's and Celery's timeouts are."""
    here, chance = Range(post, path), random.Random(34)

    class Struck(BaseException):
        pass

    usual = {"do": 0.0015, "hold": 0.0015, "campaign": 0.1}
    for number in range(times):
        how = ("do", "hold", "campaign")[number % 3]
        begun, outcome = threading.Event(), []

        def work(how: str = how, begun: Any = begun, outcome: list[str] = outcome) -> None:
            try:
                begun.set()
                here.work(how)
                clock.wait(Flag(), 0.05)
            except Struck:
                outcome.append("struck")
            except TimeoutError:
                pass

        victim = threading.Thread(target=work, daemon=True)
        victim.start()
        begun.wait()
        clock.wait(Flag(), usual[how] * chance.random())
        struck_at = clock.monotonic()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(victim.ident or 0), ctypes.py_object(Struck)
        )
        victim.join(PATIENCE)
        if victim.is_alive():
            here.stuck.append(f"{how} goes on")
            break
        here.look_at_what_is_left(how, struck_at)
        here.struck[how] -= not outcome
    here.report()


def list_what_is_imported(post: Post, path: str) -> None:
    mine, theirs = post.lock(path, LONG, 0.02), post.lock(path, LONG, 0.02)
    mine.do(lambda ctx: None)
    before = set(sys.modules)
    with theirs.hold(), contextlib.suppress(TimeoutError):
        mine.do(lambda ctx: None, timeout=0.2)
    with contextlib.suppress(ValueError):
        mine.do(lambda ctx: [ctx.wait(0.01), int("x")])
    post.report("imported", modules=sorted(set(sys.modules) - before))


def test_nothing_is_imported_while_a_campaign_waits(crew: Crew, path: str) -> None:
    """An interrupt in the midst of an import can leave a package that is never whole again."""
    assert crew.start(list_what_is_imported, path).expect("imported")["modules"] == []


def check_range(told: Report, at_least: int) -> None:
    assert told["stuck"] == []
    assert told["longest"] < 10, "an interrupt ends the call soon"
    assert sum(told["struck"].values()) >= at_least
    assert min(told["struck"].values()) > 0


@pytest.mark.parametrize(("storage", "times"), [("memory", 120), ("sqlite", 60)])
def test_ctrl_c_at_any_moment_leaves_a_lease_that_becomes_free(
    crew: Crew, path: str, storage: str, times: int
) -> None:
    worker = crew.start(take_interrupts, path if storage == "sqlite" else "", times)
    check_range(worker.expect("range"), times // 2)
    worker.ends_well()


@pytest.mark.parametrize(("storage", "times"), [("memory", 300)])
def test_an_exception_thrown_in_at_any_moment_leaves_a_lease_that_becomes_free(
    crew: Crew, path: str, storage: str, times: int
) -> None:
    worker = crew.start(take_exceptions, path if storage == "sqlite" else "", times)
    check_range(worker.expect("range"), times // 3)
    worker.ends_well()
