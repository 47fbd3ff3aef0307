"""SystemClock: real time, whatever freezegun says, and waits that end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest
from freezegun import freeze_time

from tako_sync import clock as module
from tako_sync.clock import SystemClock
from tako_sync.flag import Flag

NEVER = 30.0


def at_depth(depth: int, function: Callable[[], float]) -> float:
    return function() if depth == 0 else at_depth(depth - 1, function)


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(NEVER)
    assert not thread.is_alive()


def passes(clock: SystemClock, depth: int) -> None:
    """Time goes on, by about what has really passed."""
    begun = at_depth(depth, clock.monotonic)
    Flag().wait(0.02)
    assert 0.015 <= at_depth(depth, clock.monotonic) - begun < 20


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 10, 40])
@pytest.mark.parametrize("tick", [False, True])
def test_freezegun_does_not_move_it_in_any_thread_at_any_depth(depth: int, tick: bool) -> None:
    clock, before, seen = SystemClock(), SystemClock().monotonic(), []
    with freeze_time("1999-12-31", tick=tick) as frozen:
        passes(clock, depth)
        in_a_thread(lambda: (passes(clock, depth), seen.append("same")))
        in_a_thread(lambda: (passes(SystemClock(), depth), seen.append("made there")))
        frozen.tick(timedelta(days=365))
        assert at_depth(depth, clock.monotonic) - before < NEVER
    assert seen == ["same", "made there"]


def test_freezegun_does_not_move_the_time_of_day() -> None:
    clock = SystemClock()
    before = clock.wall()
    with freeze_time("1999-12-31"):
        during = clock.wall()
        assert SystemClock().wall() >= during
    assert before <= during <= clock.wall()


def test_the_time_of_day_is_in_utc_and_right() -> None:
    before = datetime.now(timezone.utc)
    wall = SystemClock().wall()
    assert wall.utcoffset() == timedelta(0)
    assert (
        before - timedelta(seconds=1) <= wall <= datetime.now(timezone.utc) + timedelta(seconds=1)
    )


def test_it_never_steps_back() -> None:
    clock = SystemClock()
    readings = [clock.monotonic() for _ in range(1000)]
    assert readings == sorted(readings)


@pytest.mark.parametrize("kind", [Flag, threading.Event])
def test_a_wait_ends_with_its_timeout(kind: type[threading.Event]) -> None:
    begun = time.perf_counter()
    assert SystemClock().wait(kind(), 0.03) is False
    assert 0.025 <= time.perf_counter() - begun < 10


@pytest.mark.parametrize("timeout", [0, -1])
@pytest.mark.parametrize("kind", [Flag, threading.Event])
def test_a_wait_without_time_returns_at_once(kind: type[threading.Event], timeout: float) -> None:
    assert SystemClock().wait(kind(), timeout) is False


@pytest.mark.parametrize("timeout", [None, NEVER])
@pytest.mark.parametrize("kind", [Flag, threading.Event])
def test_a_wait_ends_when_its_event_is_set(
    kind: type[threading.Event], timeout: float | None
) -> None:
    clock, event, answers = SystemClock(), kind(), []
    task = clock.spawn(lambda: answers.append(clock.wait(event, timeout)), "waiter")
    event.set()
    task.join(NEVER)
    assert answers == [True]


@pytest.mark.parametrize("timeout", [None, 0.1])
def test_a_wait_longer_than_a_slice_goes_on(
    timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", 0.01)
    clock, event = SystemClock(), Flag()
    begun = time.perf_counter()
    clock.spawn(lambda: (Flag().wait(0.05), timeout is None and event.set()), "later")
    assert clock.wait(event, timeout) is (timeout is None)
    assert time.perf_counter() - begun >= 0.03  # several slices


def test_a_wait_under_freezegun_ends_in_real_time() -> None:
    with freeze_time("1999-12-31"):
        in_a_thread(lambda: SystemClock().wait(Flag(), 0.02))
        assert SystemClock().wait(Flag(), 0.02) is False


def test_chance_is_in_range_and_differs() -> None:
    clock = SystemClock()
    draws = {clock.random() for _ in range(100)}
    assert len(draws) > 90
    assert all(0 <= draw < 1 for draw in draws)


def test_a_spawned_thread_is_a_daemon_with_a_name() -> None:
    seen: list[tuple[str, bool]] = []

    def target() -> None:
        me = threading.current_thread()
        seen.append((me.name, me.daemon))

    task = SystemClock().spawn(target, "errand")
    task.join(NEVER)
    assert not task.is_alive()
    assert seen == [("errand", True)]


@pytest.mark.parametrize(
    ("boottime", "platform", "expected"),
    [(7, "linux", 7), (None, "darwin", 1), (None, "win32", None)],
)
def test_the_source_goes_on_in_suspension_where_the_system_has_such_a_one(
    boottime: int | None,
    platform: str,
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tako_sync.clock.sys.platform", platform)
    monkeypatch.setattr(time, "CLOCK_MONOTONIC", 1, raising=False)
    if boottime is None:
        monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
        monkeypatch.delattr(time, "CLOCK_REALTIME", raising=False)
    else:
        monkeypatch.setattr(time, "CLOCK_BOOTTIME", boottime, raising=False)
    assert module._monotonic_source()[1] == expected
    if expected is None:
        clock = SystemClock()
        assert abs(clock.monotonic() - time.monotonic()) < NEVER
        assert abs(clock.wall().timestamp() - time.time()) < NEVER
