"""The line of one process's campaigns for one name: first come, first served."""

from __future__ import annotations

import weakref
from collections import deque

from tako_sync.flag import Flag


class Line:
    """Raises the flag of whoever stands first; only that one polls the storage.

    It needs no lock: each step is one atomic operation of a deque, and raising a flag twice
    does nothing. It holds the flags weakly: a campaign that is torn away by an exception in
    the very moment of leaving (Ctrl-C) makes room when its frame is gone.
    """

    def __init__(self) -> None:
        self._waiting: deque[weakref.ref[Flag]] = deque()

    def join(self, turn: Flag) -> None:
        """Stand at the end; ``turn`` is raised when its turn comes, at once if alone."""
        self._waiting.append(weakref.ref(turn, self._forget))
        self._call_first()

    def leave(self, turn: Flag) -> None:
        """Make room for the next, wherever in the line ``turn`` stands."""
        self._forget(weakref.ref(turn))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def _forget(self, reference: weakref.ref[Flag]) -> None:
        try:
            self._waiting.remove(reference)
        except ValueError:
            pass
        self._call_first()

    def _call_first(self) -> None:
        while True:
            try:
                first = self._waiting[0]
            except IndexError:
                return
            turn = first()
            if turn is not None:
                turn.set()
                return
            self._forget(first)
