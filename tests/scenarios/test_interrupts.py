"""Ctrl-C or a soft limit at every single point of a hold, one a run: nothing stays held behind it.

What a signal handler raises comes out where the interpreter looks for signals: as it enters a
function, and after a call of one written in C. A profile function is called at just these points;
here it raises at a chosen one, so that every one gets its turn.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import tako_sync
from tako_sync.backends.memory import MemoryLease
from tako_sync.ctx import Ctx
from tako_sync.events import Acquired, Event, Released
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

_PRODUCT = str(Path(tako_sync.__file__).parent)


class Struck(BaseException):
    """What Ctrl-C raises, told apart from a real one."""


class SoftStruck(Exception):
    """What other handlers raise, such as that of Celery's soft time limit."""


class Strike:
    """Raises ``kind`` once, at the ``at``-th such point of the product in this thread."""

    def __init__(self, at: int, kind: type[BaseException] = Struck) -> None:
        self._left = at
        self._kind = kind
        self.where = ""

    def __enter__(self) -> Strike:
        sys.setprofile(self._step)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)

    def _step(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event in ("call", "c_return") and code.co_filename.startswith(_PRODUCT):
            self._left -= 1
            if self._left == -1:
                self.where = f"{Path(code.co_filename).stem}.{code.co_name}:{frame.f_lineno}"
                raise self._kind


def struck_by(strike: Strike, act: Callable[[], object]) -> None:
    with strike:
        try:
            act()
        except (Struck, SoftStruck):
            pass


class ThreadedMemory(MemoryLease):
    """A table whose requests run in threads of their own, as those of a bucket do."""

    prompt = False


def by_do(lock: Lock, body: Callable[[Ctx], int]) -> int:
    return lock.do(body)


def by_try_do(lock: Lock, body: Callable[[Ctx], int]) -> int:
    ran, value = lock.try_do(body)
    assert ran
    assert value is not None
    return value


def by_hold(lock: Lock, body: Callable[[Ctx], int]) -> int:
    with lock.hold(timeout=5) as ctx:
        return body(ctx)


def by_guard(lock: Lock, body: Callable[[Ctx], int]) -> int:
    return lock.guard(lambda: body(tako_sync.current_ctx()))()


WAYS = [by_do, by_try_do, by_hold, by_guard]


def runtime(backend: MemoryLease) -> Runtime:
    # So long a ttl that nothing in this test becomes free by its age.
    return Runtime(backend, policy=LeasePolicy(ttl=600))


def until_all_threads_have_ended() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("tako-"):
            thread.join(20)
            assert not thread.is_alive(), thread


# Python itself swallows, and reports so, what strikes in a finalizer.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("backend", [MemoryLease, ThreadedMemory])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Struck, SoftStruck])
def test_ctrl_c_or_a_soft_limit_at_any_point_leaves_the_lease_free_for_everyone(
    kind: type[BaseException],
    way: Callable[[Lock, Callable[[Ctx], int]], int],
    backend: type[MemoryLease],
) -> None:
    ours = runtime(store := backend())
    lock = Lock("reindex").bound_to(ours)
    theirs = Lock("reindex").bound_to(runtime(store))
    way(lock, lambda ctx: ctx.fence)  # whatever is made at a first use, is made
    stuck: list[str] = []
    struck = 0
    while True:
        strike = Strike(struck, kind)
        # In a context of its own: where the strike kept the body from being left, that body's
        # ctx stays the current one of the code that was struck.
        contextvars.copy_context().run(struck_by, strike, lambda: way(lock, lambda ctx: ctx.fence))
        if not strike.where:
            break
        struck += 1
        until_all_threads_have_ended()
        if theirs.holder() is not None:
            stuck.append(strike.where)
            theirs.break_(theirs.holder(), now=True)
        assert way(theirs, lambda ctx: ctx.fence) > 0
        assert way(lock, lambda ctx: ctx.fence) > 0
    assert struck > 200
    assert not stuck


@pytest.mark.parametrize("kind", [Acquired, Released])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_listener_throws_at_the_caller_leaves_the_lease_free(
    way: Callable[[Lock, Callable[[Ctx], int]], int], kind: type[Event]
) -> None:
    def listener(event: Event) -> None:
        if isinstance(event, kind):
            raise Struck

    store = MemoryLease()
    lock = Lock("reindex").bound_to(Runtime(store, listeners=[listener]))
    with pytest.raises(Struck):
        contextvars.copy_context().run(way, lock, lambda ctx: ctx.fence)
    until_all_threads_have_ended()
    assert lock.holder() is None
    assert way(Lock("reindex").bound_to(runtime(store)), lambda ctx: ctx.fence) > 0
