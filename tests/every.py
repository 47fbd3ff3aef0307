"""A schedule for tests whose slots are seconds apart."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from tako_sync.schedule import Schedule


class Every(Schedule):
    """Slots that are seconds apart. Crontab knows none; waiting for minutes shows nothing more."""

    def __init__(self, apart: int) -> None:
        super().__init__("* * * * *", "UTC")
        self._apart = apart

    def after(self, moment: datetime) -> datetime:
        return self._floor(moment) + timedelta(seconds=self._apart)

    def latest(self, moment: datetime) -> datetime | None:
        return self._floor(moment)

    def between(self, first: datetime, last: datetime, most: int) -> list[datetime]:
        slots: list[datetime] = []
        while first < last and len(slots) < most:
            slots.append(first)
            first += timedelta(seconds=self._apart)
        return slots

    def _floor(self, moment: datetime) -> datetime:
        seconds = int(moment.timestamp())
        return datetime.fromtimestamp(seconds - seconds % self._apart, timezone.utc)
