"""Forked children: they hold nothing of their parent's, and can do everything themselves."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from processes.kit_processes import PATIENCE, Crew, Post, Report, check_order, clock
from tako_sync.abc import ABSENT
from tako_sync.backends.memory import MemoryLease
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.campaign import Campaign
from tako_sync.ctx import Ctx
from tako_sync.errors import BackendUnavailableError, CtxCancelledError, LeaseLostError
from tako_sync.events import Event, Renewed, Unreachable, UnreadableTakenOver, Waiting
from tako_sync.flag import Flag
from tako_sync.lease import Lease
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime
from tako_sync.testing.clock import FakeClock
from tako_sync.testing.faults import Call, FaultyBackend, applied_then

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

KEY = "run-shop-test-reindex"


def in_child(run: Callable[[], object]) -> bool:
    """Run in a forked child that ends itself if it is stuck; return whether all was well."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            run()
            status = 0
        except BaseException as error:  # noqa: BLE001 - only the status leaves the child
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(status)
    return ended(pid) == 0


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def by(pid: int, reports: list[Report], what: str = "request") -> list[Report]:
    return [report for report in reports if report["pid"] == pid and report["what"] == what]


# --- A child forked inside a body --------------------------------------------------------

TTL = 0.9


def work_and_fork(post: Post, path: str, ending: str) -> None:
    """Hold the lease, fork inside the body, and let the child end in one of many ways."""
    runtime = post.runtime(path, TTL, 0.1)
    lock = Lock("reindex").bound_to(runtime)
    mine = os.getpid()
    renewals: list[Event] = []
    runtime.listeners += (lambda event: isinstance(event, Renewed) and renewals.append(event),)

    def body(ctx: Ctx) -> str:
        with post.running(ctx):
            if ending == "multiprocessing":
                process = multiprocessing.get_context("fork").Process(target=inspect, args=(ctx,))
                process.start()
                process.join()
                status = process.exitcode
            else:
                pid = os.fork()
                if pid == 0:
                    inspect(ctx)
                    return end_child(ending)
                status = ended(pid)
            post.report("child ended", status=status)
            wanted = len(renewals) + 3
            while len(renewals) < wanted and not ctx.wait(TTL / 50):
                pass
            post.report("parent", cancelled=ctx.cancelled)
        return "parent's"

    def inspect(ctx: Ctx) -> None:
        began = clock.monotonic()
        checked = "passed"
        try:
            ctx.check()
        except LeaseLostError as loss:
            checked = loss.reason.value
        calls: list[str] = []
        ctx.on_cancel(lambda: calls.append("called"))
        post.report(
            "child",
            waited=[ctx.wait(300), ctx.done.wait(300), ctx.done.wait(), ctx.child().wait(300)],
            done=ctx.done.is_set(),
            flag=ctx.flag.is_set(),
            cancelled=ctx.cancelled,
            checked=checked,
            remaining=[ctx.remaining(), ctx.lease.remaining()],
            generations=ctx.lease.forked,
            called=calls,
            took=clock.monotonic() - began,
        )

    def end_child(ending: str) -> str:
        if ending == "raises":
            raise ValueError("the child's own")
        if ending == "sys.exit":
            sys.exit(3)
        if ending == "os._exit":
            os._exit(4)
        return "child's"

    try:
        value = lock.do(body)
    except LeaseLostError as loss:
        post.report("outcome", error="LeaseLostError", reason=loss.reason.value, value=loss.value)
    except ValueError as error:
        notes = "".join(getattr(error, "__notes__", []))
        post.report("outcome", error="ValueError", noted="(reason: forked" in notes)
    except SystemExit:
        post.report("outcome", error="SystemExit")
        raise  # through the end of the interpreter, with all its hooks
    else:
        post.report("outcome", value=value)
    if os.getpid() != mine:
        # Still nothing stands in the way of what the child does on its own account.
        with_fresh_eyes = lock.try_do(lambda ctx: "ran")
        post.report("child tried", ran=with_fresh_eyes.ran)


