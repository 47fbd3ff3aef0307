"""Schedules across changes of the clock: each day has its slot, and slots only go forward."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import pytest

from tako_sync.cron import Cron, CronConfig
from tako_sync.errors import ConfigurationError, UsageError
from tako_sync.schedule import Schedule


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


def slots(schedule: Schedule, first: datetime, last: datetime) -> list[datetime]:
    found, moment = [], first
    while (moment := schedule.after(moment)) < last:
        found.append(moment)
    return found


ZONES = ["UTC", "Europe/Berlin", "America/Los_Angeles", "Australia/Lord_Howe"]
DAILY = ["0 0 * * *", "30 2 * * *", "15 1 * * *", "59 23 * * *", "45 1,13 * * *"]
ALWAYS = ["30 * * * *", "*/15 * * * *", "* * * * *", "0 */2 * * *"]


@pytest.mark.parametrize("tz", ZONES)
@pytest.mark.parametrize("expression", DAILY)
def test_no_day_is_lost_in_a_year_with_its_two_changes_of_the_clock(
    tz: str, expression: str
) -> None:
    from zoneinfo import ZoneInfo

    schedule = Schedule(expression, tz)
    found = slots(schedule, utc("2026-01-01 12:00"), utc("2027-01-01 12:00"))
    assert all(one < other for one, other in pairwise(found))
    each = 2 if "," in expression else 1
    days: dict[Any, int] = {}
    for slot in found:
        day = slot.astimezone(ZoneInfo(tz)).date()
        days[day] = days.get(day, 0) + 1
    whole = sorted(days)[1:-1]
    assert len(whole) >= 363
    assert {days[day] for day in whole} == {each}


@pytest.mark.parametrize("tz", ZONES)
@pytest.mark.parametrize("expression", ALWAYS)
@pytest.mark.parametrize("around", ["2026-03-08", "2026-03-29", "2026-04-04", "2026-10-25"])
def test_what_comes_all_the_time_goes_on_through_a_change(
    tz: str, expression: str, around: str
) -> None:
    schedule = Schedule(expression, tz)
    start = utc(f"{around} 00:00") - timedelta(hours=12)
    found = slots(schedule, start, start + timedelta(hours=36))
    gaps = {(other - one).total_seconds() / 60 for one, other in pairwise(found)}
    usual = min(gaps) if expression != "0 */2 * * *" else 120
    assert min(gaps) > 0
    assert max(gaps) <= 2 * usual, "an hour may be skipped or repeated, no more"


@pytest.mark.parametrize(
    ("expression", "tz", "after", "expected"),
    [
        # A time that does not exist comes right after the gap.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28 12:00", "2026-03-29 01:00"),
        ("30 2 * * *", "America/Los_Angeles", "2026-03-08 08:30", "2026-03-08 10:00"),
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03 12:00", "2026-10-03 15:30"),
        # One that exists twice comes once, the first time.
        ("30 2 * * *", "Europe/Berlin", "2026-10-25 00:00", "2026-10-25 00:30"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25 00:30", "2026-10-26 01:30"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25 01:10", "2026-10-26 01:30"),
        # A wildcard comes as often as the clock shows it.
        ("30 * * * *", "Europe/Berlin", "2026-10-25 00:30", "2026-10-25 01:30"),
        ("0 0 29 2 *", "UTC", "2096-03-01 00:00", "2104-02-29 00:00"),
    ],
)
def test_the_policy_for_changes_of_the_clock(
    expression: str, tz: str, after: str, expected: str
) -> None:
    assert Schedule(expression, tz).after(utc(after)) == utc(expected)


@pytest.mark.parametrize("tz", ZONES)
@pytest.mark.parametrize("expression", [*DAILY, *ALWAYS, "0 0 29 2 *", "0 9 * * MON#1"])
def test_the_latest_slot_is_the_one_before_the_next(tz: str, expression: str) -> None:
    schedule = Schedule(expression, tz)
    for around in ("2026-03-08 09:59:59", "2026-03-29 00:59:59", "2026-10-25 01:15:00"):
        for shift in (-90, -30, 0, 1, 61, 90):
            moment = utc(around) + timedelta(minutes=shift)
            latest = schedule.latest(moment)
            assert latest is not None and latest <= moment
            assert schedule.after(latest) > moment
            assert schedule.latest(latest) == latest


@pytest.mark.parametrize("tz", ZONES)
@pytest.mark.parametrize("expression", [*DAILY, *ALWAYS])
@pytest.mark.parametrize(
    "change",
    [
        "2026-03-08 10:00", "2026-11-01 09:00", "2026-03-29 01:00", "2026-10-25 01:00",
        "2026-04-04 15:00", "2026-10-03 15:30",
    ],
)  # fmt: skip
def test_next_latest_and_missed_slots_agree_around_each_change(
    tz: str, expression: str, change: str
) -> None:
    schedule = Schedule(expression, tz)
    first, last = utc(change) - timedelta(hours=30), utc(change) + timedelta(hours=30)
    found = slots(schedule, first, last)
    assert schedule.between(found[0], found[-1], 10_000) == found[:-1]
    for one, other in pairwise(found[:: max(1, len(found) // 200)]):
        between = [slot for slot in found if one <= slot <= other]
        for slot, following in pairwise(between):
            assert schedule.after(slot) == following
        assert schedule.latest(one) == one
    near = [slot for slot in found if abs(slot - utc(change)) < timedelta(hours=3)]
    for slot, following in pairwise(near):
        assert schedule.latest(following - timedelta(seconds=1)) == slot
        assert schedule.latest(slot + timedelta(seconds=1)) == slot


def test_blanks_are_one_blank() -> None:
    assert Schedule("*/5\n*\t*  * *", "UTC").expression == "*/5 * * * *"


def test_between_tells_those_that_were_missed() -> None:
    schedule = Schedule("*/5 * * * *", "UTC")
    first, last = utc("2026-01-01 00:05"), utc("2026-01-01 00:20")
    assert [slot.minute for slot in schedule.between(first, last, 100)] == [5, 10, 15]
    assert [slot.minute for slot in schedule.between(first, last, 2)] == [5, 10]
    assert schedule.between(first, first, 100) == []


@pytest.mark.parametrize(
    "expression",
    ["", "* * * *", "* * * * * *", "60 * * * *", "a b c d e", "0 0 30 2 *", "0 0 31 4 *", 5, None],
)
def test_what_is_no_schedule_is_refused_where_it_is_written(expression: Any) -> None:
    with pytest.raises(ConfigurationError, match="schedule"):
        Cron(expression, lambda ctx: None)


@pytest.mark.parametrize(
    "tz",
    [
        "Europe/Atlantis",
        "Europe",
        "",
        "../../etc/passwd",
        "/etc/localtime",
        1,
        None,
        "localtime",
        "Factory",
        "right/UTC",
        "posix/UTC",
    ],
)
def test_a_zone_that_nobody_knows_is_refused(tz: Any) -> None:
    with pytest.raises(ConfigurationError, match="tz"):
        CronConfig(tz=tz)


def test_without_cronsim_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'tako-sync\[cron\]'"):
        Cron("* * * * *", lambda ctx: None)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"catch_up": -1}, "catch_up"),
        ({"catch_up": float("nan")}, "catch_up"),
        ({"catch_up": True}, "catch_up"),
        ({"on_crash": "retry"}, "on_crash is 'rerun' or 'skip', not 'retry'"),
        ({"singleflight": "yes"}, "singleflight is True or False"),
    ],
)
def test_choices_that_are_none_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        CronConfig(**options)


def test_what_is_no_function_of_a_ctx_or_no_config_is_refused() -> None:
    with pytest.raises(UsageError):
        Cron("* * * * *", lambda: None)  # type: ignore[arg-type, misc]
    with pytest.raises(UsageError, match="config is a"):
        Cron("* * * * *", lambda ctx: None, {"tz": "UTC"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a Cron is not called"):
        Cron("* * * * *", lambda ctx: None)()
