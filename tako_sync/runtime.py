"""The binding to an application: which storage, which clock, which policy, and who we are.

Resolved at first use, not at import: what ``configure`` was told, else the environment, else
a SQLite file of the user's.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from attrs import define, field

from tako_sync import fork, names
from tako_sync.abc import Absent, Clock, Interval, LeaseBackend, Listener, Version
from tako_sync.backends import connect
from tako_sync.bounded import Requests
from tako_sync.clock import SystemClock
from tako_sync.errors import ConfigurationError
from tako_sync.events import Event
from tako_sync.lease import Lease
from tako_sync.line import Line
from tako_sync.policy import LeasePolicy
from tako_sync.record import Holder, Identity
from tako_sync.rules import Free, Terms

DEFAULT_APP: Final = "app"
DEFAULT_ENV: Final = "dev"
_REMEMBERED: Final = 1024
"""Names of which a process remembers what it knows. To forget one costs a request more."""
_MAX_NOTE: Final = 500

_SEVERAL_MACHINES: Final = {
    "K_SERVICE": "Cloud Run",
    "CLOUD_RUN_JOB": "Cloud Run",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
    "GAE_ENV": "App Engine",
    "GAE_SERVICE": "App Engine",
    "ECS_CONTAINER_METADATA_URI": "ECS",
    "ECS_CONTAINER_METADATA_URI_V4": "ECS",
    "DYNO": "Heroku",
}
"""Environment variables that tell a platform which runs an application on several machines."""

T = TypeVar("T")

log: Final = logging.getLogger("tako_sync")


@define
class Known:
    """What this process knows of one name.

    Attributes:
        line: the local campaigns; only the first polls.
        lease: the hold that this process has, while it has one.
        holder: whom the first of the line waits for, to be named by those behind it.
        free: what the last clean release left, to be acquired without a look.
        looked: when the last answer came that showed any version.
        seen: the version last seen, when the answer came that first showed it, and when the
            one came before that, which still showed another.
        dated: a version, and when it was written by a further request; None if unknown.
        streak: when this process began to hold the name back to back; ``ended``: when its
            last hold did.
    """

    line: Line = field(factory=Line)
    lease: Lease | None = None
    holder: Holder | None = None
    free: Free | None = None
    seen: tuple[Version | Absent | None, float, float] = (None, 0.0, -math.inf)
    dated: tuple[Version, Interval | None] | None = None
    looked: float = -math.inf
    streak: float | None = None
    ended: float | None = None

    def first_seen(self, version: Version | Absent, arrived: float) -> float:
        """Return when the answer arrived that first showed ``version``."""
        # One value, read and written at once. Interleaving prevented: another thread stores the
        # version, this one finds it there and takes the moment that belongs to the one before,
        # and a lease that was renewed just now seems as old as that.
        seen = self.seen
        if version != seen[0]:
            seen = self.seen = version, arrived, self.looked
        self.looked = arrived
        return seen[1]


class Runtime:
    """One binding. Use :func:`configure`; build one yourself to have several in a process.

    Args:
        backend: where the records are; a URL or an instance.
        app, env: the identity of the application, part of every lease's name.
        policy: the timings of all leases.
        clock: time, threads and chance.
        note: free text for people, written into the records; 500 characters at most.
        listeners: called with each event.

    Raises:
        ConfigurationError: an argument cannot work, or the policy not with this backend.
    """

    implied = False
    """Whether nobody has chosen the storage."""

    def __init__(
        self,
        backend: LeaseBackend | str,
        *,
        app: str = DEFAULT_APP,
        env: str = DEFAULT_ENV,
        policy: LeasePolicy | None = None,
        clock: Clock | None = None,
        note: str = "",
        listeners: Iterable[Listener] = (),
    ) -> None:
        self.app = names.part("app", app)
        self.env = names.part("env", env)
        self.policy = _checked("policy", LeasePolicy() if policy is None else policy, LeasePolicy)
        self.clock = _checked("clock", SystemClock() if clock is None else clock, Clock)
        if isinstance(backend, os.PathLike):
            raise ConfigurationError(
                f"backend {os.fspath(backend)!r} is a path: write sqlite:///absolute/path, or "
                "SqliteLease(path)"
            )
        self.backend = connect(backend) if isinstance(backend, str) else backend
        _checked("backend", self.backend, LeaseBackend)
        if len(_checked("note", note, str)) > _MAX_NOTE:
            raise ConfigurationError(f"note is a text of at most {_MAX_NOTE} characters")
        if not isinstance(listeners, Iterable):
            raise ConfigurationError(
                f"listeners is a list of functions, not {listeners!r}: write listeners=[fn]"
            )
        self.listeners = tuple(listeners)
        for listener in self.listeners:
            if not callable(listener):
                raise ConfigurationError(f"a listener is a function of an event, not {listener!r}")
        self.terms = Terms.of(self.policy, self.backend.clock_skew, note)
        self.requests = Requests(self.backend, self.clock)
        self._host = socket.gethostname().replace(":", "-") or "localhost"
        self.lock = threading.Lock()
        self._known: OrderedDict[str, Known] = OrderedDict()
        fork.reset_in_child(self)

    def identity(self, name: str) -> Identity:
        return Identity(self.app, self.env, name)

    def owner(self) -> str:
        """Return a new owner identity: of this host and process, and of one campaign only."""
        return f"{self._host}:{os.getpid()}:{nonce()}"

    def known(self, key: str) -> Known:
        """Return what this process knows of ``key``. Remembers a bounded number of names."""
        fork.settle()
        with self.lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = Known()
            self._known.move_to_end(key)
            if len(self._known) > _REMEMBERED:
                self._forget_one()
            return known

    def _forget_one(self) -> None:
        for key, known in self._known.items():
            if known.lease is None and not known.line:
                del self._known[key]
                return

    def tell(self, event: Event) -> None:
        """Log ``event`` and call the listeners; what they raise is logged and goes no further."""
        if log.isEnabledFor(event.level):
            log.log(event.level, "%s", event.message, extra={"tako_event": event})
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                log.exception("listener %r failed on %r", listener, event)

    def after_fork_in_child(self) -> None:
        """Forget all: what the parent holds, waits for and has seen is the parent's."""
        self.lock = threading.Lock()
        self._known = OrderedDict()

    def __repr__(self) -> str:
        return f"<Runtime {self.app}/{self.env} on {self.backend.describe()}>"


