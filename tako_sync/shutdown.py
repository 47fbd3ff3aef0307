"""What a process does when it is told to end: its loops are asked to stop, and drain.

Nothing here is done behind anyone's back: a program installs it by a call.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final

from tako_sync.clock import SystemClock
from tako_sync.errors import ShutdownError, UsageError
from tako_sync.flag import Flag
from tako_sync.policy import seconds
from tako_sync.runner import loops

_CLOCK: Final = SystemClock()
_LOOK: Final = 0.05
"""Seconds between two looks at what still drains."""


def install_signal_handlers(
    signals: Iterable[int] = (signal.SIGTERM,), *, timeout: float = 25.0
) -> Callable[[], None]:
    """Have a signal ask all loops of this process to stop. Return what undoes this.

    The ctx of each body is cancelled with a ``ShutdownError`` that names the signal. Its lease is
    renewed while it drains, and given back once it has returned, so that the next instance enters
    within a poll. A loop that begins later ends at once, until the handlers are undone.

    Then what was there before is called. Where that is the system's default, which would end the
    process at once: if the main thread is inside a ``run``, that returns and the program goes on
    behind it; else the handler waits for the loops, and raises ``SystemExit``.

    Args:
        signals: which.
        timeout: seconds to wait for the loops of other threads. Cloud Run gives 10, Kubernetes 30.

    Raises:
        UsageError: called outside the main thread, where Python installs no handlers.
    """
    allowed = seconds("timeout", timeout, or_zero=True)
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("signal handlers can only be installed in the main thread")
    installed = [_Handler(signal.Signals(number), allowed) for number in signals]

    def undo() -> None:
        for handler in installed:
            handler.remove()

    return undo


class _Handler:
    def __init__(self, number: signal.Signals, timeout: float) -> None:
        self._number = number
        self._timeout = timeout
        self._until: float | None = None
        self._removed = False
        self._earlier: Any = signal.getsignal(number)
        signal.signal(number, self._handle)

    def remove(self) -> None:
        """Do nothing any more, also where a later handler calls this one or puts it back."""
        self._removed = True
        if signal.getsignal(self._number) == self._handle:
            # None: it was not installed from Python, and cannot be put back from there.
            signal.signal(self._number, self._below() or signal.SIG_DFL)
        loops.reopen(self)

    def _below(self) -> Any:
        """Return what was there before; not those of ours that were removed since."""
        found = self._earlier
        while isinstance(owner := getattr(found, "__self__", None), _Handler) and owner._removed:
            found = owner._earlier
        return found

    def _handle(self, number: int, frame: FrameType | None) -> None:
        below = self._below()
        if not self._removed:
            loops.close(self, ShutdownError(f"the process was sent {self._number.name}"))
            # In a thread: it calls what bodies have registered, which may want a lock that the
            # interrupted code has. A bare one: starting a Thread takes such a lock, too.
            _thread.start_new_thread(loops.stop, (self,))
        if callable(below):
            below(number, frame)
        elif (
            not self._removed
            and below == signal.SIG_DFL
            and threading.main_thread() not in loops.threads
        ):
            self._drain()
            raise SystemExit(128 + number)

    def _drain(self) -> None:
        if self._until is None:  # a second signal does not give the loops more time
            self._until = _CLOCK.monotonic() + self._timeout
        while loops.threads and _CLOCK.monotonic() < self._until:
            _CLOCK.wait(Flag(), _LOOK)
