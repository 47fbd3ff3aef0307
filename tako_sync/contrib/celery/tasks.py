"""A task that holds a lease while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Final, Literal, ParamSpec, TypeVar

from celery import Signature, Task, current_app

from tako_sync import checks
from tako_sync.contrib.attempt import Ended, attempt
from tako_sync.contrib.celery.keys import Keys
from tako_sync.contrib.celery.shutdown import cancelled_by_shutdown
from tako_sync.errors import ConfigurationError, UsageError
from tako_sync.policy import seconds
from tako_sync.runtime import current, log, wait_in_context

P = ParamSpec("P")
R = TypeVar("R")

COUNTDOWN: Final = 10.0
"""Seconds to the next try of a task that found its lease busy."""
WAIT: Final = 10.0
"""Seconds that a task waits for its lease with ``busy="wait"``, and for any other lease if neither
it nor the policy says how long."""
_CHOICES: Final = {
    "busy": ("raise", "retry", "skip", "wait"),
    "on_loss": ("raise", "report"),
    "on_shutdown": ("finish", "cancel"),
}


def leased(
    name: str,
    *,
    key: str | None = None,
    among: Iterable[object] | None = None,
    busy: Literal["raise", "retry", "skip", "wait"] = "raise",
    countdown: float = COUNTDOWN,
    max_retries: int | None = None,
    timeout: float | None = None,
    on_loss: Literal["raise", "report"] = "raise",
    on_shutdown: Literal["finish", "cancel"] = "finish",
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a task, below ``@app.task``: the lease is held while it runs, from its first step.

    Not from when it is sent: any number may wait in the queue. Inside, ``tako_sync.current_ctx()``
    finds the ctx; send its ``fence`` along with each write, and look at it in long tasks.

    A worker that is killed frees the lease after the ttl (30 s). With ``acks_late`` its message
    comes again before that: one that the broker says to be redelivered (RabbitMQ and Redis do)
    waits for a ttl longer before it counts as busy.

    Args:
        name: of the lease.
        key: a parameter of the task: each of its values has a lease of its own, ``<name>-<value>``.
        among: the values that it may have: texts, ints, members of an Enum. A member's value
            will do in a call, for JSON knows no members.
        busy: what a task does while someone else holds its lease. ``raise``: fail with
            ``LeaseBusyError``. ``retry``: come again after ``countdown``. ``skip``: succeed with
            None, for another one is at it. ``wait``: wait for ``timeout``, then fail.
        countdown: seconds to the next try, with ``retry``.
        max_retries: how often it comes again, with ``retry``; None as often as the task says
            (by default 3 times), then it fails with ``LeaseBusyError``.
        timeout: seconds to wait for the lease before it counts as busy. By default 10 with
            ``wait``, else 0.
        on_loss: what a loss means of which the task learns only when it has finished. ``raise``:
            it fails with ``LeaseLostError``, which ``autoretry_for`` may turn into a second run of
            work that was done. ``report``: it is logged as an error, and the result kept.
        on_shutdown: what a warm shutdown of the worker means for a task that runs. ``finish``:
            nothing, the worker waits for it. ``cancel``: its ctx is cancelled, so that it can end
            early; the lease is kept until it has.

    Raises:
        ConfigurationError: no such choice, no such lease, no such parameter.
        UsageError: what is decorated is no plain function, or is a task already.
    """
    for option, chosen in (("busy", busy), ("on_loss", on_loss), ("on_shutdown", on_shutdown)):
        if chosen not in _CHOICES[option]:
            allowed = " or ".join(repr(choice) for choice in _CHOICES[option])
            raise ConfigurationError(f"{option} is {allowed}, not {chosen!r}")
    countdown = seconds("countdown", countdown, or_zero=True)
    if max_retries is not None and (not isinstance(max_retries, int) or max_retries < 0):
        raise ConfigurationError(f"max_retries is a count, or None, not {max_retries!r}")
    default = WAIT if busy == "wait" else 0.0
    allowed_wait = default if timeout is None else seconds("timeout", timeout, or_zero=True)

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        _check(fn)
        keys = Keys.of(name, fn, key, among)

        @functools.wraps(fn)
        def task(*args: P.args, **kwargs: P.kwargs) -> R:
            lock = keys.lock(args, kwargs)
            wait = allowed_wait + (_a_ttl() if _redelivered() else 0.0)
            watched = cancelled_by_shutdown() if on_shutdown == "cancel" else nullcontext()
            with watched as parent:
                outcome = attempt(lock, lambda: fn(*args, **kwargs), timeout=wait, ctx=parent)
            if outcome.ended is Ended.RAN:
                return outcome.value  # type: ignore[return-value]
            if outcome.ended is Ended.LOST and on_loss == "report" and outcome.finished:
                log.error("task %s has finished, and keeps its result: %s", _named(), outcome.error)
                return outcome.value  # type: ignore[return-value]
            assert outcome.error is not None
            if outcome.ended is Ended.BUSY and busy == "skip":
                log.info("task %s is skipped: %s", _named(), outcome.error)
                return None  # type: ignore[return-value]
            running = _running()
            if outcome.ended is Ended.BUSY and busy == "retry" and running is not None:
                log.info("task %s comes again in %g s: %s", _named(), countdown, outcome.error)
                most = running.max_retries if max_retries is None else max_retries
                raise running.retry(exc=outcome.error, countdown=countdown, max_retries=most)
            raise outcome.error

        # Celery checks the arguments of delay() by it, and does not follow __wrapped__.
        task.__signature__ = keys.signature  # type: ignore[attr-defined]
        return task

    return decorate


def _check(fn: object) -> None:
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    if isinstance(inner, (Task, Signature)):
        raise UsageError(
            f"@leased(...) stands above the task {inner.name}, whose worker would not know of it: "
            "write it below @app.task"
        )
    checks.guarded(fn)


def _running() -> Task[Any, Any] | None:
    """Return the task that this thread is at, if the function was not called without one."""
    return current_app.current_task


def _longest_wait() -> float | None:
    """Return how long a campaign inside a task waits that says no timeout; None elsewhere."""
    return None if _running() is None else WAIT


def _redelivered() -> bool:
    running = _running()
    delivery = None if running is None else running.request.delivery_info
    return bool((delivery or {}).get("redelivered"))


def _a_ttl() -> float:
    policy = current().policy
    return policy.ttl + 2 * policy.poll


def _named() -> str:
    running = _running()
    return "called by hand" if running is None else f"{running.name}[{running.request.id}]"


wait_in_context(_longest_wait)