@pytest.mark.parametrize(
    ("ending", "status", "outcome"),
    [
        ("returns", 0, {"error": "LeaseLostError", "reason": "forked", "value": "child's"}),
        ("raises", 0, {"error": "ValueError", "noted": True}),
        ("sys.exit", 3, {"error": "SystemExit"}),
        ("os._exit", 4, None),
        ("multiprocessing", 0, None),
    ],
)
def test_a_child_forked_inside_a_body_holds_nothing_and_its_parent_keeps_all(
    crew: Crew, path: str, ending: str, status: int, outcome: dict[str, object] | None
) -> None:
    worker = crew.start(work_and_fork, path, ending)
    child = worker.expect("child")
    assert child["cancelled"] and child["done"] and child["flag"] and child["generations"]
    assert child["waited"] == [True] * 4
    assert child["checked"] == "forked"
    assert child["remaining"] == [0, 0]
    assert child["called"] == ["called"]
    assert child["took"] < 20, "it waits for nothing"
    worker.ends_well()
    (told,) = worker.all("child ended")
    assert told["status"] == status

    reports = worker.reports
    told_by_child = by(child["pid"], reports, "outcome")
    if outcome is None:
        assert not told_by_child
    else:
        assert outcome.items() <= told_by_child[0].items()
    # The child's only request is the look of its own attempt, after the body; it found us there.
    own = by(child["pid"], reports)
    tried = by(child["pid"], reports, "child tried")
    assert [request["op"] for request in own] == ["read"] * len(tried)
    assert [attempt["ran"] for attempt in tried] == (
        [False] if ending in ("returns", "raises") else []
    )

    # Meanwhile the parent's hold went on as if nothing had been.
    parent = by(worker.pid, reports, "parent")[0]
    assert not parent["cancelled"]
    assert by(worker.pid, reports, "outcome")[0]["value"] == "parent's"
    renewals = by(worker.pid, reports, "Renewed")
    assert len([one for one in renewals if one["at"] > told["at"]]) >= 3
    written = {one["owner"] for one in reports if one["what"] == "request" and one["op"] == "write"}
    assert len(written) == 1, "no record of the child's was ever sent"
    assert [one["state"] for one in by(worker.pid, reports)][-1] == "released"
    assert not [one for one in reports if one["what"] in ("Lost", "ReleaseUnconfirmed")]


def hold_and_fork_around(post: Post, path: str) -> None:
    """The block form, and a hold of another thread, forgotten in the child."""
    lock, other = post.lock(path, TTL), post.lock(path, TTL, name="other")
    held, over = Flag(), Flag()

    def hold_elsewhere() -> None:
        with other.hold() as ctx:
            held.set()
            over.wait()
            post.report("elsewhere", cancelled=ctx.cancelled)

    thread = threading.Thread(target=hold_elsewhere)
    thread.start()
    held.wait()
    with contextlib.suppress(LeaseLostError), lock.hold() as ctx:
        pid = os.fork()
        if pid:
            post.report("child ended", child=pid, status=ended(pid))
            over.set()
            thread.join()
            post.report("parent", cancelled=ctx.cancelled)
    if pid == 0:
        del ctx
        gc.collect()
        sys.exit(0)


def test_a_child_neither_gives_back_nor_renews_the_blocks_of_all_its_parents_threads(
    crew: Crew, path: str
) -> None:
    worker = crew.start(hold_and_fork_around, path)
    worker.ends_well()
    (child,) = worker.all("child ended")
    assert child["status"] == 0
    assert by(child["child"], worker.reports) == []
    assert [one["cancelled"] for one in worker.all("parent") + worker.all("elsewhere")] == [
        False
    ] * 2


# --- Locks that a thread of the parent holds at the fork -----------------------------------


class Spot:
    """A lock somewhere inside, to be held by a thread of the parent during a fork."""

    def __init__(self) -> None:
        self.store = MemoryLease()
        self.told: list[Any] = []
        self.runtime = Runtime(
            self.store,
            app="shop",
            env="test",
            policy=LeasePolicy(ttl=30, poll=0.05),
            listeners=[self.told.append],
        )
        self.ctx: Ctx | None = None

    def lock(self, name: str = "reindex") -> Lock:
        return Lock(name).bound_to(self.runtime)

    @contextlib.contextmanager
    def held_by_a_thread(self, lock: AbstractContextManager[Any]) -> Iterator[None]:
        taken, over = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                taken.set()
                over.wait(PATIENCE)

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        assert taken.wait(PATIENCE)
        try:
            yield
        finally:
            over.set()
            thread.join(PATIENCE)

    def all_works(self) -> None:
        """In the child: nothing stands still, and the body's own ctx reads cancelled."""
        if self.ctx is not None:
            assert self.ctx.cancelled
            assert self.ctx.wait(300)
            assert self.ctx.lease.holder().owner
            assert self.ctx.lease.conclude() is not None
            assert "over" in repr(self.ctx.lease)
        assert self.lock("other").do(lambda ctx: ctx.fence)
        assert self.ctx is None or not self.lock().try_do(lambda ctx: 1), "the parent has it"
        assert Lock("x").bound_to(Runtime(MemoryLease())).try_do(lambda ctx: 1)


