"""Singletons in real processes: told to end, killed, forked."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

from processes.kit_processes import Crew, Post, check_order, clock
from tako_sync.ctx import Ctx
from tako_sync.errors import ShutdownError
from tako_sync.policy import LeasePolicy
from tako_sync.runner import loops
from tako_sync.runtime import Runtime
from tako_sync.shutdown import install_signal_handlers
from tako_sync.singleton import Singleton

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no such processes here")

TTL = 3.0
LONG = 120.0
"""A ttl that no test waits for: what comes sooner was not an expiry."""

_post: list[Post] = []


@Singleton
def invoicer(ctx: Ctx) -> None:
    """Go on until cancelled, then drain for as long as the test wants."""
    (post,) = _post
    with post.running(ctx):
        while not ctx.wait(0.05):
            post.report("step", ctx)
        post.report("cancelled", cause=str(ctx.cause))
        if not isinstance(ctx.cause, ShutdownError):
            return
        post.order()
        post.report("drained")


def prepared(post: Post, path: str, ttl: float) -> Singleton:
    _post[:] = [post]
    runtime = post.runtime(path, ttl, 0.1)
    policy = LeasePolicy(ttl=ttl, poll=0.1, restart=0.2)
    bound = Runtime(
        runtime.backend, app="shop", env="test", policy=policy, clock=clock, listeners=[post.tell]
    )
    return invoicer.bound_to(bound)


def run_in_the_main_thread(post: Post, path: str, ttl: float) -> None:
    singleton = prepared(post, path, ttl)
    install_signal_handlers()
    post.report("ready")
    singleton.run()
    post.report("went on behind it")


def run_in_a_thread(post: Post, path: str, ttl: float) -> None:
    singleton = prepared(post, path, ttl)
    install_signal_handlers()
    runner = singleton.start()
    post.report("ready")
    try:
        threading.Event().wait()
    except SystemExit as end:
        post.report("exits", status=end.code, running=runner.running)
        raise


def run_with_a_handler_of_its_own(post: Post, path: str, ttl: float) -> None:
    def mine(number: int, frame: FrameType | None) -> None:
        post.report("mine")

    signal.signal(signal.SIGTERM, mine)
    singleton = prepared(post, path, ttl)
    undo = install_signal_handlers()
    post.report("ready")
    singleton.run()
    undo()
    assert signal.getsignal(signal.SIGTERM) is mine
    post.report("put back")


def told_before_it_runs(post: Post, path: str, ttl: float) -> None:
    """The signal comes when the program is about to enter its loops; its own handler returns."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    singleton = prepared(post, path, ttl)
    undo = install_signal_handlers()
    signal.raise_signal(signal.SIGTERM)
    singleton.run()
    started = singleton.start()
    assert started.wait(), "neither does one that is started in a thread go on"
    post.report("ran nothing")
    if os.fork() == 0:  # a child was not told
        post.name = "child"
        singleton.start().wait()
    undo()
    singleton.run()


def undo_in_any_order(post: Post, path: str, ttl: float) -> None:
    """Handlers over handlers, and one of another signal; each is undone by itself."""

    def mine(number: int, frame: FrameType | None) -> None:
        post.report("mine")

    def runs() -> bool:
        """Tell whether a loop that begins goes on until it is stopped."""
        root = Ctx.background(clock)
        leave = loops.enter(root)
        leave()
        return not root.cancelled

    signal.signal(signal.SIGTERM, mine)
    first, second = install_signal_handlers(), install_signal_handlers()
    first()
    second()
    post.report("put back", mine=signal.getsignal(signal.SIGTERM) is mine)

    undo, of_another = install_signal_handlers(), install_signal_handlers([signal.SIGUSR1])
    signal.raise_signal(signal.SIGTERM)
    of_another()
    closed = runs()
    undo()
    post.report("by itself", closed=not closed, open=runs())

    late = [False]
    for _ in range(50):
        undo = install_signal_handlers()
        signal.raise_signal(signal.SIGTERM)
        undo()
        late.append(bool(loops._closed))
    post.report("at once", closed=any(late), open=runs())

    below = install_signal_handlers()
    calling = signal.getsignal(signal.SIGTERM)
    assert callable(calling)
    below()
    calling(signal.SIGTERM, None)
    post.report("called though undone", open=runs())


