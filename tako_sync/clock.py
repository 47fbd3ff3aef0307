"""The system's clock, behind the seam: the one module that asks for time or starts threads."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Final

from tako_sync.abc import Clock, Task
from tako_sync.alarm import Alarms
from tako_sync.flag import Flag

_SLICE: Final = 2.0
"""Seconds. A kernel timer stands still while the machine is suspended; a wait looks at the
clock this often, so that after a resume it ends late by no more than this."""


_Source = tuple[Callable[[int], float], int] | tuple[Callable[[], float], None]
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
        self._alarms = Alarms(self.monotonic)
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

    def spawn(self, target: Callable[[], object], name: str) -> Task:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def after(
        self, seconds: float, target: Callable[[], object], name: str, unless: threading.Event
    ) -> Task:
        return _Later(self, self._alarms, seconds, target, name, unless)


class _Later:
    """A thread that is to start later, or not at all."""

    def __init__(
        self,
        clock: SystemClock,
        alarms: Alarms,
        seconds: float,
        target: Callable[[], object],
        name: str,
        unless: threading.Event,
    ) -> None:
        self._clock = clock
        self._alarms = alarms
        self._target = target
        self._name = name
        self._unless = unless
        self._task: Task | None = None
        self._begun = Flag()
        call = alarms.call_at(clock.monotonic() + seconds, self._begin, unless)
        self._calls = [call]  # emptied at the end, so that no cycle is left for the collector

    def _begin(self) -> None:
        try:
            if not self._unless.is_set():
                self._task = self._clock.spawn(self._target, self._name)
            self._begun.set()
        except RuntimeError:  # no more threads: better in this one than not at all
            self._begun.set()
            self._target()

    def join(self, timeout: float | None = None) -> None:
        if self._unless.is_set() and self._calls:
            if self._alarms.take_back(self._calls[0]):
                self._begun.set()
            self._calls.clear()
        if self._clock.wait(self._begun, timeout) and self._task is not None:
            self._task.join(timeout)

    def is_alive(self) -> bool:
        return not self._begun.is_set() or (self._task is not None and self._task.is_alive())
