"""Views under a lease."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Concatenate, Final, ParamSpec, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.db import connections, transaction
from django.http import FileResponse, HttpRequest, HttpResponse, JsonResponse
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
Request = TypeVar("Request", bound=HttpRequest)
Response = TypeVar("Response", bound=HttpResponseBase)
View = Callable[Concatenate[Request, P], Response]
Busy = Callable[[HttpRequest, Holder | None], HttpResponse]

log: Final = logging.getLogger("tako_sync")


def guard(
    lock: Lock | str, *, timeout: float | None = 0.0, busy: Busy | None = None
) -> Callable[[View[Request, P, Response]], View[Request, P, Response | HttpResponse]]:
    """Decorate a view: each call holds a lease until it returns.

    Inside, ``tako_sync.current_ctx()`` finds the ctx. Someone else holds it: 409, with
    ``Retry-After`` and who it is. The lease is lost while the view runs: 503 whatever it
    returns, for another one may run. It cannot be settled who holds it: 503.

    The transaction of ``ATOMIC_REQUESTS`` is put inside the lease: it is committed while that
    is held, and rolled back if it is lost before. So it is around the view alone, not around
    ``busy`` or decorators above this one. A class-based view is decorated by its ``dispatch``, with
    ``method_decorator``: the transaction is around a ``get`` or ``post`` before this is called.

    A response that is streamed is made after the view has returned, and is refused, but for one
    of a file; a ``TemplateResponse`` is rendered then, too.

    Args:
        lock: or its name.
        timeout: seconds to wait for it. By default one attempt is made; None: as long as
            ``TAKO["TIMEOUT"]`` says.
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

    def decorate(
        view: View[Request, P, Response],
    ) -> View[Request, P, Response | HttpResponse]:
        _check(view)
        marked = getattr(view, "_non_atomic_requests", ())
        # A view that is guarded already opens the transactions itself, inside both leases.
        outside = marked if isinstance(marked, _Everywhere) else _Everywhere(marked)
        opens = outside is not marked

        @functools.wraps(view)
        def guarded(
            request: Request, /, *args: P.args, **kwargs: P.kwargs
        ) -> Response | HttpResponse:
            def under_the_lease() -> Response:
                with ExitStack() as transactions:
                    for alias in connections:
                        wanted = opens and connections[alias].settings_dict["ATOMIC_REQUESTS"]
                        if wanted and not outside.names(alias) and not _unwanted(request, alias):
                            transactions.enter_context(transaction.atomic(using=alias))
                    response = _made(view(request, *args, **kwargs))
                    current_ctx().check()  # before the commit
                return response

            outcome = attempt(guarding, under_the_lease, timeout=timeout)
            if outcome.ended is Ended.RAN:
                return cast(Response, outcome.value)
            if outcome.ended is Ended.BUSY and busy is not None:
                return busy(request, holder_of(outcome))
            told = answer(outcome, guarding.name, current().policy)
            log.warning("%s: %s", request.path, outcome.error)
            return JsonResponse(told.facts, status=told.status, headers=told.headers)

        guarded._non_atomic_requests = outside  # type: ignore[attr-defined]
        return guarded

    return decorate


class _Everywhere(set[str]):
    """Where Django is to open no transaction: nowhere, it would be around the lease.

    Its elements are the databases on which the user wants none: ``non_atomic_requests`` adds them,
    below the guard or above it.
    """

    def __contains__(self, alias: object) -> bool:
        return True

    def names(self, alias: str) -> bool:
        return super().__contains__(alias)


def _unwanted(request: HttpRequest, alias: str) -> bool:
    """Return whether the view that the URL leads to is marked to have no transaction.

    ``method_decorator`` decorates a method anew for each request: marks are on the view alone.
    """
    view = getattr(request.resolver_match, "func", None)
    marked = getattr(view, "_non_atomic_requests", ())
    return marked.names(alias) if isinstance(marked, _Everywhere) else alias in marked


def _check(view: object) -> None:
    if iscoroutinefunction(view):  # also what as_view() returns for a class of such methods
        raise UsageError(
            f"{view!r} is asynchronous: a guarded view is a plain function, which Django runs in a "
            "thread of its own"
        )
    checks.guarded(view)


def _made(response: Response) -> Response:
    """Return a view's response, unless its work is only to be done."""
    of_a_file = isinstance(response, FileResponse) and response.file_to_stream is not None
    if getattr(response, "streaming", False) and not of_a_file:
        response.close()
        raise UsageError(
            "a guarded view answers with a stream, which would be made after its lease was given "
            "back: make it inside, and answer with the whole"
        )
    return response