SPOTS: dict[str, Callable[[Spot], AbstractContextManager[Any]]] = {
    "the lease's": lambda spot: spot.ctx.lease._lock,  # type: ignore[union-attr]
    "the runtime's": lambda spot: spot.runtime.lock,
    "the memory's": lambda spot: spot.store._lock,
}


@pytest.mark.parametrize("spot", SPOTS)
def test_a_lock_that_a_thread_of_the_parent_holds_is_usable_in_the_child(spot: str) -> None:
    there = Spot()

    def body(ctx: Ctx) -> bool:
        there.ctx = ctx
        with there.held_by_a_thread(SPOTS[spot](there)):
            return in_child(there.all_works)

    assert there.lock().do(body)


def test_a_heartbeat_that_stands_in_the_leases_lock_does_not_stop_a_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it happens: the thread that renews has the lock at the very moment of the fork."""
    there = Spot()
    policy = LeasePolicy(ttl=1.5, poll=0.05)
    runtime = Runtime(there.store, app="shop", env="test", policy=policy)
    inside, over = threading.Event(), threading.Event()
    prolong = Lease.prolong

    def stand_inside(self: Lease, sent: float) -> bool:
        with self._lock:
            inside.set()
            over.wait(PATIENCE)
            return prolong(self, sent)

    monkeypatch.setattr(Lease, "prolong", stand_inside)

    def body(ctx: Ctx) -> bool:
        there.ctx = ctx
        assert inside.wait(PATIENCE)
        try:
            return in_child(there.all_works)
        finally:
            over.set()

    with contextlib.suppress(LeaseLostError):  # a busy machine may take its time to fork
        assert Lock("reindex").bound_to(runtime).do(body)
    assert over.is_set()


def test_a_fork_beside_a_campaign_leaves_the_child_no_line_to_wait_in() -> None:
    """The waiter's thread is the parent's: in the child nobody would ever let the next one on."""
    there = Spot()
    waiting = threading.Event()
    there.runtime.listeners += (lambda event: isinstance(event, Waiting) and waiting.set(),)
    elsewhere = Runtime(there.store, app="shop", env="test", policy=there.runtime.policy)
    answers: list[int] = []

    def wait_for_it() -> None:
        answers.append(there.lock().do(lambda ctx: ctx.fence))

    def body(ctx: Ctx) -> bool:
        campaigns = [threading.Thread(target=wait_for_it, daemon=True) for _ in range(3)]
        for campaign in campaigns:
            campaign.start()
        assert waiting.wait(PATIENCE)
        holder = Lock("reindex").bound_to(elsewhere).holder()
        assert holder is not None

        def child() -> None:
            assert not there.lock().try_do(lambda ctx: 1), "the parent has it"
            Lock("reindex").bound_to(elsewhere).break_(holder, now=True)
            # Nobody stands before this one.
            assert there.lock().do(lambda ctx: ctx.fence, timeout=15) > ctx.fence

        try:
            return in_child(child)
        finally:
            threads.extend(campaigns)

    threads: list[threading.Thread] = []
    assert Lock("reindex").bound_to(elsewhere).do(body)
    for thread in threads:
        thread.join(PATIENCE)
    assert len(answers) == 3
    assert answers == sorted(answers)


@pytest.mark.parametrize("moment", ["_attempt", "_write", "_sleep", "_hand_on"])
def test_a_fork_at_any_moment_of_a_campaign_leaves_the_child_able_to_campaign(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Spot()
    inside, over = threading.Event(), threading.Event()
    step = getattr(Campaign, moment)

    def stand_there(self: Campaign, *args: Any) -> Any:
        if threading.current_thread().name == "campaign" and not over.is_set():
            with self._settling:
                inside.set()
                over.wait(PATIENCE)
        return step(self, *args)

    monkeypatch.setattr(Campaign, moment, stand_there)
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(there.lock().do(lambda ctx: ctx.fence)),
        name="campaign",
        daemon=True,
    )
    with contextlib.ExitStack() as stack:
        if moment == "_sleep":
            stack.enter_context(there.lock().hold())
        thread.start()
        assert inside.wait(PATIENCE)
        try:
            assert in_child(there.all_works)
        finally:
            over.set()
    thread.join(PATIENCE)
    assert len(answers) == 1


# --- Children that work on their own -------------------------------------------------------

CHILD_TTL = 1.0


def use_once_then_fork(post: Post, path: str, children: int) -> None:
    """As a prefork server does: made and used in the parent, needed in the children."""
    lock = post.lock(path, CHILD_TTL)

    def body(ctx: Ctx) -> None:
        with post.running(ctx):
            until = clock.monotonic() + 3 * CHILD_TTL
            while clock.monotonic() < until and not ctx.wait(CHILD_TTL / 10):
                post.report("step", ctx)

    lock.do(lambda ctx: None)
    pids = []
    for number in range(children):
        pid = os.fork()
        if pid == 0:
            post.name = f"child {number}"
            lock.do(body)
            post.report("done")
            os._exit(0)
        pids.append(pid)
    post.report("children", statuses=[ended(pid) for pid in pids])


def test_a_lock_used_before_the_fork_works_in_each_child_with_a_heartbeat_of_its_own(
    crew: Crew, path: str
) -> None:
    worker = crew.start(use_once_then_fork, path, 4)
    assert worker.expect("children")["statuses"] == [0] * 4
    worker.ends_well()
    assert len(check_order(crew.reports)) == 4
    done = worker.all("done")
    assert len({report["pid"] for report in done}) == 4
    for report in done:
        writes = [one for one in by(report["pid"], worker.reports) if one["op"] == "write"]
        held = [one for one in writes if one["state"] == "held"]
        assert len(held) >= 1 + 4, "in three ttl nine are due; with fewer it would be lost"
        assert writes[-1]["state"] == "released"
        assert len(by(report["pid"], worker.reports, "Renewed")) >= 4
    assert not worker.all("Lost")


def fork_right_after_a_hold(post: Post, path: str) -> None:
    """The thread that slept for the parent's hold still sleeps, ready for the next one."""
    lock = post.lock(path, CHILD_TTL)
    for number in range(2):
        lock.do(lambda ctx: None)
        pid = os.fork()
        if pid == 0:

            def body(ctx: Ctx) -> bool:
                deadline = clock.monotonic() + ctx.remaining()
                return ctx.wait(CHILD_TTL) or clock.monotonic() < deadline

            post.report("child", number=number, cancelled=lock.do(body))
            os._exit(0)
        post.report("forked", child=pid, status=ended(pid))


