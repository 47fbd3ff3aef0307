"""When a Cron is due: moments in UTC, of an expression that is read in a zone.

The expression is parsed by cronsim, and means what Debian's cron makes of it, changes of the clock
included: a fixed time that does not exist that day comes right after the gap, one that exists twice
comes once; where hour or minute is a wildcard, it comes as often as the clock shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, Final
from zoneinfo import ZoneInfo

from tako_sync.errors import ConfigurationError

_LOOK_BACK: Final = tuple(
    timedelta(hours=hours) for hours in (2, 24, 8 * 24, 32 * 24, 366 * 24, 9 * 366 * 24)
)
"""How far the last slot may lie back. cronsim looks back by itself, too, but stays for ever at the
edge of a gap. Nine years, as a 29th of February may be eight years away."""
_CHANGED: Final = 180
"""Minutes after a change of the clock in which each is looked at."""
_TICK: Final = timedelta(seconds=1)
_SOME_DAY: Final = datetime(2000, 1, 1, tzinfo=timezone.utc)


class Schedule:
    """The slots of one expression.

    Args:
        expression: five fields of crontab: minute, hour, day of month, month, day of week.
        tz: the zone's name in the IANA database.

    Raises:
        ConfigurationError: no such expression, no such zone, one that never comes, or cronsim is
            not installed.
    """

    def __init__(self, expression: str, tz: str) -> None:
        if not isinstance(expression, str) or len(expression.split()) != 5:
            raise ConfigurationError(
                f"schedule {expression!r} is no crontab expression: five fields, minute, hour, "
                'day of month, month, day of week, such as "*/5 * * * *"'
            )
        self.expression = expression = " ".join(expression.split())
        self._zone = zone(tz)
        if next(self._from(_SOME_DAY), None) is None:
            raise ConfigurationError(f"schedule {expression!r} never comes")

    def after(self, moment: datetime) -> datetime:
        """Return the first slot that is later than ``moment``."""
        return next(self._slots(moment))

    def latest(self, moment: datetime) -> datetime | None:
        """Return the last slot that is not later than ``moment``; None if there was none lately."""
        for back in _LOOK_BACK:
            found = None
            for slot in self._slots(moment - back):
                if slot > moment:
                    break
                found = slot
            if found is not None:
                return found
        return None

    def between(self, first: datetime, last: datetime, most: int) -> list[datetime]:
        """Return the slots from ``first``, one itself, up to before ``last``: ``most`` of them."""
        slots: list[datetime] = []
        for slot in self._slots(first - timedelta(minutes=1)):
            if slot >= last or len(slots) == most:
                break
            if slot >= first:
                slots.append(slot)
        return slots

    def _slots(self, moment: datetime) -> Iterator[datetime]:
        """Yield all slots later than ``moment``, in order."""
        while True:
            for slot in self._from(moment):
                if slot <= moment:
                    continue
                change = self._change(moment, slot)
                if change is not None:
                    moment = self._stepped_over(moment, change, slot)
                    yield moment
                    break  # and from there anew
                moment = slot
                yield slot
            else:
                return

    def _stepped_over(self, moment: datetime, change: datetime, found: datetime) -> datetime:
        """Return the first slot from a change of the clock on, up to what cronsim has found.

        From before a change by half an hour, cronsim steps over slots that come soon after.
        """
        for minutes in range(_CHANGED):
            slot = change + timedelta(minutes=minutes)
            if moment < slot < found and next(self._from(slot - _TICK)) == slot:
                return slot
        return found

    def _change(self, first: datetime, last: datetime) -> datetime | None:
        """Return the minute in which the zone's offset changes, if it does between the two."""
        before = first.astimezone(self._zone).utcoffset()
        if last.astimezone(self._zone).utcoffset() == before:
            return None
        while last - first > timedelta(minutes=1):
            middle = first + (last - first) / 2
            if middle.astimezone(self._zone).utcoffset() == before:
                first = middle
            else:
                last = middle
        return last.replace(second=0, microsecond=0)

    def _from(self, moment: datetime) -> Iterator[datetime]:
        cronsim = _cronsim()
        try:
            slots = cronsim.CronSim(self.expression, moment.astimezone(self._zone))
        except cronsim.CronSimError as error:
            raise ConfigurationError(f"schedule {self.expression!r}: {error}") from None
        return (slot.astimezone(timezone.utc) for slot in slots)


def zone(name: object) -> ZoneInfo | timezone:
    """Return the zone of that name.

    Raises:
        ConfigurationError: there is none, or it is not the same on each machine.
    """
    if name == "UTC":
        return timezone.utc  # known without a database of zones
    if not isinstance(name, str):
        raise ConfigurationError(f"tz is the name of a zone, such as 'Europe/Berlin', not {name!r}")
    if name in ("localtime", "posixrules", "Factory") or name.startswith(("posix/", "right/")):
        raise ConfigurationError(f"tz {name!r} differs by machine: name the zone itself")
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        raise ConfigurationError(
            f"tz {name!r} is no zone that is known here: write one of the IANA database, such as "
            "'Europe/Berlin'; where the system has no database, pip install tzdata"
        ) from None


def _cronsim() -> Any:
    try:
        import cronsim
    except ImportError:
        raise ConfigurationError(
            "Cron reads its schedule with cronsim: pip install 'tako-sync[cron]'"
        ) from None
    return cronsim
