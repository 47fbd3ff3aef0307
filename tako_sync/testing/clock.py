"""Virtual time for real threads: a wait ends when the test says so, always in the same order."""

from __future__ import annotations

import contextlib
import functools
import gc
import heapq
import itertools
import math
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import FrameType
from typing import Final

from attrs import field, frozen

from tako_sync import fork
from tako_sync.abc import Clock, Task
from tako_sync.clock import SystemClock
from tako_sync.flag import Flag

_REAL: Final = SystemClock()  # freezegun moves neither it nor the timeouts of locks
_SLACK: Final = 1e-6
"""Seconds that an advance may go too far, so that ten waits of 0.1 s end within advance(1)."""
_LIMIT: Final = 30.0
"""Real seconds after which an advance gives up on a thread that neither waits nor ends."""
_LOOK: Final = (0.001, 0.005)
"""Real seconds between two looks at a running thread, at first and at most. A thread that waits
or ends tells the clock; looks are for those that cannot tell."""
_PEEK: Final = 0.005
"""Real seconds between two looks at the events that do not tell when they are set."""
_LOOKS: Final = 5
"""Looks that must agree that a thread stands still: on a busy machine the looking thread may
itself not run for a while, and then a long stretch proves nothing."""


@frozen
class Waiting:
    """A thread that waits on the clock: its name, and the seconds left; None without a timeout."""

    name: str
    left: float | None

    def __str__(self) -> str:
        return f"{self.name} (" + ("no timeout" if self.left is None else f"{self.left:g} s") + ")"


@frozen(eq=False)
class _Waiter:
    """One stand of one thread on the clock: in a wait, or before its first step."""

    thread: threading.Thread
    event: threading.Event
    due: float
    order: int
    gate: threading.Lock = field(factory=threading.Lock)
    silent: bool = False  # its event can become set without telling anyone

    def __attrs_post_init__(self) -> None:
        self.gate.acquire()

    def open_gate(self) -> None:
        with contextlib.suppress(RuntimeError):  # open: woken just after it became the looker
            self.gate.release()


class _Steps:
    """What is known of the movements of a running thread."""

    def __init__(self) -> None:
        self.inside = True  # it has been woken and is still on its way out of the clock
        self.ended = False  # it was spawned, and its target has returned
        self.forget()

    def forget(self) -> None:
        self._place: tuple[object, ...] = ()
        self._since = 0.0
        self._looks = 0

    def moved(self, frame: FrameType, thread: threading.Thread) -> bool:
        return self._place != _place(thread, frame)

    def stood(self, frame: FrameType, thread: threading.Thread) -> float:
        """Return for how many real seconds the thread has not moved; 0 until that is sure."""
        now = _REAL.monotonic()
        place = _place(thread, frame)
        if self._place != place or _wants_a_processor(thread):
            self._place, self._since, self._looks = place, now, 0
        self._looks += 1
        return now - self._since if self._looks >= _LOOKS else 0.0


def _current_frames() -> dict[int, FrameType]:
    """Return the frame of each thread, as ``sys`` does, but with no collection inside.

    In older Pythons (3.11.7 for one) a collection that strikes there deadlocks with a thread that
    starts or ends in that moment, and no signal gets through: python/cpython#106883.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _wants_a_processor(thread: threading.Thread) -> bool:
    """Whether the system says that ``thread`` would run if it got a processor (Linux only)."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].startswith(b" R")
    except OSError:
        return False


def _place(thread: threading.Thread, frame: FrameType) -> tuple[object, ...]:
    """Return what changes when ``thread`` moves: how long it has run, and where it is on top.

    Not the frames below: to walk those of a thread that runs crashes Python 3.11 now and then.
    """
    try:
        with open(f"/proc/self/task/{thread.native_id}/schedstat", encoding="ascii") as stat:
            ran = stat.read().partition(" ")[0]
    except OSError:  # not Linux
        ran = ""
    return ran, id(frame), frame.f_lasti