def test_the_first_hold_of_a_child_is_renewed_although_its_parent_had_a_sleeper_to_spare(
    crew: Crew, path: str
) -> None:
    worker = crew.start(fork_right_after_a_hold, path)
    worker.ends_well()
    forked = worker.all("forked")
    assert [one["status"] for one in forked] == [0] * 2
    assert [one["cancelled"] for one in worker.all("child")] == [False] * 2
    for one in forked:
        assert by(one["child"], worker.reports, "Renewed")


def name_the_owners(post: Post, path: str) -> None:
    """Everything that could make two owners equal, at once."""
    runtime = post.runtime(path, 30, 0.1)
    lock = Lock("reindex").bound_to(runtime)
    post.report("owner", owner=lock.do(lambda ctx: ctx.lease.owner))
    os.getpid = lambda: 1  # type: ignore[assignment]  # as in a container
    random.seed(7)
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            random.seed(7)
            post.report(
                "owner",
                owner=Lock(f"own-{number}").bound_to(runtime).do(lambda ctx: ctx.lease.owner),
            )
            post.report("write", drawn=random.random())
            os._exit(0)
        ended(pid)
    owners: list[str] = []

    def hold(mine: Lock) -> None:
        owners.extend(mine.do(lambda ctx: ctx.lease.owner) for _ in range(3))

    same = Lock("reindex").bound_to(runtime)
    threads = [threading.Thread(target=hold, args=(one,)) for one in (lock, lock, same, same)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    post.report("owners", owners=owners)


def test_owners_differ_however_equal_host_pid_and_seed(crew: Crew, path: str) -> None:
    worker = crew.start(name_the_owners, path)
    worker.ends_well()
    owners = [report["owner"] for report in worker.all("owner")]
    owners += worker.expect("owners")["owners"]
    assert len(owners) == 1 + 8 + 12
    assert len(set(owners)) == len(owners)
    assert len({report["drawn"] for report in worker.all("write")}) == 1, "chance was the same"
    assert {owner.split(":")[1] for owner in owners[1:]} == {"1"}, "and so was the pid"


def hammer(post: Post, path: str, children: int, holds: int) -> None:
    """Parent and children at once over one binding that has a connection open already."""
    runtime = post.runtime(path, 30, 0.02)
    Lock("first").bound_to(runtime).do(lambda ctx: None)

    def work(number: int) -> None:
        fences = []
        for _ in range(holds):
            fences.append(Lock(f"own-{number}").bound_to(runtime).do(lambda ctx: ctx.fence))
            held = Lock("reindex").bound_to(runtime).do(enter, timeout=PATIENCE)
            fences.append(held)
        post.report("worked", number=number, fences=fences[::2])

    def enter(ctx: Ctx) -> int:
        with post.running(ctx):
            return ctx.fence

    pids = []
    for number in range(children):
        pid = os.fork()
        if pid == 0:
            work(number)
            os._exit(0)
        pids.append(pid)
    work(children)
    post.report("children", statuses=[ended(pid) for pid in pids])


def test_children_and_parent_hammer_one_file_and_nobody_gets_anothers_answer(
    crew: Crew, path: str
) -> None:
    worker = crew.start(hammer, path, 4, 8)
    worker.ends_well()
    assert worker.expect("children")["statuses"] == [0] * 4
    assert len(check_order(worker.reports)) == 5 * 8
    for report in worker.all("worked"):
        assert report["fences"] == sorted(set(report["fences"]))
    assert not worker.all("Lost") and not worker.all("ReleaseUnconfirmed")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# --- The fork itself -----------------------------------------------------------------------


def test_forks_beside_holds_of_other_threads_leave_every_child_usable(path: str) -> None:
    """No gates: whatever the other threads are at. A few dozen forks find the usual suspects."""
    store = SqliteLease(path)
    policy = LeasePolicy(ttl=10, poll=0.02)
    runtime = Runtime(store, app="shop", env="test", policy=policy)
    memory = Runtime(MemoryLease(), app="shop", env="test", policy=policy)
    over = threading.Event()

    def keep_holding(home: Runtime, name: str) -> None:
        while not over.is_set():
            Lock(name).bound_to(home).do(lambda ctx: None)

    threads = [
        threading.Thread(target=keep_holding, args=arguments, daemon=True)
        for arguments in [(runtime, "one"), (runtime, "one"), (memory, "a"), (memory, "a")]
    ]
    for thread in threads:
        thread.start()
    try:
        for number in range(15):

            def child(number: int = number) -> None:
                mine = Lock(f"child-{number}")
                assert mine.bound_to(runtime).do(lambda ctx: 1, timeout=15) == 1
                assert mine.bound_to(memory).do(lambda ctx: 1, timeout=15) == 1

            assert in_child(child)
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE)
    store.close()


