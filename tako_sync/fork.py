"""What a forked child must know: that it is one, and which objects to make usable again.

After ``fork`` the child has a copy of everything but the threads. So a lease is not the
child's (its heartbeat runs in the parent), a lock that another thread held stays locked for
ever, and a connection is shared with the parent. One hook serves all of tako_sync.

Who forks by other means than Python's, as uWSGI does unless told otherwise, calls no hooks. So a
child is known by the number of its process, and what the hook would have done is done by the first
thread that asks, before it uses a lock, a lease or a connection.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol


class Resettable(Protocol):
    def after_fork_in_child(self) -> None:
        """Replace locks, drop connections: no other thread runs yet."""


class Standing(Resettable, Protocol):
    def locks_for_fork(self) -> Iterable[threading.Lock]:
        """Return the locks that a fork is to wait for and to hold. The child replaces them."""
        ...


_log: Final = logging.getLogger("tako_sync")
_words: deque[Callable[[], object]] = deque()


class _Settling:
    """Of one child: who resets all, and who waits for that."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.begun = False


_process = os.getpid()
"""The one whose objects these are: another number than that of this process until it is settled."""
_generation = _process
"""That number, and above its 32 bits the count of forks: the number of a process that has ended
may be given to its own grandchild."""
_settling: dict[int, _Settling] = {}
_resettable: list[weakref.ref[Resettable]] = []
_standing: list[weakref.ref[Standing]] = []
_forking = threading.local()


def generation() -> int:
    """Return a number that differs between a process and its forked children."""
    settle()
    return _generation


def settle() -> None:
    """See to it that all is usable: to be called before a lock or a connection is used.

    In a forked child in which no hook was called, this resets all; other threads wait for that.
    """
    process = os.getpid()
    if process == _process:
        return
    # Made here, for one that was made before the fork may be locked for ever.
    settling = _settling.setdefault(process, _Settling())
    with settling.lock:
        # Begun: what is reset here drops other things, whose ends ask as anybody does.
        if process != _process and not settling.begun:
            settling.begun = True
            try:
                _settle(process)
            finally:
                settling.begun = False
    while _words and process == _process:  # who listens to a log may ask, too: not before
        with contextlib.suppress(Exception):
            _words.popleft()()


def _settle(process: int) -> None:
    global _generation, _process
    if _generation & 0xFFFF_FFFF != process:  # not once more, if the first time was cut off
        _generation = ((_generation >> 32) + 1) << 32 | process
    _reset()
    _process = process


def say_then(word: Callable[[], object]) -> None:
    """Log something once all is reset. For ``after_fork_in_child``."""
    _words.append(word)


def reset_in_child(thing: Resettable) -> None:
    """Have ``thing.after_fork_in_child()`` called in every forked child, while it lives."""
    # A plain list, not a WeakSet: its append and remove are atomic, so that a fork in another
    # thread never meets it half changed.
    _resettable.append(weakref.ref(thing, _resettable.remove))


def stand_still_for(thing: Standing) -> None:
    """Have forks hold the locks of ``thing``, and reset it in the child, while it lives."""
    _standing.append(weakref.ref(thing, _standing.remove))
    reset_in_child(thing)


# Each hook is registered twice. A signal that arrives during the system call strikes right after
# it: Ctrl-C in the midst of a fork comes in these hooks, and Python swallows what they raise. So
# what the first has left undone, the second does; and a lock is taken and noted, or struck off
# and given back, within one call of C code, where nothing strikes.

_acquire = operator.methodcaller("acquire")
_release = operator.methodcaller("release")


def _before() -> None:
    before: list[threading.Lock | None] = getattr(_forking, "held", None) or [None]
    held = _forking.held = before  # this thread's own
    things = [thing for reference in list(_standing) if (thing := reference()) is not None]
    locks = [lock for thing in things for lock in thing.locks_for_fork() if lock not in held]
    held.extend(itertools.compress(locks, map(_acquire, locks)))


def _in_parent() -> None:
    held = getattr(_forking, "held", None)
    if held:
        deque(map(_release, iter(held.pop, None)), maxlen=0)  # to the None at the bottom


def _in_child() -> None:
    _forking.held = None  # who has them replaces them
    settle()


def _reset() -> None:
    for reference in list(_resettable):
        thing = reference()
        if thing is not None:
            try:
                thing.after_fork_in_child()
            except Exception as error:  # noqa: BLE001 - the others still need theirs
                say_then(functools.partial(_log.error, "after a fork: %r", thing, exc_info=error))


if hasattr(os, "register_at_fork"):
    for _ in range(2):
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
