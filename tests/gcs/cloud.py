"""Simulated hosts over real HTTP: a ``World`` whose storage is our GCS server, on a fake clock.

Requests take no time of that clock, and the server's time of day is the clock's. What hangs or
drips needs real time, and is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from gcs import kit
from gcs.server import GCSServer
from kit import Host, World
from tako_sync.abc import LeaseBackend
from tako_sync.backends.gcs import GCSLease
from tako_sync.ctx import Ctx
from tako_sync.flag import Flag
from tako_sync.policy import LeasePolicy

KEY: Final = "run-shop-test-reindex"
NAME: Final = f"leases/{KEY}"
TTL, MARGIN, POLL = 30.0, 3.0, 2.5
WIDTHS: Final = 4.0
"""Seconds: of the two intervals between which the storage's age of a record lies."""
GO: Final = b'{"owner":"go-host:1","expires":"2026-01-01T00:00:30Z"}'


class Work:
    """A body that returns 42: after some seconds, or when told to."""

    def __init__(self, cloud: Cloud, seconds: float | None = None) -> None:
        self.finish = Flag()
        self.began: list[float] = []
        self.ended: list[float] = []
        self.ctxs: list[Ctx] = []
        self._cloud = cloud
        self._seconds = seconds

    def __call__(self, ctx: Ctx) -> int:
        clock = self._cloud.clock
        with self._cloud.meter.running(ctx):
            self.ctxs.append(ctx)
            self.began.append(clock.monotonic())
            clock.wait(self.finish, self._seconds)
            self.ended.append(clock.monotonic())
        return 42

    @property
    def cancelled(self) -> bool:
        return self.ctxs[-1].cancelled


class Cloud(World):
    """A bucket, and hosts that have a client each.

    Attributes:
        server: with its faults and its log; its options are the bucket's behaviour.
    """

    def __init__(self, policy: LeasePolicy | None = None) -> None:
        super().__init__(policy)
        self.server = GCSServer(
            wall=lambda: self.clock.wall().timestamp(), monotonic=self.clock.monotonic
        )
        self._client = kit.new_client(self.server.url)
        self._ways: list[GCSLease] = []
        self.store = self.way_to_the_store()

    def way_to_the_store(self) -> LeaseBackend:
        way = GCSLease(self.server.bucket, client=self._client)
        self._ways.append(way)
        return way

    def close(self) -> None:
        for way in self._ways:
            way.close()
        self._client.close()
        self.server.close()

    def document(self) -> Mapping[str, Any]:
        """Return what the record says."""
        return self.server.requests("write", NAME)[-1].document

    def body(self) -> bytes:
        stored = self.server.object(NAME)
        return b"" if stored is None else stored.body

    def dies(self, host: Host) -> None:
        """Cut a host off from the storage, for good."""
        host.storage.always("*", _gone)


def _gone(*_: object) -> object:
    from tako_sync.errors import BackendUnavailableError

    raise BackendUnavailableError("this host is cut off")


@contextmanager
def cloud(policy: LeasePolicy | None = None) -> Iterator[Cloud]:
    """Give a cloud; at its end nothing may overlap, and nothing may go on."""
    made = Cloud(policy)
    try:
        yield made
        made.server.faults.release()
        for host in made.hosts:
            host.storage.heal()
            host.storage.release_all()
        made.advance(2 * TTL)
        made.meter.check()
        assert not made.clock.waiters, "something goes on after the end"
    finally:
        made.close()