class FakeClock(Clock):
    """A clock that stands still until :meth:`advance`, for tests of code that runs in threads.

    An advance moves time to the next instant at which someone is due, wakes that thread, lets
    it run until it *settles* (it waits on the clock again, or has ended), wakes the next, and
    so on: due times in order, within one instant the order of arrival. A thread whose event
    is set meanwhile, and a thread spawned meanwhile, have their turn as soon as the one that
    runs has settled. So one thread runs at a time, and the same program makes the same steps
    in the same order at each run. Outside an advance a set event wakes its waiter at once.

    Limits:

    * A thread that the clock did not spawn (the test's own) is known from its first wait on;
      :meth:`wait_for_waiters` waits for that.
    * A known thread may block in something that is not the clock: a barrier, a join, a queue.
      If it has not run or moved over a stretch of real time (``patience``), it is
      taken to be blocked there and no longer waited for, until a later look finds that it
      moved on. If someone's event was set meanwhile, they get their turn after a tenth of
      that: it may be them it is blocked on. A loop that makes no call at all may
      look the same as one that blocks. A thread that does neither fails the advance after 30 s.
    * :class:`~tako_sync.flag.Flag` tells when it is set. Other events are looked at every few
      milliseconds of real time and whenever all have settled.
      One whose ``is_set`` turns true by time passing is noticed at the next instant at which
      anyone is due, or at the end of the advance.
    * Nothing but an advance ends a timeout: a wait in the only thread hangs.

    Args:
        start: what :meth:`monotonic` returns at first, in seconds.
        wall: the time of day at first.
        seed: of the chance.
        patience: real seconds, see above.
    """

    def __init__(
        self,
        start: float = 1_000_000.0,
        wall: datetime = datetime(2026, 1, 1, tzinfo=timezone.utc),
        seed: int = 0,
        *,
        patience: float = 0.25,
    ) -> None:
        self._now = start
        self._midnight = wall - timedelta(seconds=start)  # the wall's time at monotonic 0
        self._chance = random.Random(seed)
        self._patience = patience
        self._arrivals = itertools.count()
        self.after_fork_in_child()
        fork.reset_in_child(self)

    def after_fork_in_child(self) -> None:
        """Forget the threads: they stayed with the parent."""
        # Reentrant, for a signal handler that sets a flag. Taken by itself, never by way of the
        # condition: that one's ``with`` runs Python code, where a KeyboardInterrupt would leave
        # it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._advancer: threading.Thread | None = None
        self._asleep: dict[_Waiter, bool] = {}
        self._dues: list[tuple[float, int, _Waiter]] = []  # a heap; may name some who are awake
        self._looker: _Waiter | None = None
        self._ready: deque[_Waiter] = deque()  # their events are set, their turn comes
        self._running: dict[threading.Thread, _Steps] = {}
        self._elsewhere: dict[threading.Thread, _Steps] = {}  # blocked in something else

    # --- The clock ---------------------------------------------------------------------

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> datetime:
        return self._midnight + timedelta(seconds=self._now)

    def random(self) -> float:
        with self._lock:
            return self._chance.random()

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        if event.is_set() or not (timeout is None or timeout > 0):
            return event.is_set()
        # After the least of timeouts time has moved, or a loop around it would never end.
        due = math.inf
        if timeout is not None:
            due = max(self._now + timeout, math.nextafter(self._now, math.inf))
        waiter = _Waiter(
            threading.current_thread(),
            event,
            due,
            next(self._arrivals),
            silent=not isinstance(event, Flag) or type(event).is_set is not Flag.is_set,
        )
        told = functools.partial(self._event_was_set, waiter)
        try:
            self._lie_down(waiter)
            # In between the thread still counts as running: the event may have been set after
            # the look at it above, and an advance must not move time past one that is set.
            if isinstance(event, Flag):
                event.watch(told)
            self._fall_asleep(waiter)
            self._sleep(waiter)
        finally:
            self._leave(waiter)
            if isinstance(event, Flag):
                event.unwatch(told)
        return event.is_set()

    def spawn(self, target: Callable[[], object], name: str) -> Task:
        """Run ``target`` in a new daemon thread; within an advance, when its turn comes.

        The timeout of the task's ``join`` is in the clock's seconds.
        """
        task = _Task(self, target, name)
        first_step = _Waiter(task.thread, task.ended, self._now, next(self._arrivals))
        task.first_step = first_step
        with self._lock:
            self._asleep[first_step] = True
            self._make_ready(first_step)
        me = self._running.get(threading.current_thread(), _Steps())
        # The system may take its time to start a thread. Meanwhile this one stands still, but
        # not in something that another's turn could end.
        me.inside = True
        try:
            task.thread.start()
        except BaseException:
            self._leave(first_step)
            with self._lock:
                self._running.pop(task.thread, None)
            raise
        finally:
            me.inside = False
        return task

    # --- The test's hand ---------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Move time, wake everyone due on the way, return when all wait again or have ended.

        Args:
            seconds: how far; 0 only lets everyone settle.

        Raises:
            ValueError: not a finite number of seconds from 0 up.
            RuntimeError: another thread is in an advance.
            AssertionError: a thread neither waited nor ended for 30 s of real time.
        """
        if isinstance(seconds, bool) or not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"advance takes a finite number of seconds from 0 up, not {seconds!r}")
        me = threading.current_thread()
        with self._lock:
            if self._advancer is not None:
                raise RuntimeError(f"{self._advancer.name} is advancing this clock already")
            self._advancer = me
            self._running.pop(me, None)
            self._elsewhere.pop(me, None)
        try:
            self._settle()
            target = self._now + seconds
            while self._wake_next_due(target + _SLACK) or self._move_to(target):
                self._settle()
        finally:
            with self._lock:
                self._advancer = None
                while self._ready:
                    self._wake(self._ready.popleft())

    def step_wall(self, seconds: float) -> None:
        """Move the time of day alone, either way, as an operator or NTP does."""
        self._midnight += timedelta(seconds=seconds)

    def view(self, offset: float = 0.0, rate: float = 1.0, wall_offset: float = 0.0) -> Clock:
        """Return the clock of another host, on this one's time line, among the same waiters.

        Args:
            offset: seconds by which its monotonic clock is ahead at this one's 0.
            rate: its seconds for each of this one's: 1.001 runs fast.
            wall_offset: seconds by which its time of day is ahead.
        """
        return _View(self, offset, rate, wall_offset)

    def wait_for_waiters(self, n: int, timeout: float = 10.0) -> None:
        """Wait until at least ``n`` threads wait on the clock.

        Args:
            n: how many.
            timeout: real seconds.

        Raises:
            AssertionError: there are fewer; the message lists them.
        """
        until = _REAL.monotonic() + timeout
        with self._lock:
            while len(self._asleep) < n:
                left = until - _REAL.monotonic()
                if left <= 0:
                    who = ", ".join(str(waiting) for waiting in self.waiters) or "nobody"
                    raise AssertionError(
                        f"{n} threads were to wait on the clock; after {timeout:g} s: {who}"
                    )
                self._changed.wait(left)  # not wait_for: it asks a clock that freezegun moves

    @property
    def waiters(self) -> tuple[Waiting, ...]:
        """Who waits on the clock, in the order of arrival."""
        with self._lock:
            return tuple(
                Waiting(w.thread.name, None if w.due == math.inf else w.due - self._now)
                for w in list(self._asleep)
            )

    def __repr__(self) -> str:
        return f"<FakeClock at {self._now:g}, {len(self._asleep)} waiting>"

    # --- A waiter's way: asleep, ready, running, out -------------------------------------

    def _lie_down(self, waiter: _Waiter) -> None:
        with self._lock:
            self._running[waiter.thread] = _Steps()
            self._elsewhere.pop(waiter.thread, None)
            self._asleep[waiter] = True
            if waiter.silent and self._looker is None:
                self._looker = waiter
            if waiter.due < math.inf:
                heapq.heappush(self._dues, (waiter.due, waiter.order, waiter))

    def _fall_asleep(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._asleep or waiter in self._ready:
                self._running.pop(waiter.thread, None)
                self._changed.notify_all()

    def _sleep(self, waiter: _Waiter) -> None:
        """Wait to be woken. One of those whose events do not tell looks at them for all."""
        while True:
            waiter.gate.acquire(timeout=_PEEK if waiter is self._looker else -1)
            with self._lock:
                if waiter not in self._asleep and waiter not in self._ready:
                    return
            # In an advance the advancer looks: a second one would disturb the order.
            if self._advancer is None:
                self._find_set_events()

    def _event_was_set(self, waiter: _Waiter) -> None:
        with self._lock:
            self._make_ready(waiter)

    def _make_ready(self, waiter: _Waiter) -> None:
        # Tested and taken out in one step: a signal handler that sets a flag comes in between.
        if not self._asleep.pop(waiter, False):
            return
        if self._advancer is None:
            self._wake(waiter)
        else:
            self._ready.append(waiter)
            self._changed.notify_all()

    def _wake(self, waiter: _Waiter) -> None:
        if waiter.thread is not self._advancer:  # which may be, in a signal handler of its own
            self._running[waiter.thread] = _Steps()
        waiter.open_gate()

    def _leave(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._asleep or waiter in self._ready:  # an exception ended the wait
                self._asleep.pop(waiter, None)
                if waiter in self._ready:
                    self._ready.remove(waiter)
                self._running[waiter.thread] = _Steps()
            if self._looker is waiter:
                self._looker = next((other for other in list(self._asleep) if other.silent), None)
                if self._looker is not None:
                    self._looker.open_gate()
            steps = self._running.get(waiter.thread)
            if steps is not None:
                steps.inside = False

    def _end(self, thread: threading.Thread) -> None:
        with self._lock:
            self._elsewhere.pop(thread, None)
            steps = self._running.setdefault(thread, _Steps())
            steps.inside, steps.ended = False, True
            self._changed.notify_all()

    # --- Settling, in the advancer -----------------------------------------------------

    def _settle(self) -> None:
        """Give everyone who is ready a turn, one after the other, until none is and none runs."""
        self._count_those_back_from_elsewhere()
        begun = looked = _REAL.monotonic()
        pause, most = _LOOK
        while True:
            with self._lock:
                quiet = not self._running
                if quiet and self._ready:
                    self._wake(self._ready.popleft())
                    begun = looked = _REAL.monotonic()
                    pause = _LOOK[0]
                    continue
            # After the look at who runs: what the last of them set must be seen.
            if self._find_set_events():
                continue
            if quiet:
                return
            self._pause(pause)
            now = _REAL.monotonic()
            if now - looked >= pause:
                looked, pause = now, min(2 * pause, most)
                self._look_at_the_running(now - begun)

    def _pause(self, seconds: float) -> None:
        """Wait until something changed, or for ``seconds`` of real time."""
        with self._lock:
            ending = next((t for t, steps in self._running.items() if steps.ended), None)
            if ending is None:
                if self._running:
                    self._changed.wait(seconds)
                return
        # Without the lock: what is left of the thread, as its excepthook, may set a flag.
        ending.join(seconds)
        if not ending.is_alive():
            with self._lock:
                self._running.pop(ending, None)

    def _find_set_events(self) -> bool:
        """Make those ready whose events do not tell and are set."""
        with self._lock:
            silent = [waiter for waiter in list(self._asleep) if waiter.silent]
        # Without the lock: is_set may be anyone's code, and take locks of its own.
        found = [waiter for waiter in silent if waiter.event.is_set()]
        for waiter in found:
            self._event_was_set(waiter)
        return bool(found)

    def _look_at_the_running(self, elapsed: float) -> None:
        with self._lock:
            frames = _current_frames()
            for thread, steps in list(self._running.items()):
                frame = frames.get(thread.ident or 0)
                if elapsed > _LIMIT:
                    stack = "".join(traceback.format_stack(frame))
                    raise AssertionError(
                        f"{thread.name} neither waits on the clock nor ends; it is here:\n{stack}"
                    )
                if steps.inside:
                    continue
                if steps.ended and thread.is_alive():
                    continue  # its frames are gone before it is: _pause waits for that
                if frame is None or not thread.is_alive():
                    del self._running[thread]
                    continue
                stood = steps.stood(frame, thread)
                if stood >= self._patience:
                    self._elsewhere[thread] = self._running.pop(thread)
                elif self._ready and stood >= self._patience / 10:
                    self._wake(self._ready.popleft())

    def _count_those_back_from_elsewhere(self) -> None:
        with self._lock:
            if not self._elsewhere:
                return
            frames = _current_frames()
            for thread, steps in list(self._elsewhere.items()):
                frame = frames.get(thread.ident or 0)
                if frame is None or not thread.is_alive():
                    del self._elsewhere[thread]
                elif steps.moved(frame, thread):
                    steps.forget()
                    self._running[thread] = self._elsewhere.pop(thread)

    def _wake_next_due(self, until: float) -> bool:
        with self._lock:
            while self._dues and self._dues[0][0] <= until:
                due, _, waiter = heapq.heappop(self._dues)
                if self._asleep.pop(waiter, False):
                    self._now = max(self._now, due)
                    self._wake(waiter)
                    return True
        return False

    def _move_to(self, target: float) -> bool:
        """Move to the end of an advance, where nobody is due; False if it has been reached."""
        if self._now >= target:
            return False
        self._now = target
        return True


class _Task:
    """A thread of a :class:`FakeClock`."""

    first_step: _Waiter

    def __init__(self, clock: FakeClock, target: Callable[[], object], name: str) -> None:
        self._clock = clock
        self._target = target
        self.name = name
        self.ended = Flag()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            self.first_step.gate.acquire()
            self._clock._leave(self.first_step)
            self._target()
        finally:
            self._clock._end(self.thread)
            self.ended.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended or ``timeout`` seconds of the clock have passed."""
        if threading.current_thread() is self.thread:
            raise RuntimeError("cannot join current thread")
        if self._clock.wait(self.ended, timeout):
            self.thread.join()

    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def __repr__(self) -> str:
        return f"<{self.name} {'alive' if self.is_alive() else 'ended'}>"


@frozen
class _View(Clock):
    """One host's clock on the time line that all simulated hosts share."""

    _base: FakeClock
    _offset: float
    _rate: float
    _wall_offset: float

    def monotonic(self) -> float:
        return self._base.monotonic() * self._rate + self._offset

    def wall(self) -> datetime:
        return self._base.wall() + timedelta(seconds=self._wall_offset)

    def random(self) -> float:
        return self._base.random()

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        return self._base.wait(event, None if timeout is None else timeout / self._rate)

    def spawn(self, target: Callable[[], object], name: str) -> Task:
        return self._base.spawn(target, name)