def fork_under_fire(post: Post, path: str, times: int) -> None:
    """Fork with a Ctrl-C on its way, at another moment each time."""
    store, chance, swallowed = SqliteLease(path), random.Random(1), []
    sys.unraisablehook = lambda what: swallowed.append(str(what.object))
    store.list("", timeout=5)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    mine = os.getpid()
    for number in range(times):
        before = len(swallowed)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + chance.random() * (2e-4, 2e-3)[number % 2])
            if os.fork() == 0:
                os._exit(0)
            while len(swallowed) == before:
                time.sleep(0.0001)
        except KeyboardInterrupt:
            if os.getpid() != mine:
                os._exit(0)
        with contextlib.suppress(ChildProcessError):  # there is none where it came too early
            while True:
                os.waitpid(-1, 0)
        store.list("", timeout=5)
    post.report("struck inside", times=len(swallowed))


def test_ctrl_c_in_the_midst_of_a_fork_does_not_close_the_storage_to_the_parent(
    crew: Crew, path: str
) -> None:
    """The signal that arrives during the system call strikes right after it, in the hooks."""
    worker = crew.start(fork_under_fire, path, 200)
    worker.ends_well()
    assert worker.expect("struck inside")["times"] >= 10


# --- A fork in the midst of a campaign ------------------------------------------------------


def fork_that_ends_if_stuck() -> int:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(15)
    return pid


