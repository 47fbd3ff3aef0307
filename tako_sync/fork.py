"""What a forked child must know: that it is one, and which objects to make usable again.

After ``fork`` the child has a copy of everything but the threads. So a lease is not the
child's (its heartbeat runs in the parent), a lock that another thread held stays locked for
ever, and a connection is shared with the parent. One hook serves all of tako_sync.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Protocol


class Resettable(Protocol):
    def after_fork_in_child(self) -> None:
        """Replace locks, drop connections: no other thread runs yet."""


class Standing(Resettable, Protocol):
    def before_fork(self) -> None:
        """Wait until no thread is where a fork must not happen, and let none in."""

    def after_fork_in_parent(self) -> None:
        """Let them in again."""


_generation = 0
_resettable: list[weakref.ref[Resettable]] = []
_standing: list[weakref.ref[Standing]] = []
_forking = threading.local()


def generation() -> int:
    """Return a number that differs between a process and its forked children."""
    return _generation


def reset_in_child(thing: Resettable) -> None:
    """Have ``thing.after_fork_in_child()`` called in every forked child, while it lives."""
    # A plain list, not a WeakSet: its append and remove are atomic, so that a fork in another
    # thread never meets it half changed.
    _resettable.append(weakref.ref(thing, _resettable.remove))


def stand_still_for(thing: Standing) -> None:
    """Have ``thing`` stand still around every fork, and reset in the child, while it lives."""
    _standing.append(weakref.ref(thing, _standing.remove))
    reset_in_child(thing)


def _before() -> None:
    stood = _forking.stood = []  # this thread's: another may be forking as well
    for reference in list(_standing):
        thing = reference()
        if thing is not None:
            thing.before_fork()
            stood.append(thing)


def _in_parent() -> None:
    for thing in _forking.stood:
        thing.after_fork_in_parent()


def _in_child() -> None:
    global _generation
    _generation += 1
    for reference in list(_resettable):
        thing = reference()
        if thing is not None:
            try:
                thing.after_fork_in_child()
            except Exception:  # the others still need theirs
                logging.getLogger("tako_sync").exception("after a fork: %r", thing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
