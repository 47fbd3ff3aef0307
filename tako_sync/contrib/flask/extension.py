"""The extension: one binding for each application, and views under a lease."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable
from typing import Any, Final, ParamSpec

import flask
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response
from werkzeug.wsgi import FileWrapper

from tako_sync import checks
from tako_sync.contrib.answers import answer, holder_of
from tako_sync.contrib.attempt import Ended, attempt
from tako_sync.contrib.flask.health import blueprint
from tako_sync.contrib.settings import binding
from tako_sync.errors import ConfigurationError, UsageError
from tako_sync.lock import Lock
from tako_sync.record import Holder
from tako_sync.runtime import Runtime, announced, by_default, current, in_context
from tako_sync.singleton import Singleton

_PREFIX: Final = "TAKO_"
_RUNTIME: Final = "TAKO_RUNTIME"
_KEY: Final = "tako_sync"

P = ParamSpec("P")
Busy = Callable[[Holder | None], ResponseReturnValue]


class Tako:
    """The extension. ``Tako(app)``, or ``tako = Tako()`` and ``tako.init_app(app)``.

    An application whose config has a key that begins with ``TAKO_`` has a binding of its own:
    wherever it has its context (requests, commands, ``with app.app_context()``), all locks and
    loops are bound to that. Without such a key the process's binding is used, and made from the
    environment. Either way, who says no timeout waits for 10 s at most, not for ever
    (``TAKO_TIMEOUT``).

    Args:
        app: the application; its config is read now.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    def __init__(self, app: flask.Flask | None = None) -> None:
        if app is not None:
            self.init_app(app)

    def init_app(self, app: flask.Flask) -> None:
        """Bind an application. Another one may have other settings, in the same process."""
        settings: dict[str, Any] = {
            key: value for key, value in app.config.items() if key.startswith(_PREFIX)
        }
        runtime = settings.pop(_RUNTIME, None)
        if runtime is not None and (settings or not isinstance(runtime, Runtime)):
            raise ConfigurationError(
                f"{_RUNTIME} is a tako_sync.Runtime, and stands alone: not {runtime!r}, with "
                f"{', '.join(sorted(settings)) or 'nothing'}"
            )
        if runtime is None and settings:
            stripped = {key.removeprefix(_PREFIX): value for key, value in settings.items()}
            runtime = announced(binding(stripped, _PREFIX + "{}"))
        if _KEY in app.extensions:
            raise UsageError(f"the application {app.name!r} has been bound before: do so once")
        app.extensions[_KEY] = runtime
        if runtime is None:
            by_default(lambda: binding({}, _PREFIX + "{}"))

    @property
    def runtime(self) -> Runtime:
        """The binding of the current application.

        Raises:
            UsageError: there is none, or this extension was not given it.
        """
        if not flask.has_app_context():
            raise UsageError("there is no current application: write `with app.app_context():`")
        extensions = flask.current_app.extensions
        if _KEY not in extensions:
            raise UsageError(f"{flask.current_app.name!r} was not bound: call tako.init_app(app)")
        return extensions[_KEY] or current()

    def guard(
        self, lock: Lock | str, *, timeout: float | None = 0.0, busy: Busy | None = None
    ) -> Callable[[Callable[P, ResponseReturnValue]], Callable[P, ResponseReturnValue]]:
        """Decorate a view, below the route: each call holds a lease until it returns.

        Inside, ``tako_sync.current_ctx()`` finds the ctx. Someone else holds it: 409, with
        ``Retry-After`` and who it is. The lease is lost while the view runs: 503 whatever it
        returns, for another one may run. It cannot be settled who holds it: 503.

        A response that is streamed is made after the view has returned, and is refused, but for
        that of ``send_file``.

        Args:
            lock: or its name.
            timeout: seconds to wait for it. By default one attempt is made; None: as long as
                ``TAKO_TIMEOUT`` says.
            busy: returns the answer in place of the 409, given who holds it, if that is known.

        Raises:
            ConfigurationError: there can be no such lock.
            UsageError: what is decorated is no plain function.
        """
        guarding = Lock(lock) if isinstance(lock, str) else lock
        if not isinstance(guarding, Lock):
            raise UsageError(f"guard() is given a tako_sync.Lock or its name, not {lock!r}")
        checks.timeout(timeout)

        def decorate(
            view: Callable[P, ResponseReturnValue],
        ) -> Callable[P, ResponseReturnValue]:
            checks.guarded(view)

            @functools.wraps(view)
            def guarded(*args: P.args, **kwargs: P.kwargs) -> ResponseReturnValue:
                outcome = attempt(
                    guarding, lambda: _made(lambda: view(*args, **kwargs)), timeout=timeout
                )
                if outcome.ended is Ended.RAN:
                    return outcome.value  # type: ignore[return-value]
                if outcome.ended is Ended.BUSY and busy is not None:
                    return busy(holder_of(outcome))
                told = answer(outcome, guarding.name, current().policy)
                flask.current_app.logger.warning("%s", outcome.error)
                return flask.jsonify(told.facts), told.status, told.headers

            return guarded

        return decorate

    def health(self, singletons: Iterable[Singleton], *, prefix: str = "/tako") -> flask.Blueprint:
        """Return a blueprint that tells how Singletons do that run in this process.

        ``GET <prefix>/health``: 503 if one is down. ``GET <prefix>/live``: 503 if one needs a new
        process. Both say why, as JSON, and ask no storage.
        """
        return blueprint(tuple(singletons), prefix)


def _made(view: Callable[[], ResponseReturnValue]) -> ResponseReturnValue:
    """Return what a view does, or raise its abort, unless its work is only to be done."""
    try:
        value = view()
    except HTTPException as abort:
        _whole(abort.response)
        raise
    _whole(value[0] if isinstance(value, tuple) and value else value)
    return value


def _whole(answer: object) -> None:
    if isinstance(answer, Response):
        if not answer.is_streamed or _of_a_file(answer):
            return
        answer.close()
    elif not hasattr(answer, "__next__") and not callable(answer):  # a WSGI application
        return
    raise UsageError(
        "a guarded view answers with a stream, which would be made after its lease was given back: "
        "make it inside, and answer with the whole"
    )


def _of_a_file(answer: Response) -> bool:
    """Return whether it is as ``send_file`` makes it: the server reads a file that is there."""
    wrapper = flask.request.environ.get("wsgi.file_wrapper", FileWrapper)
    made = getattr(answer.response, "iterable", answer.response)  # what a Range is taken of
    if isinstance(wrapper, type):
        return isinstance(made, wrapper)
    return answer.direct_passthrough and isinstance(made, io.IOBase)  # as of uWSGI


def _of_context() -> Runtime | None:
    if not flask.has_app_context():
        return None
    found: Runtime | None = flask.current_app.extensions.get(_KEY)
    return found


in_context(_of_context)