def test_a_campaign_that_is_forked_goes_on_in_the_parent_and_ends_in_the_child() -> None:
    """A listener, or a signal handler, forks. Both would take the one grant for theirs."""
    store = MemoryLease()
    storage = FaultyBackend(store, prompt=True)
    children: list[int] = []
    waiting = threading.Event()

    def fork(event: Event) -> None:
        if isinstance(event, Waiting) and not children:
            children.append(fork_that_ends_if_stuck())
            waiting.set()

    policy = LeasePolicy(ttl=30, poll=0.05)
    ours = Runtime(storage, app="shop", env="test", policy=policy, listeners=[fork])
    theirs = Runtime(store, app="shop", env="test", policy=policy)
    answers: list[int] = []

    def campaign() -> None:
        mine, status = os.getpid(), 1
        try:
            answers.append(Lock("reindex").bound_to(ours).do(lambda ctx: ctx.fence))
        except CtxCancelledError as error:
            asked = [call for call in storage.calls if call.pid != mine]
            status = 10 if "forked in the midst" in str(error) and not asked else 2
        finally:
            if os.getpid() != mine:
                os._exit(status)

    mine = os.getpid()
    with Lock("reindex").bound_to(theirs).hold() as ctx:
        thread = threading.Thread(target=campaign, daemon=True)
        thread.start()
        assert waiting.wait(PATIENCE)
        assert ended(children[0]) == 10
    assert os.getpid() == mine
    thread.join(PATIENCE)
    (fence,) = answers
    assert fence > ctx.fence


@pytest.mark.parametrize("child_ends", ["by itself", "by SystemExit"])
@pytest.mark.parametrize("answer", ["lost", "late"])
def test_a_forked_campaign_gives_nothing_back_that_its_parent_may_have_found(
    answer: str, child_ends: str
) -> None:
    """A write in doubt has landed. The parent finds it and holds; the child must leave it alone."""
    storage = FaultyBackend(MemoryLease(), prompt=answer == "lost")
    lands = threading.Event()
    children: list[int] = []
    mine = os.getpid()

    def late(call: Call, proceed: Callable[[], Any]) -> Any:
        assert lands.wait(PATIENCE)
        return proceed()

    def fork(event: Event) -> None:
        if not isinstance(event, Unreachable) or children:
            return
        lands.set()
        for thread in threading.enumerate():
            if thread.name == "tako-request":
                thread.join(PATIENCE)  # now its answer has come, to nobody
        children.append(fork_that_ends_if_stuck())
        if children == [0] and child_ends == "by SystemExit":
            sys.exit()

    lost = applied_then(lambda: BackendUnavailableError("no answer"))
    storage.script("write", lost if answer == "lost" else late)
    runtime = Runtime(storage, app="shop", env="test", policy=LeasePolicy(ttl=3), listeners=[fork])
    status, cancelled = 1, True
    try:
        cancelled = Lock("reindex").bound_to(runtime).do(lambda ctx: ctx.cancelled)
    except (CtxCancelledError, SystemExit) as error:
        asked = [call.op for call in storage.calls if call.pid != mine]
        wanted = SystemExit if child_ends == "by SystemExit" else CtxCancelledError
        status = 10 if type(error) is wanted and not asked else 2
    finally:
        if os.getpid() != mine:
            os._exit(status)
    assert not cancelled, "the parent found its write, and holds"
    assert ended(children[0]) == 10
    landed = [call.document["state"] for call in storage.calls if call.applied and call.body]
    assert landed == ["held", "released"], "the one that was in doubt, and its release"


def test_a_fork_between_a_grant_and_its_body_starts_no_body_in_the_child() -> None:
    """A listener for the takeover of an unreadable record forks: the grant is known by then."""
    time_line = FakeClock()
    storage = FaultyBackend(MemoryLease(time_line), time_line, prompt=True)
    storage.backend.write(KEY, b"not ours", expect=ABSENT, timeout=1)
    time_line.advance(60)
    children: list[int] = []
    mine = os.getpid()

    def fork(event: Event) -> None:
        if isinstance(event, UnreadableTakenOver):
            children.append(fork_that_ends_if_stuck())

    runtime = Runtime(storage, app="shop", env="test", clock=time_line, listeners=[fork])
    ran: list[int] = []
    status = 1
    try:
        Lock("reindex").bound_to(runtime).do(lambda ctx: ran.append(os.getpid()))
    except CtxCancelledError:
        asked = [call.op for call in storage.calls if call.pid != mine]
        status = 10 if not ran and not asked else 2
    finally:
        if os.getpid() != mine:
            os._exit(status)
    assert ended(children[0]) == 10
    assert ran == [mine]
