"""A one-way event: set once, never cleared, and it tells its watchers."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Flag(threading.Event):
    """An event that, once set, stays set, and calls each watcher exactly once.

    It never holds a lock across Python code. ``threading.Event`` does: a
    ``KeyboardInterrupt`` between the acquisition of its inner lock and the ``try`` that
    would give it back leaves that lock taken, and every later ``set`` hangs.
    """

    def __init__(self) -> None:  # deliberately not the base's: it would build that lock
        self._raised = False
        self._watchers: list[Callable[[], object]] = []

    def is_set(self) -> bool:
        return self._raised

    def set(self) -> None:
        """Raise the flag and call the watchers, in the order in which they came."""
        self._raised = True
        self._drain()

    def clear(self) -> None:
        raise RuntimeError("this event is never cleared: what it tells is final")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is raised or ``timeout`` seconds of real time have passed."""
        if self._raised:
            return True
        if timeout is not None and timeout <= 0:
            return False
        gate = threading.Lock()
        gate.acquire()
        self.watch(gate.release)
        try:
            gate.acquire(True, -1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            self.unwatch(gate.release)
        return self._raised

    def watch(self, watcher: Callable[[], object]) -> None:
        """Call ``watcher`` when the flag is raised; at once if it is."""
        self._watchers.append(watcher)
        if self._raised:
            # set() may have looked at the list before the append above: whoever comes last
            # empties it, and pop() hands each watcher to one of the two.
            self._drain()

    def unwatch(self, watcher: Callable[[], object]) -> None:
        """Forget ``watcher``, if it has not been called yet."""
        try:
            self._watchers.remove(watcher)
        except ValueError:
            pass

    def forget(self) -> None:
        """Forget all watchers: it will never be raised any more."""
        self._watchers.clear()

    def _drain(self) -> None:
        try:
            while True:
                try:
                    watcher = self._watchers.pop(0)
                except IndexError:
                    return
                watcher()
        except BaseException:
            self._drain()  # one that fails, or Ctrl-C, must not leave the others asleep
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'set' if self.is_set() else 'not set'}>"
