"""Several beats, one of which sends; and what a beat knows of what the one before it has sent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import PersistentScheduler, Scheduler

import tako_sync
from contrib.celery.programs import Part, Shop
from contrib.program import PATIENCE
from tako_sync.contrib.celery.beat import DEFAULT_LEASE, LeasedMixin, LeasedScheduler
from tako_sync.contrib.celery.sent import MOST, decode, encode, remembered
from tako_sync.errors import UsageError
from tako_sync.lock import Lock
from tako_sync.record import MAX_MEMO

SENDS = "beat sends, under fence"
STANDS_BY = "beat stands by: lease 'celery-beat' is held by"
NOON = datetime(2026, 12, 3, 12, tzinfo=timezone.utc)

# --- What was sent, as text


def test_what_was_sent_is_remembered_to_the_microsecond() -> None:
    times = {"nightly": NOON, "näkki": NOON + timedelta(microseconds=1)}
    memo = encode(times)
    assert {name: remembered(memo, name, NOON) for name in times} == times
    assert remembered(memo, "unknown", NOON) is None


def test_a_thousand_entries_fit_and_those_that_come_seldom_are_kept() -> None:
    memo = encode({f"entry {number}": NOON + timedelta(number) for number in range(1_000)})
    assert len(memo) <= MAX_MEMO and len(decode(memo)) == MOST
    assert remembered(memo, "entry 0", NOON) == NOON and remembered(memo, "entry 999", NOON) is None


@pytest.mark.parametrize(
    "memo", ["", "{}", "[]", "null", "{", '{"sent": 3}', '{"sent": {"a": "x"}}', '{"sent": null}']
)
def test_what_cannot_be_read_is_nothing_sent(memo: str) -> None:
    assert remembered(memo, "nightly", NOON) is None


def test_a_naive_time_comes_back_as_it_was_beside_those_in_zones() -> None:
    berlin = NOON.astimezone(ZoneInfo("Europe/Berlin"))
    naive = datetime(2026, 7, 1, 3)  # noqa: DTZ001
    memo = encode({"berlin": berlin, "naive": naive})
    assert remembered(memo, "naive", naive) == naive
    again = remembered(memo, "berlin", berlin)
    assert again == berlin and again.tzinfo is berlin.tzinfo
    assert remembered(memo, "unknown", naive) is None


def test_a_time_out_of_range_is_nothing_sent() -> None:
    (short,) = decode(encode({"nightly": NOON}))
    assert remembered(f'{{"sent": {{"{short}": 1e30}}}}', "nightly", NOON) is None


# --- A scheduler, without a process


class Sent(LeasedScheduler):
    """Keeps what it would send."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.names: list[str] = []
        super().__init__(*args, **kwargs)

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> None:
        self.names.append(entry.name)

    producer: Any = None  # none is asked for


def scheduler(schedule: dict[str, float]) -> Sent:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {
        name: {"task": name, "schedule": every} for name, every in schedule.items()
    }
    return Sent(app=app)


def sends(beat: Sent) -> list[str]:
    """Tick until there is nothing more to send now."""
    beat.names.clear()
    while beat.tick() == 0:
        pass
    return beat.names


@pytest.fixture
def beats(in_memory: None) -> Iterator[list[Sent]]:
    beats: list[Sent] = []
    yield beats
    for beat in beats:
        beat.close()


def ago(beat: Sent, name: str, seconds: float) -> None:
    """Say that an entry was last sent so long ago."""
    entry = beat.schedule[name]
    entry.last_run_at = entry.default_now() - timedelta(seconds=seconds)
    beat._heap = None


def test_one_that_stands_by_sends_nothing_and_then_what_is_due(beats: list[Sent]) -> None:
    first, second = scheduler({"hourly": 3600}), scheduler({"hourly": 3600})
    beats += [first, second]
    assert sends(first) == []
    ago(first, "hourly", 3601)
    ago(second, "hourly", 3601)
    assert sends(second) == [] and sends(first) == ["hourly"]
    first.close()
    assert sends(second) == [], "for the first has sent it"
    ago(second, "hourly", 3601)
    assert sends(second) == ["hourly"]


def test_an_entry_that_nobody_has_sent_counts_on_when_beats_are_replaced(
    beats: list[Sent],
) -> None:
    first = scheduler({"weekly": 7 * 86400})
    beats.append(first)
    assert sends(first) == []
    since = first.schedule["weekly"].last_run_at
    first.close()
    second = scheduler({"weekly": 7 * 86400})
    beats.append(second)
    assert sends(second) == []
    again = second.schedule["weekly"].last_run_at
    assert since is not None and again is not None
    assert abs(again - since) < timedelta(milliseconds=1)


def test_one_that_has_lost_its_lease_sends_nothing(beats: list[Sent]) -> None:
    beat = scheduler({"hourly": 3600})
    beats.append(beat)
    sends(beat)
    tenure = beat._tenure
    assert tenure is not None
    tenure.ctx.cancel(tako_sync.ShutdownError("as if it were lost"))
    beat.apply_entry(beat.schedule["hourly"])
    assert beat.names == []


