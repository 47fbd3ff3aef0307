"""A loop in a thread of its own, and how all loops of a process are asked to stop.

Stopping is asking: the ctx of the body is cancelled with a cause that says so, its lease is
renewed while it drains, and is given back when it has returned.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from tako_sync import fork
from tako_sync.abc import Clock, Task
from tako_sync.ctx import Ctx
from tako_sync.errors import ShutdownError
from tako_sync.flag import Flag
from tako_sync.policy import seconds

log: Final = logging.getLogger("tako_sync")


class Runner:
    """A loop that runs in the background, until :meth:`stop`. Made by ``start()``.

    In a forked child it does not run, and ``start()`` is to be called there anew.

    Args:
        name: of the loop, for people.
        clock: whose threads and time.
        loop: runs until its ctx is cancelled.
        before: one that was asked to stop, and whose end is waited for.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        loop: Callable[[Ctx], object],
        before: Runner | None = None,
    ) -> None:
        self.name = name
        self.ctx = Ctx.background(clock)
        self.error: BaseException | None = None
        """What ended the loop, if anything but a stop did."""
        self._clock = clock
        self._loop = loop
        self._before = before
        self._thread: threading.Thread | None = None
        self._ended = Flag()
        self._generation = fork.generation()
        fork.reset_in_child(self)
        self._task: Task = clock.spawn(self._run, f"tako-{name}")

    @property
    def running(self) -> bool:
        """Whether its loop goes on in this process."""
        return self._generation == fork.generation() and not self._ended.is_set()

    def stop(self, timeout: float | None = None) -> bool:
        """Ask the loop to stop and wait until it has; return whether it has.

        A body that goes on keeps its lease, renewed, for as long as it does. Called by the body
        itself, it does not wait.

        Args:
            timeout: seconds to wait; None for as long as it takes; 0 not at all.
        """
        allowed = None if timeout is None else seconds("timeout", timeout, or_zero=True)
        if self._generation != fork.generation():
            return True
        self.ctx.cancel(ShutdownError(f"{self.name} is asked to stop"))
        return self.wait(allowed)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended; return whether it has. The loop itself does not wait."""
        if self._thread is threading.current_thread():
            return False
        return not self.running or self._clock.wait(self._ended, timeout)

    def after_fork_in_child(self) -> None:
        if not self._ended.is_set():
            fork.say_then(self._warn)

    def _warn(self) -> None:
        log.warning(
            "%s was started before this process was forked: it runs in the parent. Start it "
            "here, too, if this process is to stand by",
            self.name,
        )

    def _run(self) -> None:
        self._thread = threading.current_thread()
        try:
            if self._before is not None:
                self._before.wait()
                self._before = None
            if not self.ctx.cancelled:
                self._loop(self.ctx)
        except BaseException as error:
            self.error = error
            log.critical("%s has ended, and will not run again", self.name, exc_info=error)
        finally:
            self._ended.set()

    def __repr__(self) -> str:
        return f"<Runner {self.name} {'running' if self.running else 'ended'}>"


class Background:
    """The thread of one loop in this process: what its ``start()`` and ``stop()`` share."""

    def __init__(self) -> None:
        self._runner: Runner | None = None
        # A signal handler may stop what the thread that it strikes is about to start.
        self._lock = threading.RLock()
        fork.reset_in_child(self)

    def start(self, name: str, clock: Clock, loop: Callable[[Ctx], object]) -> Runner:
        """Return the runner that goes on, or a new one; one that is to stop is followed by it."""
        fork.settle()
        with self._lock:
            last = self._runner
            if last is None or not last.running or last.ctx.cancelled:
                draining = last if last is not None and last.running else None
                self._runner = Runner(name, clock, loop, draining)
            assert self._runner is not None
            return self._runner

    def stop(self, timeout: float | None) -> bool:
        """As :meth:`Runner.stop`; True if nothing was started."""
        runner = self._runner
        return runner is None or runner.stop(timeout)

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()


class Loops:
    """The loops that run in this process now: who asks all of them to stop finds them here.

    That is remembered until it is taken back. A loop that was about to begin would not have heard
    it, and one that begins in a process that is told to end would keep it from ending.
    """

    def __init__(self) -> None:
        self._running: list[tuple[Ctx, threading.Thread]] = []  # append, remove are atomic
        self._closed: dict[object, ShutdownError] = {}
        fork.reset_in_child(self)

    def enter(self, ctx: Ctx) -> Callable[[], None]:
        """Note a loop of the calling thread; return what strikes it off."""
        fork.settle()
        entry = ctx, threading.current_thread()
        self._running.append(entry)
        # After the loop was noted; who stops them looks the other way round: one of both sees it.
        for cause in list(self._closed.values()):
            ctx.cancel(cause)

        def leave() -> None:
            if entry in self._running:
                self._running.remove(entry)

        return leave

    def close(self, by: object, cause: ShutdownError) -> None:
        """Have loops that begin end at once. To be followed by :meth:`stop`.

        May be called in a signal handler: it wants no lock.
        """
        fork.settle()
        self._closed[by] = cause

    def stop(self, by: object) -> None:
        """Ask all that run to stop, without waiting, unless it was taken back."""
        for ctx, _thread in list(self._running):
            cause = self._closed.get(by)
            if cause is not None:
                ctx.cancel(cause)

    def reopen(self, by: object) -> None:
        """Take back what was closed by the same."""
        self._closed.pop(by, None)

    @property
    def threads(self) -> list[threading.Thread]:
        fork.settle()
        return [thread for _ctx, thread in list(self._running)]

    def after_fork_in_child(self) -> None:
        self._running = []
        self._closed = {}  # it was not this process that was told


loops: Final = Loops()
