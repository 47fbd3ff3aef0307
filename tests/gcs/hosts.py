"""Simulated hosts over real HTTP: their clocks, and the server's, are the test's; no time passes.

Each request goes through the real client, a socket and our own server, in a thread of the fake
clock's. What stands in a fault of the server does so until the test lets it go: the clock takes
such a thread to be blocked elsewhere, and moves on without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage  # type: ignore[import-untyped]

from gcs.actions import Action, Ending, Exchange, Proceed
from gcs.faults import Fault
from gcs.log import Request
from gcs.server import GCSServer
from kit import Running
from tako_sync.abc import Clock
from tako_sync.backends.gcs import GCSLease
from tako_sync.ctx import Ctx
from tako_sync.events import Event
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.record import Identity, Record, State
from tako_sync.runtime import Runtime
from tako_sync.testing.clock import FakeClock
from tako_sync.testing.overlap import OverlapMeter

T = TypeVar("T")

KEY: Final = "run-shop-test-reindex"
NAME: Final = f"leases/{KEY}"
TTL: Final = 30.0
MARGIN: Final = 3.0
ASSURED: Final = TTL - MARGIN
POLL: Final = 2.5
"""Seconds of the longest pause between two polls."""
WIDTHS: Final = 4.0
"""Of the two intervals in which GCS tells its time: ``Date``'s three, ``Last-Modified``'s one."""
_PATIENCE: Final = 20.0
_SOON: Final = 0.05
"""Real seconds that a thread has to stand still to be taken for one whose request hangs."""


class _Clock(FakeClock):
    """Waits for a request as long as it takes, and not at all for one that stands in a fault.

    Whether a thread stands still is asked of the system, where that tells (Linux): requests run
    for milliseconds, and to walk the frames of a thread that runs crashes Python 3.11 now and then.
    """

    server: GCSServer

    def __init__(self) -> None:
        super().__init__()
        self._ran: WeakKeyDictionary[threading.Thread, tuple[str, float, int]] = WeakKeyDictionary()

    @property
    def _patience(self) -> float:
        held = sum(tuple(self.server.faults._held.values()))
        return _SOON if held > len(self._elsewhere) else _PATIENCE

    @_patience.setter
    def _patience(self, seconds: float) -> None:
        """The base class has one for all."""

    def _look_at_the_running(self, elapsed: float) -> None:
        if not _SYSTEM_TELLS:
            super()._look_at_the_running(elapsed)
            return
        with self._lock:
            assert elapsed < _PATIENCE, f"they neither wait nor end: {[*self._running]}"
            for thread, steps in list(self._running.items()):
                if steps.inside or (steps.ended and thread.is_alive()):
                    continue
                if not thread.is_alive():
                    del self._running[thread]
                else:
                    stood = self._stood(thread)
                    if stood >= self._patience:
                        self._elsewhere[thread] = self._running.pop(thread)
                    elif self._ready and stood >= self._patience / 10:
                        self._wake(self._ready.popleft())

    def _count_those_back_from_elsewhere(self) -> None:
        if not _SYSTEM_TELLS:
            super()._count_those_back_from_elsewhere()
            return
        with self._lock:
            for thread in list(self._elsewhere):
                if not thread.is_alive():
                    del self._elsewhere[thread]
                elif _run_time(thread) != self._ran[thread][0]:
                    self._running[thread] = self._elsewhere.pop(thread)

    def _stood(self, thread: threading.Thread) -> float:
        """Return for how many real seconds it has not run; 0 until several looks agree."""
        now, ran = time.monotonic(), _run_time(thread)
        before, since, looks = self._ran.get(thread, ("", now, 0))
        if ran != before:
            since, looks = now, 0
        self._ran[thread] = ran, since, looks + 1
        return now - since if looks >= 5 else 0.0


def _run_time(thread: threading.Thread) -> str:
    """Return what the system says of how long it has run, and waited for a processor."""
    try:
        return Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
    except OSError:  # it has ended
        return "ended"


_SYSTEM_TELLS: Final = _run_time(threading.current_thread()) != "ended"


class GCSHost:
    """One simulated host: a client of its own, a binding, and what it was told.

    Attributes:
        name: sent with each request, so that the server's log and faults know whose it is.
    """

    def __init__(
        self, name: str, world: GCSWorld, clock: Clock, policy: LeasePolicy, credentials: Any
    ) -> None:
        self.name = name
        self.clock = clock
        self.events: list[Event] = []
        self._server = world.server
        client = storage.Client(
            project="test",
            credentials=credentials or AnonymousCredentials(),  # type: ignore[no-untyped-call]
            client_options={"api_endpoint": world.server.url},
            extra_headers={"x-host": name},
        )
        self.backend = GCSLease(world.server.bucket, client=client)
        self.runtime = Runtime(
            self.backend,
            app="shop",
            env="test",
            clock=clock,
            policy=policy,
            listeners=[self.events.append],
        )

    def lock(self, name: str = "reindex") -> Lock:
        return Lock(name).bound_to(self.runtime)

    def sent(self, request: Request) -> bool:
        return request.headers.get("x-host") == self.name

    def requests(self, since: int = 0) -> list[Request]:
        """Return the requests of this host that have reached the server, in order."""
        return [request for request in self._server.requests() if self.sent(request)][since:]

    def kinds(self, since: int = 0) -> list[str]:
        return [request.kind for request in self.requests(since)]

    def writes(self) -> list[Request]:
        return [request for request in self.requests() if request.kind == "write"]

    def fails(
        self,
        on: str,
        *actions: Action,
        times: int | None = 1,
        when: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        """Have the server do these, one after the other, to this host's requests of a kind."""
        for action in actions:
            self._server.faults.add(
                Fault(on, action, times=times, when=lambda r: self.sent(r) and when(r))
            )

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class GCSWorld:
    """A server, a time line, and any number of hosts.

    Args:
        policy: of the hosts that are given none of their own.
        options: of the server.
    """

    def __init__(self, policy: LeasePolicy | None = None, **options: Any) -> None:
        self.clock = _Clock()
        midnight = self.clock.wall().timestamp() - self.clock.monotonic()
        # Not the clock's own time of day: a host's may be set, and the storage's stays right.
        self.server = GCSServer(
            wall=lambda: midnight + self.clock.monotonic(),
            monotonic=self.clock.monotonic,
            **options,
        )
        self.clock.server = self.server
        self.policy = policy or LeasePolicy()
        self.meter = OverlapMeter()
        self.hosts: list[GCSHost] = []

    def host(
        self,
        name: str = "a",
        *,
        offset: float = 0.0,
        rate: float = 1.0,
        wall_offset: float = 0.0,
        policy: LeasePolicy | None = None,
        credentials: Any = None,
    ) -> GCSHost:
        """Add a host; its clocks differ as in ``FakeClock.view``."""
        clock: Clock = self.clock
        if (offset, rate, wall_offset) != (0.0, 1.0, 0.0):
            clock = self.clock.view(offset, rate, wall_offset)
        host = GCSHost(name, self, clock, policy or self.policy, credentials)
        self.hosts.append(host)
        return host

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def start(self, fn: Callable[[], T], name: str = "worker") -> Running[T]:
        """Run ``fn`` in a thread, and wait until it waits on the clock or has ended."""
        running = Running(fn, name)
        running.start_on(self.clock)
        return running

    def run(self, fn: Callable[[], T]) -> T:
        """Run what needs no time to pass."""
        return self.start(fn).result()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def until(self, condition: Callable[[], bool]) -> None:
        """Let threads go on, without time passing, until something is true."""
        give_up = time.monotonic() + _PATIENCE
        while not condition():
            assert time.monotonic() < give_up, self.server.log
            self.clock.advance(0)
            time.sleep(0.002)

    def let_go(self) -> None:
        """Clear the faults, and have all that stands in one come to its end."""
        self.server.faults.release()
        self.until(self._quiet)
        self.clock.advance(0)

    def _quiet(self) -> bool:
        return not self.clock._elsewhere and not self.server.count(
            when=lambda request: request.outcome == "pending"
        )

    @property
    def body(self) -> bytes:
        """What is stored for the lease."""
        stored = self.server.object(NAME)
        return b"" if stored is None else stored.body

    @property
    def stands(self) -> tuple[bytes, int]:
        """What is stored, and its generation: equal if nothing was written in between."""
        stored = self.server.object(NAME)
        return (b"", 0) if stored is None else (stored.body, stored.generation)

    def put(self, body: bytes, name: str = NAME) -> int:
        """Store what someone else wrote; return its generation."""
        return self.server.put(name, body).generation

    def finish(self) -> None:
        """Let all come to its end, and look whether it has."""
        try:
            self.let_go()
            self.advance(2 * TTL)
            self.let_go()
            self.meter.check()
            assert not self.clock.waiters, f"something goes on: {self.clock.waiters}"
        finally:
            self.close()

    def close(self) -> None:
        for host in self.hosts:
            host.backend.close()
        self.server.close()


