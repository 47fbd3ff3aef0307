"""A body under a lease, and what came of it as a value: for who has to answer, not to raise."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic, TypeVar

from attrs import frozen

from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendUnavailableError,
    LeaseBusyError,
    LeaseLostError,
    RecordUnreadableError,
    TakoError,
)
from tako_sync.lock import Lock

T = TypeVar("T")


class Ended(enum.Enum):
    """How an attempt ended."""

    RAN = "ran"
    """The body returned, under a lease that was held throughout."""
    BUSY = "busy"
    """The body did not run: someone else holds the lease."""
    LOST = "lost"
    """The lease was lost while the body ran: it may have been done twice, or in part."""
    UNSETTLED = "unsettled"
    """The body did not run: the storage did not say who holds the lease."""


@frozen
class Outcome(Generic[T]):
    """What came of an attempt.

    Attributes:
        ended: how.
        value: what the body returned, if it did; after a loss, too.
        error: why, unless it ran.
        finished: whether the body returned, lease or not.
    """

    ended: Ended
    value: T | None = None
    error: TakoError | None = None
    finished: bool = False


def attempt(
    lock: Lock, fn: Callable[[], T], *, timeout: float | None, ctx: Ctx | None = None
) -> Outcome[T]:
    """Run ``fn()`` under ``lock`` and say what came of it.

    Args:
        lock: whose lease.
        fn: finds its ctx by ``tako_sync.current_ctx()``.
        timeout: seconds to wait for it, as of ``Lock.do``; 0: one attempt.
        ctx: a parent, as of ``Lock.do``.

    Raises:
        TakoError: one that has to be mended, such as a missing permission, or is of another lease.
        Exception: what ``fn`` raises.
    """
    fence: int | None = None
    finished = False

    def body(ctx: Ctx) -> T:
        nonlocal fence, finished
        fence = ctx.fence
        value = fn()
        finished = True
        return value

    try:
        return Outcome(Ended.RAN, lock.do(body, ctx=ctx, timeout=timeout), finished=True)
    except LeaseLostError as error:
        if (error.lease, error.fence) != (lock.name, fence):
            raise  # of a lease that the body held besides
        return Outcome(Ended.LOST, error.value, error, finished)
    except LeaseBusyError as error:
        if fence is not None:
            raise
        return Outcome(Ended.BUSY, error=error)
    except (BackendUnavailableError, RecordUnreadableError) as error:
        if fence is not None:
            raise
        return Outcome(Ended.UNSETTLED, error=error)