def nonce() -> str:
    """Return 64 bits from the operating system: equal in no two processes, forked or not."""
    return os.urandom(8).hex()


def _checked(what: str, value: T, kind: type) -> T:
    if not isinstance(value, kind):
        raise ConfigurationError(f"{what} is a {kind.__name__}, not {value!r}")
    return value


# --- The binding of this process -------------------------------------------------------


class _Guard:
    """Of what this module holds for the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        fork.reset_in_child(self)

    def locked(self) -> threading.Lock:
        fork.settle()
        return self._lock

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()


_guard: Final = _Guard()
_bound: Runtime | None = None
_default: Callable[[], Runtime] | None = None
_by_default = False  # whether _default made _bound
_finders: tuple[Callable[[], Runtime | None], ...] = ()
_waits: tuple[Callable[[], float | None], ...] = ()


def configure(
    *,
    app: str | None = None,
    env: str | None = None,
    backend: LeaseBackend | str | None = None,
    policy: LeasePolicy | None = None,
    clock: Clock | None = None,
    note: str = "",
    listeners: Iterable[Listener] = (),
) -> Runtime:
    """Bind this process to an application and a storage; replaces an earlier binding.

    What is not given comes from the environment: ``TAKO_APP``, ``TAKO_ENV``, ``TAKO_BACKEND``
    (a URL), ``TAKO_PROJECT`` (the bucket ``<project>-tako``). Holds of an earlier binding go on
    under that one.

    Args:
        app: the application, part of every lease's name. Default ``app``.
        env: the environment, likewise. Default ``dev``.
        backend: ``memory:``, ``sqlite:///path``, a URL of a registered scheme, or a
            ``LeaseBackend``.
            Default a SQLite file in the user's state directory, which excludes all processes
            of this user on this machine.
        policy, clock, note, listeners: as for :class:`Runtime`.

    Raises:
        ConfigurationError: a value cannot work; or no backend is named on a platform that
            runs several machines, where the default would exclude nobody.
    """
    global _bound, _by_default
    runtime = resolve(
        os.environ,
        app=app,
        env=env,
        backend=backend,
        policy=policy,
        clock=clock,
        note=note,
        listeners=listeners,
    )
    with _guard.locked():
        _bound, _by_default = runtime, False
    return announced(runtime)


def current() -> Runtime:
    """Return the binding of this context, else of this process; made if there is none yet."""
    global _bound, _by_default
    for find in _finders:
        found = find()
        if found is not None:
            return found
    if _bound is None:
        with _guard.locked():
            if _bound is None:
                _by_default = _default is not None
                _bound = announced(resolve(os.environ) if _default is None else _default())
    return _bound


def by_default(make: Callable[[], Runtime] | None) -> None:
    """Have ``make`` bind this process at the first use, unless ``configure`` has; None: undo.

    For frameworks that have settings of their own. What an earlier one has made is dropped.
    """
    global _bound, _default, _by_default
    with _guard.locked():
        _default = make
        if _by_default:
            _bound, _by_default = None, False


def in_context(find: Callable[[], Runtime | None]) -> None:
    """Have ``find`` say the binding of the context that asks, if that has one of its own.

    For frameworks that have several applications in a process. Asked at each use, before the
    binding of the process.
    """
    global _finders
    with _guard.locked():
        if find not in _finders:
            _finders = (*_finders, find)


def wait_in_context(find: Callable[[], float | None]) -> None:
    """Have ``find`` say how many seconds to wait where neither the caller nor the policy does.

    For frameworks in whose contexts nobody is to wait for ever. It returns None outside of them.
    """
    global _waits
    with _guard.locked():
        if find not in _waits:
            _waits = (*_waits, find)


def longest_wait(policy: LeasePolicy) -> float | None:
    """Return how many seconds a campaign waits that was given no timeout; None: for ever."""
    if policy.wait is not None:
        return policy.wait
    return next((wait for find in _waits if (wait := find()) is not None), None)


@contextmanager
def rebound(runtime: Runtime | None) -> Iterator[Runtime | None]:
    """Bind this process to ``runtime`` for a ``with`` block; with None, resolve anew in it."""
    global _bound, _by_default
    before = _bound, _by_default
    _bound, _by_default = runtime, False
    try:
        yield runtime
    finally:
        _bound, _by_default = before


def resolve(
    environ: Mapping[str, str],
    *,
    app: str | None = None,
    env: str | None = None,
    backend: LeaseBackend | str | None = None,
    policy: LeasePolicy | None = None,
    clock: Clock | None = None,
    note: str = "",
    listeners: Iterable[Listener] = (),
) -> Runtime:
    """Return what :func:`configure` would bind to; bind nothing and say nothing."""
    chosen = backend if backend is not None else _backend_of(environ)
    runtime = Runtime(
        chosen if chosen is not None else _default_url(environ),
        app=app if app is not None else _part_of(environ, "TAKO_APP", DEFAULT_APP),
        env=env if env is not None else _part_of(environ, "TAKO_ENV", DEFAULT_ENV),
        policy=policy,
        clock=clock,
        note=note,
        listeners=listeners,
    )
    runtime.implied = chosen is None
    return runtime


def announced(runtime: Runtime) -> Runtime:
    """Return a binding that is to be used; say so if nobody has chosen its storage."""
    if runtime.implied:
        log.warning(
            "no backend is configured: leases of %s/%s are kept in %s and exclude the processes "
            "of this user on this machine only; set TAKO_BACKEND or call tako_sync.configure()",
            runtime.app,
            runtime.env,
            runtime.backend.describe(),
        )
    return runtime


def _part_of(environ: Mapping[str, str], variable: str, default: str) -> str:
    return names.part(variable, environ.get(variable) or default)


def _backend_of(environ: Mapping[str, str]) -> str | None:
    if url := environ.get("TAKO_BACKEND"):
        return url
    if project := environ.get("TAKO_PROJECT"):
        return f"gs://{names.part('TAKO_PROJECT', project)}-tako"
    return None


def _default_url(environ: Mapping[str, str]) -> str:
    for variable, platform in _SEVERAL_MACHINES.items():
        if environ.get(variable):
            raise ConfigurationError(
                f"no backend is configured, and this is {platform} ({variable} is set): a file "
                "on one machine would exclude nobody on the others. Name a storage that all of "
                "them share: set TAKO_BACKEND=gs://<bucket>, or call "
                'tako_sync.configure(backend="gs://<bucket>")'
            )
    base = environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_STATE_HOME")
    if base and not os.path.isabs(base):
        base = None  # as the XDG specification has it: it would mean another folder in each process
    folder = Path(base) if base else Path.home() / ".local" / "state"
    return f"sqlite:///{(folder / 'tako_sync' / 'leases.sqlite3').absolute().as_posix()}"