def test_it_gives_the_lease_back_when_it_is_closed_twice_or_while_it_ticks(
    beats: list[Sent],
) -> None:
    beat = scheduler({"hourly": 3600})
    beats.append(beat)
    sends(beat)
    beat._ticking = True  # as when a signal strikes
    beat.close()
    assert Lock(DEFAULT_LEASE).holder() is not None, "the handler has interrupted who uses it"
    beat._ticking = False
    beat.close()
    beat.close()
    assert Lock(DEFAULT_LEASE).holder() is None
    assert sends(beat) == [] and Lock(DEFAULT_LEASE).holder() is None, "and takes it never again"


def test_a_mixin_after_its_scheduler_is_refused() -> None:
    with pytest.raises(UsageError, match=r"class Late\(LeasedMixin, \.\.\.\)"):

        class Late(Scheduler, LeasedMixin):
            pass


def test_beats_with_different_leases_do_not_meet(beats: list[Sent]) -> None:
    first, second = scheduler({}), scheduler({})
    beats += [first, second]
    second.app.conf.tako_beat_lease = "celery-beat-reports"
    sends(first)
    sends(second)
    assert first._tenure is not None and second._tenure is not None


def test_a_scheduler_of_others_sends_while_it_leads(in_memory: None, tmp_path: Path) -> None:
    class Both(LeasedMixin, PersistentScheduler):
        names: list[str]
        producer: Any = None

        def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> None:
            self.names.append(entry.name)

    pair = []
    for number in range(2):
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.beat_schedule = {"hourly": {"task": "hourly", "schedule": 3600}}
        both = Both(app=app, schedule_filename=str(tmp_path / f"beat-{number}"))
        both.names = []
        both.schedule["hourly"].last_run_at = both.schedule["hourly"].default_now() - timedelta(1)
        pair.append(both)
    try:
        for _ in range(3):
            for both in pair:
                both.tick()
        assert [both.names for both in pair] == [["hourly"], []]
        pair[0].close()
        pair[1].tick()
        assert pair[1].names == ["hourly"], "which knows from its own file alone"
    finally:
        for both in pair:
            both.close()


def test_a_strike_while_it_steps_down_leaves_that_to_the_next_close(
    beats: list[Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = scheduler({"hourly": 3600})
    beats.append(beat)
    sends(beat)
    tenure = beat._tenure
    assert tenure is not None

    def struck() -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(type(tenure), "__enter__", lambda _: struck())
        with pytest.raises(SystemExit):
            beat.close()
    assert Lock(DEFAULT_LEASE).holder() is not None
    beat.close()
    assert Lock(DEFAULT_LEASE).holder() is None


# --- Beats as processes


def _ticks(shop: Shop) -> list[float]:
    """When the messages were made, in order."""
    names = [*(shop.folder / "queue").iterdir()]
    return sorted(int(path.name.partition("_")[0]) / 1000 for path in names)


def _more_ticks(shop: Shop, count: int) -> None:
    wanted = len(_ticks(shop)) + count
    until = time.monotonic() + PATIENCE
    while len(_ticks(shop)) < wanted:
        assert time.monotonic() < until
        time.sleep(0.05)


def _one_each(ticks: list[float]) -> None:
    """Entries come each 0.5 s: from two that send they would come twice as often."""
    span = ticks[-1] - ticks[0]
    assert len(ticks) <= span / 0.5 + 2


def _two(shop: Shop, first: Part, second: Part) -> tuple[Part, Part]:
    """Wait until one leads and the other stands by; return them in this order."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        for leader, other in ((first, second), (second, first)):
            if SENDS in leader.log and STANDS_BY in other.log:
                return leader, other
        time.sleep(0.05)
    raise AssertionError(f"{first.log}\n{second.log}")


@pytest.mark.skipif(not hasattr(os, "kill"), reason="no signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_of_two_beats_one_sends_and_hands_over_when_it_ends(
    shop: Shop, number: signal.Signals
) -> None:
    with shop.beat(1) as first, shop.beat(2) as second:
        leader, other = _two(shop, first, second)
        _more_ticks(shop, 4)
        assert SENDS not in other.log
        leader.send(number)
        leader.ends()
        other.says(SENDS)
        _more_ticks(shop, 4)
    _one_each(_ticks(shop))


def test_after_a_beat_was_killed_the_other_sends_once_the_lease_has_run_out(shop: Shop) -> None:
    with shop.beat(1) as first, shop.beat(2) as second:
        leader, other = _two(shop, first, second)
        _more_ticks(shop, 4)
        lock = Lock(DEFAULT_LEASE).bound_to(shop.runtime)
        before = lock.holder()
        leader.send(signal.SIGKILL)
        leader.ends()
        other.says(SENDS)
        after = lock.holder()
        assert before is not None and after is not None
        assert (after.fence or 0) > (before.fence or 0)
        _more_ticks(shop, 4)
    _one_each(_ticks(shop))


def test_a_beat_that_wakes_after_its_lease_was_lost_sends_nothing_more(shop: Shop) -> None:
    with shop.beat(1) as first, shop.beat(2) as second:
        leader, other = _two(shop, first, second)
        leader.send(signal.SIGSTOP)
        try:
            other.says(SENDS)
        finally:
            leader.send(signal.SIGCONT)
        until = time.monotonic() + PATIENCE
        while leader.log.count("beat stands by") == 0 and time.monotonic() < until:
            time.sleep(0.05)
        sent = leader.log.count("Sending due task")
        _more_ticks(shop, 4)
        assert leader.log.count("Sending due task") == sent
        assert leader.log.count("beat stands by") >= 1
