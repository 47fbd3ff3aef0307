"""The real thing in threads: orders of events that the model's search, or reading, turned up."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from kit import Host, World
from tako_sync.ctx import Ctx
from tako_sync.errors import BackendDeniedError, BackendUnavailableError, LeaseLostError
from tako_sync.events import ReleaseUnconfirmed
from tako_sync.runtime import Known
from tako_sync.testing.faults import applied_then, fail


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503")


def test_waiters_do_not_spin_while_a_lost_body_of_their_own_process_goes_on() -> None:
    world = World()
    host, other = world.host("a"), world.host("b")

    def stubborn(ctx: Ctx) -> None:
        world.clock.wait(host_end, None)

    from tako_sync.flag import Flag

    host_end = Flag()
    holder = world.start(lambda: host.lock().do(stubborn), "holder")
    shown = other.lock().holder()
    other.lock().break_(shown)
    world.advance(11.0)
    waiters = [world.start(lambda: host.lock().do(lambda ctx: None), f"w{i}") for i in range(2)]
    before = host.storage.count("read")
    world.advance(10.0)
    assert host.storage.count("read") - before <= 10
    host_end.set()
    with pytest.raises(LeaseLostError):
        holder.result()
    world.advance(5.0)
    for waiter in waiters:
        waiter.result()


def test_a_local_hold_freed_between_the_poll_and_the_sleep_wakes_the_waiter() -> None:
    """Interleaving: the poll sees the local hold, the hold is freed, then the waiter sleeps."""
    from tako_sync import campaign
    from tako_sync.flag import Flag

    world = World()
    host = world.host("a")
    ended = Flag()
    holder = world.start(lambda: host.lock().do(lambda ctx: ctx.wait(1000) or None), "holder")
    gate, inside = Flag(), Flag()
    original = campaign.Campaign._sleep

    def sleep(self: Any, seconds: float, *args: Any) -> None:
        if seconds > 20 and not inside.is_set() and seconds < 1e9:
            inside.set()
            gate.wait(10)
        original(self, seconds, *args)

    patch = pytest.MonkeyPatch()
    patch.setattr(campaign.Campaign, "_sleep", sleep)
    try:
        from kit import Running

        waiter = Running(lambda: host.lock().do(lambda ctx: 1), "waiter")
        assert inside.wait(10)
        parent_end = host.runtime.known(host.runtime.identity("reindex").key).lease
        assert parent_end is not None
        parent_end.lose(parent_end.loss.reason if parent_end.loss else REASON)
        gate.set()
        world.clock.wait_for_waiters(1)
        world.advance(4.0)
    finally:
        patch.undo()