@contextmanager
def a_world(policy: LeasePolicy | None = None, **options: Any) -> Iterator[GCSWorld]:
    world = GCSWorld(policy, **options)
    try:
        yield world
        print(world.server)  # noqa: T201 - shown if the test fails
    except BaseException:
        print(world.server)  # noqa: T201
        world.close()
        raise
    world.finish()


class Work:
    """A body that returns 42, or raises: after some seconds, when told to, or with its ctx.

    Args:
        seconds: how long it lasts; None is until :meth:`end`.
        listens: whether it ends as soon as its ctx is cancelled.
        error: what it raises at its end.
    """

    def __init__(
        self,
        world: GCSWorld,
        seconds: float | None = None,
        *,
        listens: bool = False,
        error: BaseException | None = None,
    ) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []
        self._world = world
        self._seconds = seconds
        self._listens = listens
        self._error = error
        self._finish = Flag()
        self._ctx: Ctx | None = None

    def __call__(self, ctx: Ctx) -> int:
        with self._world.meter.running(ctx):
            self._ctx = ctx
            self.began.append(self._world.now)
            if self._listens:
                ctx.wait(600.0 if self._seconds is None else self._seconds)
            else:
                self._world.clock.wait(self._finish, self._seconds)
            self.ended.append(self._world.now)
        if self._error is not None:
            raise self._error
        return 42

    def end(self) -> None:
        self._finish.set()
        self._world.advance(0)

    @property
    def ctx(self) -> Ctx:
        assert self._ctx is not None, "the body has not begun"
        return self._ctx


def state(request: Request) -> str:
    return str(request.document.get("state", ""))


def is_release(request: Request) -> bool:
    return state(request) == "released"


def is_held(request: Request) -> bool:
    return state(request) == "held"


def states(requests: Sequence[Request]) -> list[str]:
    """Return, of each request, what it writes, or its kind."""
    return [state(request) or request.kind for request in requests]


def record(owner: str = "elsewhere:7:theirs", fence: int = 7, **changes: Any) -> bytes:
    """Return a record of somebody else."""
    made = Record(
        identity=Identity("shop", "test", "reindex"),
        owner=owner,
        write=f"a write of {owner}",
        state=State.HELD,
        ttl=TTL,
        margin=MARGIN,
        fence=fence,
        acquired="2026-01-01T00:00:00Z",
        expires="2026-01-01T00:00:30Z",
    )
    return made.but(**changes).encode()


@dataclass(frozen=True)
class Meanwhile:
    """An action: someone else does something just before the request is carried out."""

    do: Callable[[], object]

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        self.do()
        return proceed()
