"""Views under a lease."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Concatenate, Final, ParamSpec, cast

from django.db import connections, transaction
from django.http import FileResponse, HttpRequest, JsonResponse
from django.http.response import HttpResponseBase

from tako_sync import checks
from tako_sync.contrib.answers import answer, holder_of
from tako_sync.contrib.attempt import Ended, attempt
from tako_sync.ctx import current_ctx
from tako_sync.errors import UsageError
from tako_sync.lock import Lock
from tako_sync.record import Holder
from tako_sync.runtime import current

P = ParamSpec("P")
View = Callable[Concatenate[HttpRequest, P], HttpResponseBase]
Busy = Callable[[HttpRequest, Holder | None], HttpResponseBase]

log: Final = logging.getLogger("tako_sync")


def guard(
    lock: Lock | str, *, timeout: float = 0.0, busy: Busy | None = None
) -> Callable[[View[P]], View[P]]:
    """Decorate a view: each call holds a lease until it returns.

    Inside, ``tako_sync.current_ctx()`` finds the ctx. Someone else holds it: 409, with
    ``Retry-After`` and who it is. The lease is lost while the view runs: 503 whatever it
    returns, for another one may run. It cannot be settled who holds it: 503.

    The transaction of ``ATOMIC_REQUESTS`` is put inside the lease: it is committed while that
    is held, and rolled back if it is lost before. A response that is streamed is made after the
    view has returned, and is refused; a ``TemplateResponse`` is rendered then, too.

    Args:
        lock: or its name.
        timeout: seconds to wait for it. By default one attempt is made.
        busy: returns the answer in place of the 409, given the request and who holds it, if that
            is known.

    Raises:
        ConfigurationError: there can be no such lock.
        UsageError: what is decorated is no plain function.
    """
    guarding = Lock(lock) if isinstance(lock, str) else lock
    if not isinstance(guarding, Lock):
        raise UsageError(f"guard() is given a tako_sync.Lock or its name, not {lock!r}")
    checks.timeout(timeout)

    def decorate(view: View[P]) -> View[P]:
        checks.guarded(view)
        outside = frozenset(getattr(view, "_non_atomic_requests", ()))

        @functools.wraps(view)
        def guarded(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
            def under_the_lease() -> HttpResponseBase:
                with ExitStack() as transactions:
                    for alias in connections:
                        wanted = connections[alias].settings_dict["ATOMIC_REQUESTS"]
                        if wanted and alias not in outside:
                            transactions.enter_context(transaction.atomic(using=alias))
                    response = _made(view(request, *args, **kwargs))
                    current_ctx().check()  # before the commit
                return response

            outcome = attempt(guarding, under_the_lease, timeout=timeout)
            if outcome.ended is Ended.RAN:
                return cast(HttpResponseBase, outcome.value)
            if outcome.ended is Ended.BUSY and busy is not None:
                return busy(request, holder_of(outcome))
            told = answer(outcome, guarding.name, current().policy)
            log.warning("%s: %s", request.path, outcome.error)
            return JsonResponse(told.facts, status=told.status, headers=told.headers)

        # Django would put the transaction of ATOMIC_REQUESTS around the lease.
        guarded._non_atomic_requests = set(connections)  # type: ignore[attr-defined]
        return guarded

    return decorate


def _made(response: HttpResponseBase) -> HttpResponseBase:
    """Return a view's response, unless its work is only to be done."""
    if getattr(response, "streaming", False) and not isinstance(response, FileResponse):
        response.close()
        raise UsageError(
            "a guarded view answers with a stream, which would be made after its lease was given "
            "back: make it inside, and answer with the whole"
        )
    return response
