"""What a body receives: whether to go on, for how long that is assured, and the fence.

A ctx is cancelled by the loss of its lease, by its own deadline, by its parent, or by hand.
It answers from the clocks at each question and does not wait for a thread to tell it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, TypeVar

from tako_sync import fork
from tako_sync.abc import Clock
from tako_sync.clock import SystemClock
from tako_sync.errors import (
    CtxCancelledError,
    CtxDeadlineError,
    HandoverRequestedError,
    NotAssuredError,
    UsageError,
)
from tako_sync.flag import Flag
from tako_sync.lease import Lease
from tako_sync.policy import seconds as checked_seconds
from tako_sync.record import printable

T = TypeVar("T")

_log: Final = logging.getLogger("tako_sync")


class _Entered(NamedTuple):
    """A ctx that a body runs under, and the one around that."""

    ctx: Ctx
    outer: _Entered | None


_current: ContextVar[_Entered | None] = ContextVar("tako_sync_ctx", default=None)


def _enter(entered: _Entered) -> Callable[[], None]:
    before = _current.get()
    token = _current.set(entered)

    def leave() -> None:
        try:
            _current.reset(token)
        except (ValueError, RuntimeError):  # left in another context than entered, or twice
            # Not over what that context is in: interleaving prevented, another body's thread
            # collects the generator, and that body loses its own ctx.
            if _current.get() is entered:
                _current.set(before)

    return leave


class Done(threading.Event):
    """The cancellation event of a ctx, for code that wants a ``threading.Event``.

    ``is_set`` and ``wait`` honour the deadline: they do not wait for a thread to tell them.
    ``set`` cancels the ctx; ``clear`` is refused.
    """

    def __init__(self, ctx: Ctx) -> None:  # deliberately not the base's: see Flag
        self._ctx = ctx

    def is_set(self) -> bool:
        return self._ctx.cancelled

    def set(self) -> None:
        self._ctx.cancel()

    def clear(self) -> None:
        raise RuntimeError("a ctx is never un-cancelled")

    def wait(self, timeout: float | None = None) -> bool:
        return self._ctx._wait(timeout)

    def __repr__(self) -> str:
        return f"<Done {'set' if self.is_set() else 'not set'}>"


class Ctx:
    """Cancellation, time left and fencing token of a body of work.

    Made by ``Lock.do`` and its kin, by :meth:`child`, or by :meth:`background`. All methods
    may be called from any thread.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        parent: Ctx | None = None,
        lease: Lease | None = None,
        deadline: float = math.inf,
    ) -> None:
        self._clock = clock
        self._parent = parent
        self._own_lease = lease
        self._deadline = deadline
        self._causes: list[BaseException] = []  # append is atomic: the first one counts
        self.flag = Flag()  # raised once someone has noticed: `cancelled` does not wait for it
        self._done: Done | None = None
        self._attended = -1  # the fork generation in which a thread awaits the end
        if lease is not None:
            lease.over.watch(self._settle)
            lease.handover.watch(self._settle)
        if parent is not None:
            parent._tell_weakly(self)

    @classmethod
    def background(cls, clock: Clock | None = None) -> Ctx:
        """Return a ctx without lease or deadline, cancelled only by hand."""
        if clock is not None and not isinstance(clock, Clock):
            raise UsageError(f"clock is a tako_sync.abc.Clock, not {clock!r}")
        return cls(clock or SystemClock())

    # --- Asking

    @property
    def done(self) -> threading.Event:
        """The cancellation event, to hand to others."""
        if self._done is None:
            self._done = Done(self)
        return self._done

    @property
    def cancelled(self) -> bool:
        """Whether to stop: the lease is lost, the time is over, or someone cancelled."""
        return self.cause is not None

    @property
    def cause(self) -> BaseException | None:
        """Why the ctx is cancelled; None while it is not. The first cause stays."""
        if not self._causes:
            cause = self._find_cause()
            if cause is not None:
                self.cancel(cause)
        return self._causes[0] if self._causes else None

    def check(self) -> None:
        """Raise the cause if the ctx is cancelled, else do nothing."""
        cause = self.cause
        if cause is not None:
            raise cause.with_traceback(None)

    def remaining(self) -> float:
        """Return the seconds that are assured: to the lease's and the own deadline.

        ``math.inf`` where nothing limits them, 0 once cancelled. A heartbeat prolongs them.
        """
        if self.cancelled:
            return 0.0
        left = self._deadline - self._clock.monotonic()
        if self._own_lease is not None:
            left = min(left, self._own_lease.remaining())
        if self._parent is not None:
            left = min(left, self._parent.remaining())
        return max(left, 0.0)

    def ensure(self, seconds: float) -> None:
        """Return only if ``seconds`` are assured: call it before an irreversible step.

        Raises:
            NotAssuredError: fewer seconds are assured.
            TakoError: the cause, if the ctx is cancelled.
        """
        wanted = checked_seconds("seconds", seconds, or_zero=True)
        self.check()
        left = self.remaining()
        if left < wanted:
            self.check()
            raise NotAssuredError(wanted, left)

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds``, waking on cancellation; return whether cancelled."""
        if seconds == math.inf:
            return self._wait(None)
        return self._wait(checked_seconds("seconds", seconds, or_zero=True))

    def beat(self) -> None:
        """Say that the body is alive, where its Singleton has a ``max_silence``.

        Raises:
            UsageError: the ctx belongs to no lease.
        """
        self.lease  # noqa: B018 - or there is nobody to tell
        for ctx in self._line():
            if ctx._own_lease is not None:
                ctx._own_lease.beat()

    @property
    def lease(self) -> Lease:
        """The hold that this ctx belongs to.

        Raises:
            UsageError: it belongs to none.
        """
        for ctx in self._line():
            if ctx._own_lease is not None:
                return ctx._own_lease
        raise UsageError("this ctx belongs to no lease, so it has no lease and no fence")

    @property
    def fence(self) -> int:
        """The fencing token, to be sent with every write that the lease guards.

        Raises:
            UsageError: the ctx belongs to no lease.
        """
        return self.lease.fence

    # --- Cancelling

    def cancel(self, cause: BaseException | str | None = None) -> None:
        """Cancel this ctx and its children. Later calls change nothing.

        Args:
            cause: what :meth:`check` raises; a text is wrapped in ``CtxCancelledError``.
        """
        if not isinstance(cause, BaseException):
            if cause is not None and not isinstance(cause, str):
                raise UsageError(f"a cause is an exception or a text, not {cause!r}")
            cause = CtxCancelledError(cause or "the ctx was cancelled")
        if not self._causes:
            self._causes.append(cause)
        self.flag.set()

    def on_cancel(self, fn: Callable[[], object]) -> Callable[[], None]:
        """Call ``fn`` once when the ctx is cancelled, at once if it is; return what undoes this.

        It runs in the thread that cancels. An ``Exception`` that it raises is logged.
        """
        if not callable(fn):
            raise UsageError(f"on_cancel takes a function, not {fn!r}")

        def call() -> None:
            try:
                fn()
            except Exception:  # noqa: BLE001 - it is the user's, and logged
                _log.exception("on_cancel callback %r failed", fn)

        line = list(self._line())
        for child, parent in itertools.pairwise(line):
            parent.flag.watch(child._settle)  # strongly: nobody else may keep the child alive
        timed = any(ctx._deadline < math.inf for ctx in line)
        if timed and self._attended != fork.generation() and not self.cancelled:
            # Nobody else is there to notice a deadline that passes unasked. One thread does for
            # all callbacks of this ctx.
            self._clock.spawn(self._await_the_end, "tako-ctx-deadline")
            self._attended = fork.generation()
        self.flag.watch(call)
        self._settle()

        def undo() -> None:
            self.flag.unwatch(call)
            for child, parent in itertools.pairwise(line):
                parent.flag.unwatch(child._settle)

        return undo

    def child(self, timeout: float | None = None) -> Ctx:
        """Return a ctx that is cancelled with this one, or alone, or after ``timeout`` seconds."""
        deadline = math.inf
        if timeout is not None:
            deadline = self._clock.monotonic() + checked_seconds("timeout", timeout, or_zero=True)
        return Ctx(self._clock, parent=self, deadline=deadline)

    # --- Carrying

    def wrap(self, fn: Callable[..., T]) -> Callable[..., T]:
        """Return ``fn`` so that :func:`current_ctx` finds this ctx inside it, in any thread."""
        if not callable(fn):
            raise UsageError(f"wrap takes a function, not {fn!r}")
        entered = _Entered(self, _current.get())

        @functools.wraps(fn)
        def carried(*args: Any, **kwargs: Any) -> T:
            leave = _enter(entered)
            try:
                return fn(*args, **kwargs)
            finally:
                leave()

        return carried

    @contextmanager
    def entered(self) -> Iterator[Ctx]:
        """Make this ctx the current one of the calling code, for a ``with`` block."""
        leave = self.enter()
        try:
            yield self
        finally:
            leave()

    def enter(self) -> Callable[[], None]:
        """Make this ctx the current one of the calling code; return what undoes that."""
        return _enter(_Entered(self, _current.get()))

    # --- Inside

    def _find_cause(self) -> BaseException | None:
        lease = self._own_lease
        if lease is not None and (lease.end is not None or lease.handover.is_set()):
            return lease.end or HandoverRequestedError(
                f"{printable(lease.asked_by)} asks for a hand-over"
            )
        if self._parent is not None and self._parent.cause is not None:
            return self._parent.cause
        if self._clock.monotonic() >= self._deadline:
            return CtxDeadlineError("the ctx's time is over")
        return None

    def _settle(self) -> None:
        self.cause  # noqa: B018 - asking is what settles it

    def _wait(self, timeout: float | None) -> bool:
        until = math.inf if timeout is None else self._clock.monotonic() + timeout
        while not self.cancelled:
            left = until - self._clock.monotonic()
            if left <= 0:
                break
            left = min(left, self.remaining())  # a heartbeat may have prolonged them since
            self._clock.wait(self.flag, None if left == math.inf else left)
        return self.cancelled

    def _await_the_end(self) -> None:
        self._wait(None)

    def _line(self) -> Iterator[Ctx]:
        ctx: Ctx | None = self
        while ctx is not None:
            yield ctx
            ctx = ctx._parent

    def _tell_weakly(self, child: Ctx) -> None:
        """Have ``child`` settle when this ctx is cancelled, without keeping it alive."""
        settle = weakref.WeakMethod(child._settle)

        def relay() -> None:
            alive = settle()
            if alive is not None:
                alive()

        self.flag.watch(relay)
        weakref.finalize(child, self.flag.unwatch, relay).atexit = False


def current_ctx() -> Ctx:
    """Return the ctx of the body that the calling code runs in.

    It follows calls, not threads: carry it into another thread with :meth:`Ctx.wrap`.

    Raises:
        UsageError: the code runs in no body.
    """
    entered = _current.get()
    if entered is None:
        raise UsageError(
            "no body of a lock is running here, so there is no current ctx; "
            "in a thread that a body has started, wrap the function: pool.submit(ctx.wrap(fn))"
        )
    return entered.ctx


def enclosing_leases() -> Iterator[Lease]:
    """Yield the leases of all the bodies that the calling code runs in."""
    entered = _current.get()
    while entered is not None:
        for ctx in entered.ctx._line():
            if ctx._own_lease is not None:
                yield ctx._own_lease
        entered = entered.outer
