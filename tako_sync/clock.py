"""The system's clock, behind the seam: the one module that asks for time or starts threads."""

from __future__ import annotations

import _thread
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Final, Union

from tako_sync.abc import Clock, Task

_SLICE: Final = 2.0
"""Seconds. A kernel timer stands still while the machine is suspended; a wait looks at the
clock this often, so that after a resume it ends late by no more than this."""


_Source = Union[tuple[Callable[[int], float], int], tuple[Callable[[], float], None]]
"""A clock function and its argument, if it takes one. Kept in a tuple on purpose: freezegun
replaces time functions that it finds as attributes of modules. It knows no clock_gettime."""


def _monotonic_source() -> _Source:
    """Choose a clock that goes on while the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux: its CLOCK_MONOTONIC stands still in suspend
        return time.clock_gettime, time.CLOCK_BOOTTIME
    if sys.platform == "darwin":  # there, CLOCK_MONOTONIC goes on, time.monotonic() does not
        return time.clock_gettime, time.CLOCK_MONOTONIC
    return time.monotonic, None


def _wall_source() -> _Source:
    if hasattr(time, "CLOCK_REALTIME"):
        return time.clock_gettime, time.CLOCK_REALTIME
    return time.time, None


class SystemClock(Clock):
    """Real time. ``freezegun`` does not move it, nor does setting the machine's wall clock."""

    def __init__(self) -> None:
        self._source = _monotonic_source()
        self._wall = _wall_source()
        self._chance = random.SystemRandom()  # a seeded one would repeat itself in forked children

    def monotonic(self) -> float:
        function, argument = self._source
        return function() if argument is None else function(argument)  # type: ignore[call-arg]

    def wall(self) -> datetime:
        function, argument = self._wall
        stamp = function() if argument is None else function(argument)  # type: ignore[call-arg]
        return datetime.fromtimestamp(stamp, timezone.utc)

    def random(self) -> float:
        return self._chance.random()

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is None:
            while not event.wait(_SLICE):
                pass
            return True
        until = self.monotonic() + timeout
        while not event.is_set():
            left = until - self.monotonic()
            if left <= 0 or event.wait(min(left, _SLICE)):
                break
        return event.is_set()

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def after(
        self, seconds: float, target: Callable[[], None], name: str, unless: threading.Event
    ) -> Task:
        return _Sleeper(self, seconds, target, name, unless)


class _Sleeper:
    """A thread that only waits, and starts the real one when that is due.

    Most holds are short, and their heartbeat is never due. This thread costs them less than
    half of what a ``threading.Thread`` does, whose ``start`` waits until it runs. It runs no
    code but its own, so nobody can ask in it for ``threading.current_thread()``.
    """

    def __init__(
        self,
        clock: SystemClock,
        seconds: float,
        target: Callable[[], None],
        name: str,
        unless: threading.Event,
    ) -> None:
        self._clock = clock
        self._until = clock.monotonic() + seconds
        self._target = target
        self._name = name
        self._unless = unless
        self._task: Task | None = None
        self._awake = threading.Lock()
        self._awake.acquire()
        _thread.start_new_thread(self._sleep, ())

    def _sleep(self) -> None:
        try:
            while (left := self._until - self._clock.monotonic()) > 0:
                if self._unless.wait(min(left, _SLICE)):
                    return
            try:
                self._task = self._clock.spawn(self._target, self._name)
            except RuntimeError:  # no more threads; better in this one than not at all
                self._target()
        finally:
            self._awake.release()

    def join(self, timeout: float | None = None) -> None:
        if self._awake.acquire(True, -1 if timeout is None else timeout):
            self._awake.release()
            if self._task is not None:
                self._task.join(timeout)

    def is_alive(self) -> bool:
        return self._awake.locked() or (self._task is not None and self._task.is_alive())
