"""Trying again: the one module that knows tenacity, and the arithmetic of pauses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tenacity  # not at the first pause: Ctrl-C there would leave half a package for good
from attrs import frozen

from tako_sync.abc import Clock

T = TypeVar("T")


@frozen
class Pause:
    """An attempt's answer: not yet; ask again after so many seconds."""

    seconds: float


def until_settled(attempt: Callable[[], T | Pause], sleep: Callable[[float], None]) -> T:
    """Call ``attempt`` until it answers something else than a :class:`Pause`; return that.

    tenacity keeps the loop, and nothing else: it does not follow an injected clock, looks at
    its stop conditions only after an attempt, and takes its jitter from the global
    ``random``. So ``attempt`` itself says how long to pause, and itself raises when it is too
    late. Exceptions are never retried here: Ctrl-C passes through.

    Args:
        attempt: asks once.
        sleep: waits for the given seconds; may wake early, or raise.
    """
    first = attempt()
    if not isinstance(first, Pause):
        return first
    sleep(first.seconds)

    def pause(state: tenacity.RetryCallState) -> float:
        assert state.outcome is not None
        answer = state.outcome.result()
        assert isinstance(answer, Pause)
        return answer.seconds

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda answer: isinstance(answer, Pause)),
        wait=pause,
        sleep=sleep,
    )
    settled = retrying(attempt)
    assert not isinstance(settled, Pause)
    return settled


class Backoff:
    """Pauses that double with each failure in a row, up to a bound, each jittered.

    Args:
        least: seconds of the first pause, on average.
        most: seconds of the longest.
    """

    def __init__(self, clock: Clock, least: float, most: float) -> None:
        self._clock = clock
        self._least = least
        self._most = most
        self._failures = 0

    def failed(self, retry_after: float = 0.0) -> Pause:
        """Return the pause after one more failure: ``retry_after`` seconds at least."""
        pause = min(self._most, self._least * 2.0**self._failures)
        self._failures = min(self._failures + 1, 30)
        chance = self._clock.random()
        # Half to one and a half of the pause; on top of retry_after, so that many who were
        # refused at one instant do not come back at one instant.
        return Pause(max(pause * (0.5 + chance), retry_after * (1 + chance / 2)))

    def reset(self) -> None:
        """Start again from the first pause."""
        self._failures = 0

    @property
    def failing(self) -> bool:
        return self._failures > 0
