"""A call at a given moment that hardly ever comes: cheap to set, cheap to take back.

Most holds are short, and their heartbeat is never due. A ``threading.Thread`` for each would be
their largest cost by far: its ``start`` waits until it runs, its end must be waited for. Here a
bare thread sleeps for whoever needs one next, and is not waited for: it runs no code of anybody
else, and when the moment comes, it starts the real thread. It ends when nobody has needed it for
a twentieth of a second.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Final

from attrs import frozen

from tako_sync import fork

_IDLE: Final = 0.05
"""Seconds."""
_SLICE: Final = 2.0
"""Seconds; as in :mod:`tako_sync.clock`: a kernel timer stands still during suspension."""


@frozen(eq=False)
class Call:
    """What is to be called, and when; taken back by :meth:`Alarms.take_back`."""

    due: float
    fire: Callable[[], object]
    unless: threading.Event
    sleeper: _Sleeper


class Alarms:
    """The sleeping threads of one clock.

    Args:
        now: the clock; its moments are what calls are due at.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._spare: list[_Sleeper] = []  # its append, pop and remove are atomic
        fork.reset_in_child(self)

    def call_at(self, due: float, fire: Callable[[], object], unless: threading.Event) -> Call:
        """Call ``fire`` at ``due``, in a bare thread: it is to start a real one and return.

        Args:
            unless: set once the call is not wanted any more. One that is not taken back then, as
                Ctrl-C struck before anybody knew of it, is made soon: ``fire`` is to ask, too.
        """
        fork.settle()
        try:
            sleeper = self._spare.pop()
        except IndexError:
            sleeper = _Sleeper(self._now, self._spare)
        call = Call(due, fire, unless, sleeper)
        sleeper.arm(call)
        return call

    def take_back(self, call: Call) -> bool:
        """Return True if ``call`` will not be made; False if it has been, or is being."""
        if not call.sleeper.disarm(call):
            return False
        self._spare.append(call.sleeper)
        return True

    def after_fork_in_child(self) -> None:
        self._spare.clear()  # those threads are the parent's


class _Sleeper:
    """One thread, while one is needed, and at most one call that it sleeps for."""

    def __init__(self, now: Callable[[], float], spare: list[_Sleeper]) -> None:
        self._now = now
        self._spare = spare
        self._calls: list[Call] = []  # one or none; who removes it has it
        self._deep = False
        self._gate = threading.Lock()
        self._gate.acquire()
        self._gone: list[None] = [None]  # who removes this is, or starts, its one thread

    def arm(self, call: Call) -> None:
        self._calls.append(call)
        self._wake()
        if self._gone and self._comes_back():
            _thread.start_new_thread(self._run, ())

    def disarm(self, call: Call) -> bool:
        try:
            self._calls.remove(call)
        except ValueError:
            return False
        if self._deep:
            self._wake()
        return True

    def _wake(self) -> None:
        try:
            self._gate.release()
        except RuntimeError:  # open: it has not slept since it was woken last
            pass

    def _run(self) -> None:
        while True:
            while self._calls or self._gate.acquire(True, _IDLE) or self._calls:
                for call in self._calls[:1]:
                    if not self._gate.acquire(True, max(0.0, min(call.due - self._now(), _IDLE))):
                        self._sleep_deeply(call)
            # Not only if it is among the spare ones: who has chosen it may never come to arm it
            # (Ctrl-C), and who comes late finds it gone and starts it again.
            try:
                self._spare.remove(self)
            except ValueError:
                pass
            self._gone.append(None)
            if not (self._calls and self._comes_back()):
                return

    def _sleep_deeply(self, call: Call) -> None:
        """Sleep until ``call`` is due, and make it; nobody takes most calls back so late."""
        self._deep = True  # before the look at the calls: who takes this one back later wakes us
        while call in self._calls:
            left = call.due - self._now()
            if left > 0 and not call.unless.is_set():
                self._gate.acquire(True, min(left, _SLICE))
                continue
            try:
                self._calls.remove(call)
            except ValueError:
                break  # taken back in this moment
            try:
                call.fire()
            except BaseException:  # noqa: BLE001 - no memory, say: not made, so still to be made
                self._calls.append(call)
                self._gate.acquire(True, _IDLE)
            else:
                self._spare.append(self)
        self._deep = False

    def _comes_back(self) -> bool:
        try:
            self._gone.pop()
        except IndexError:
            return False
        return True
