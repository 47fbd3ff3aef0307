"""Children of a fork that calls none of Python's hooks, as uWSGI's is: they hold nothing either.

Python's own hooks are called in these tests, or its threads would be stuck; tako_sync's is not.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from processes.kit_processes import Crew, Post, check_order, clock
from tako_sync import fork
from tako_sync.ctx import Ctx
from tako_sync.errors import LeaseLostError
from tako_sync.flag import Flag
from tako_sync.runner import loops
from tako_sync.singleton import Singleton

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

TTL = 30.0

_post: list[Post] = []


def forked(child: Callable[[], object]) -> int:
    """Fork without tako_sync's hook, run ``child`` there, and return how it ended."""
    settle = fork.settle
    fork.settle = lambda: None
    try:
        pid = os.fork()
    finally:
        fork.settle = settle
    if pid == 0:
        status = 1
        try:
            signal.alarm(30)
            child()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def generations(post: Post) -> None:
    mine, lock = fork.generation(), threading.Lock()
    lock.acquire()

    class Thing:
        resets = 0

        def after_fork_in_child(self) -> None:
            self.resets += 1
            self.lock = threading.Lock()

    thing = Thing()
    thing.lock = lock
    fork.reset_in_child(thing)

    def grandchild(childs: int) -> None:
        assert fork.generation() not in (mine, childs)
        assert thing.resets == 2

    def child() -> None:
        seen: list[int] = []
        threads = [
            threading.Thread(target=lambda: seen.append(fork.generation())) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        childs = fork.generation()
        assert seen == [childs] * 2 and childs != mine
        assert thing.resets == 1 and thing.lock.acquire(timeout=1)
        assert forked(lambda: grandchild(childs)) == 0
        pid = os.fork()  # by Python, in a process that was not
        if pid == 0:
            with suppress(BaseException):
                grandchild(childs)
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0

    post.report("child", status=forked(child))
    post.report("parent", unchanged=fork.generation() == mine, resets=thing.resets)


def hold_and_fork(post: Post, path: str) -> None:
    lock = post.lock(path, TTL)
    hold = lock.hold()
    ctx = hold.__enter__()

    def child() -> None:
        post.name = "child"
        with suppress(LeaseLostError):
            ctx.check()
        post.report("looked", cancelled=ctx.cancelled, remaining=ctx.remaining())
        try:
            hold.__exit__(None, None, None)
        except LeaseLostError as loss:
            post.report("left", reason=loss.reason.value)
        ran, _ = lock.try_do(lambda ctx: None)
        post.report("tried", ran=ran)
        ran, _ = post.lock(path, TTL, name="other").try_do(lambda ctx: ctx.wait(0.1))
        post.report("did another", ran=ran)

    post.report("child ended", status=forked(child))
    post.report("parent", cancelled=ctx.cancelled)
    hold.__exit__(None, None, None)
    post.report("released", holder=repr(lock.holder()))


def start_and_fork(post: Post, path: str) -> None:
    _post[:] = [post]
    singleton = invoicer.bound_to(post.runtime(path, TTL, 0.1))
    runner = singleton.start()
    post.order()

    def child() -> None:
        post.name = "child"
        post.report("inherited", running=runner.running, threads=len(loops.threads))
        own = singleton.start()
        post.report("started", another=own is not runner, running=own.running)
        clock.wait(Flag(), 0.5)
        post.report("stopped", stopped=own.stop(timeout=20))

    post.report("child ended", status=forked(child))
    post.report("parent", running=runner.running, stopped=runner.stop(timeout=20))


@Singleton
def invoicer(ctx: Ctx) -> None:
    (post,) = _post
    with post.running(ctx):
        while not ctx.wait(10):
            pass


def test_a_child_has_a_generation_of_its_own_and_resets_all_once(crew: Crew) -> None:
    worker = crew.start(generations)
    worker.ends_well()
    assert worker.all("child")[0]["status"] == 0, worker.errors
    parent = worker.all("parent")[0]
    assert parent["unchanged"] and parent["resets"] == 0


def test_a_child_finds_itself_cancelled_and_no_request_for_the_lease_leaves_it(
    crew: Crew, path: str
) -> None:
    worker = crew.start(hold_and_fork, path)
    worker.ends_well()
    assert worker.all("child ended")[0]["status"] == 0, worker.errors
    looked = worker.all("looked")[0]
    assert looked["cancelled"] and looked["remaining"] == 0
    assert worker.all("left")[0]["reason"] == "forked"
    assert worker.all("tried")[0]["ran"] is False
    assert worker.all("did another")[0]["ran"] is True
    child = looked["pid"]
    asked = [
        one for one in worker.all("request") if one["pid"] == child and "other" not in one["key"]
    ]
    assert {one["op"] for one in asked} == {"read"}, "of its own attempt"
    assert worker.all("parent")[0]["cancelled"] is False
    assert worker.all("released")[0]["holder"] == "None"
    assert not worker.all("Lost")


def ask_in_a_filter(post: Post, path: str) -> None:
    """What listens to the log asks whether the loop runs, whenever anything is logged."""
    _post[:] = [post]
    runner = invoicer.bound_to(post.runtime(path, TTL, 0.1)).start()
    asked: list[bool] = []

    class Asking(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            asked.append(runner.running)
            return True

    logging.getLogger("tako_sync").addFilter(Asking())
    post.order()
    del asked[:]
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        os._exit(0 if asked == [False] else 1)
    post.report("child", status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    runner.stop(timeout=20)


def test_who_listens_to_the_log_may_ask_in_a_child_what_is_being_settled(
    crew: Crew, path: str
) -> None:
    worker = crew.start(ask_in_a_filter, path)
    worker.expect("begin")
    worker.tell("fork")
    worker.ends_well()
    assert worker.all("child")[0]["status"] == 0


def test_a_loop_of_the_parent_is_started_anew_in_the_child_and_goes_on_in_the_parent(
    crew: Crew, path: str
) -> None:
    worker = crew.start(start_and_fork, path)
    worker.expect("begin")
    worker.tell("fork")
    worker.ends_well()
    assert worker.all("child ended")[0]["status"] == 0, worker.errors
    inherited = worker.all("inherited")[0]
    assert inherited["running"] is False and inherited["threads"] == 0
    started = worker.all("started")[0]
    assert started["another"] and started["running"]
    assert worker.all("stopped")[0]["stopped"] is True
    parent = worker.all("parent")[0]
    assert parent["running"] and parent["stopped"]
    assert {report["pid"] for report in worker.all("begin")} == {worker.pid}
    check_order(crew.reports)