def start_then_fork(post: Post, path: str, ttl: float) -> None:
    singleton = prepared(post, path, ttl)
    runner = singleton.start()
    post.order()
    pid = os.fork()
    if pid == 0:
        post.name = "child"
        post.report("in the child", running=runner.running, stopped=runner.stop(timeout=0))
        singleton.start()
        post.order()
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("function", [run_in_the_main_thread, run_in_a_thread])
def test_sigterm_drains_under_the_lease_and_hands_over_within_a_poll(
    crew: Crew, path: str, function: object
) -> None:
    old = crew.start(function, path, LONG, name="old")  # type: ignore[arg-type]
    old.expect("begin")
    new = crew.start(run_in_the_main_thread, path, LONG, name="new")
    new.expect("Waiting")
    old.send(signal.SIGTERM)
    assert old.expect("cancelled")["cause"] == "the process was sent SIGTERM"
    assert not new.all("begin")
    old.tell("drain")
    old.expect("drained")
    new.expect("begin")
    check_order(crew.reports)
    status = old.ends()
    if function is run_in_a_thread:
        assert status == 128 + signal.SIGTERM
        assert [report["running"] for report in old.all("exits")] == [False]
    else:
        assert status == 0 and old.all("went on behind it")
    assert crew.reports.index(old.all("Released")[0]) < crew.reports.index(new.all("begin")[0])


def test_a_handler_that_was_there_before_is_called_and_put_back(crew: Crew, path: str) -> None:
    worker = crew.start(run_with_a_handler_of_its_own, path, LONG)
    worker.expect("begin")
    worker.send(signal.SIGTERM)
    worker.expect("mine")
    worker.tell("drain")
    worker.expect("put back")
    worker.ends_well()


def test_a_signal_just_before_run_is_not_lost_on_it(crew: Crew, path: str) -> None:
    worker = crew.start(told_before_it_runs, path, LONG)
    worker.expect("ran nothing")
    assert not worker.all("begin") and not worker.all("request")
    while not (worker.all("begin") and worker.all("Waiting")):  # in either order
        worker.expect("request")
    who = [worker.all(what)[0]["who"] for what in ("begin", "Waiting")]
    assert set(who) == {worker.name, "child"}


def test_handlers_are_undone_in_any_order_each_by_itself(crew: Crew, path: str) -> None:
    worker = crew.start(undo_in_any_order, path, LONG)
    worker.ends_well()
    assert worker.all("put back")[0]["mine"]
    told = worker.all("by itself")[0]
    assert told["closed"] and told["open"]
    told = worker.all("at once")[0]
    assert not told["closed"] and told["open"]
    assert worker.all("called though undone")[0]["open"]


def test_the_loop_of_a_killed_process_goes_on_in_another(crew: Crew, path: str) -> None:
    first = crew.start(run_in_the_main_thread, path, TTL, name="first")
    first.expect("begin")
    second = crew.start(run_in_a_thread, path, TTL, name="second")
    second.expect("Waiting")
    first.send(signal.SIGKILL)
    second.expect("begin")
    check_order(crew.reports)


def test_one_that_was_stopped_past_its_ttl_goes_back_to_campaigning(crew: Crew, path: str) -> None:
    first = crew.start(run_in_the_main_thread, path, TTL, name="first")
    first.expect("begin")
    second = crew.start(run_in_the_main_thread, path, TTL, name="second")
    second.expect("Waiting")
    first.expect("Renewed")  # not in a transaction, which would keep the file locked
    first.send(signal.SIGSTOP)
    second.expect("begin")
    first.send(signal.SIGCONT)
    assert "was lost while held" in first.expect("cancelled")["cause"]
    first.expect("Waiting")
    second.send(signal.SIGKILL)
    first.expect("begin")
    check_order(crew.reports)


def test_started_before_a_fork_it_runs_in_the_parent_and_the_child_starts_its_own(
    crew: Crew, path: str
) -> None:
    worker = crew.start(start_then_fork, path, LONG)
    worker.expect("begin")
    worker.tell("fork")
    child = worker.expect("in the child")
    assert child["running"] is False and child["stopped"] is True
    worker.expect("Waiting")
    assert {report["pid"] for report in worker.all("begin")} == {worker.pid}
    worker.clean_up()
    assert "singleton invoicer was started before this process was forked" in worker.errors


def fork_in_the_body(post: Post, path: str, ttl: float) -> None:
    runtime = prepared(post, path, ttl)._runtime

    def body(ctx: Ctx) -> None:
        with post.running(ctx):
            child = os.fork()
            if child == 0:
                return
            os.waitpid(child, 0)
            post.report("child has ended")
            ctx.wait(600)

    namespace = {"__name__": "loops", "Singleton": Singleton, "body": body}
    exec("forking = Singleton(body)", namespace)
    parent = os.getpid()
    namespace["forking"].bound_to(runtime).run()  # type: ignore[attr-defined]
    if os.getpid() != parent:
        os._exit(0)


def test_a_child_that_is_forked_in_the_body_and_returns_does_not_campaign(
    crew: Crew, path: str
) -> None:
    worker = crew.start(fork_in_the_body, path, LONG)
    worker.expect("child has ended")
    assert len(worker.all("begin")) == 1
    worker.clean_up()
    assert "singleton forking: a child that was forked in its body has returned" in worker.errors
