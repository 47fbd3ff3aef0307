"""Simulated hosts for tests: each with its own clock and binding, all on one storage.

Import it as ``from kit import World`` (pytest's ``pythonpath`` names this folder).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tako_sync.abc import Clock, LeaseBackend
from tako_sync.backends.memory import MemoryLease
from tako_sync.events import Event
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime
from tako_sync.testing.clock import FakeClock
from tako_sync.testing.faults import FaultyBackend
from tako_sync.testing.overlap import OverlapMeter

T = TypeVar("T")


class Running(Generic[T]):
    """A function in a thread of its own, with its outcome."""

    thread: threading.Thread

    def __init__(self, fn: Callable[[], T], name: str) -> None:
        self._fn = fn
        self._value: T | None = None
        self.error: BaseException | None = None
        self._name = name

    def start_on(self, clock: FakeClock) -> None:
        """Start as a thread that the clock knows from its first step, and let all settle."""
        # A thread of our own is known from its first wait on only; until then an advance would
        # leave it behind.
        clock.spawn(self._enter, self._name)
        clock.advance(0)

    def _enter(self) -> None:
        self.thread = threading.current_thread()
        self._run()

    def _run(self) -> None:
        try:
            self._value = self._fn()
        except BaseException as error:  # noqa: BLE001 - the test raises or inspects it
            self.error = error

    @property
    def done(self) -> bool:
        return not self.thread.is_alive()

    def result(self, timeout: float = 20.0) -> T:
        """Return the value, or raise the error; fails if it has not ended in real time."""
        self.thread.join(timeout)
        assert self.done, f"{self.thread.name} has not ended"
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]


class Host:
    """One simulated host: a clock, a faulty way to the storage, a binding, and its events."""

    def __init__(
        self, name: str, store: LeaseBackend, clock: Clock, policy: LeasePolicy, prompt: bool
    ) -> None:
        self.name = name
        self.clock = clock
        self.events: list[Event] = []
        self.storage = FaultyBackend(store, clock, prompt=prompt)
        self.runtime = Runtime(
            self.storage,
            app="shop",
            env="test",
            clock=clock,
            policy=policy,
            listeners=[self.events.append],
        )

    def lock(self, name: str = "reindex") -> Lock:
        return Lock(name).bound_to(self.runtime)

    def requests(self) -> list[str]:
        """Return the operations that reached the storage so far, in order."""
        return [call.op for call in self.storage.calls]

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class World:
    """A storage, a time line, and any number of hosts."""

    def __init__(self, policy: LeasePolicy | None = None) -> None:
        self.clock = FakeClock()
        self.store = MemoryLease(self.clock)
        self.policy = policy or LeasePolicy()
        self.meter = OverlapMeter()
        self.hosts: list[Host] = []

    def host(
        self,
        name: str = "a",
        *,
        offset: float = 0.0,
        rate: float = 1.0,
        wall_offset: float = 0.0,
        policy: LeasePolicy | None = None,
        prompt: bool = True,
    ) -> Host:
        """Add a host.

        Args:
            offset, rate, wall_offset: how its clocks differ, as in ``FakeClock.view``.
            policy: its own, in place of the world's.
            prompt: False runs each request in a thread of its own, as for a real storage:
                needed where a request hangs or outlasts its timeout.
        """
        clock: Clock = self.clock
        if (offset, rate, wall_offset) != (0.0, 1.0, 0.0):
            clock = self.clock.view(offset, rate, wall_offset)
        host = Host(name, self.store, clock, policy or self.policy, prompt)
        self.hosts.append(host)
        return host

    def start(self, fn: Callable[[], T], name: str = "worker") -> Running[T]:
        """Run ``fn`` in a thread, and wait until it waits on the clock or has ended."""
        running = Running(fn, name)
        running.start_on(self.clock)
        return running

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
