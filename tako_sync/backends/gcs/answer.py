"""What an answer of GCS says: the generation, and the storage's time in two of its headers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from tako_sync.errors import BackendUnavailableError
from tako_sync.snapshot import Interval, Version


def generation(value: object) -> Version:
    """Return the generation of an object as a version.

    Raises:
        BackendUnavailableError: there is none: it is not GCS that has answered.
    """
    if not isinstance(value, int) or value <= 0:
        raise BackendUnavailableError("the answer names no generation: it is not one of GCS")
    return str(value)


def now(headers: Mapping[str, str]) -> Interval | None:
    """Return the moment of the answer by its ``Date``, which is cut to the second.

    A second more either way, as nobody promises that all of Google's front ends agree.
    """
    date = _seconds(headers.get("Date"))
    return Interval(date - 1, date + 2) if date is not None else None


def written(headers: Mapping[str, str], now: Interval | None) -> Interval | None:
    """Return when the object was written, by ``Last-Modified``, which is cut to the second."""
    modified = _seconds(headers.get("Last-Modified"))
    return _not_after(now, modified, modified + 1) if modified is not None else None


def updated(moment: datetime | None, now: Interval | None) -> Interval | None:
    """Return when the object was written, by its metadata, which are cut to the millisecond."""
    if moment is None:
        return None
    seconds = moment.timestamp()
    return _not_after(now, seconds, seconds + 0.001)


def _not_after(now: Interval | None, earliest: float, latest: float) -> Interval | None:
    if now is None:  # without it, the other says nothing about an age
        return None
    return Interval(min(earliest, now.latest), min(latest, now.latest))


def _seconds(http_date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(http_date or "").timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def tells_of_the_bucket(error: Any) -> bool:
    """Whether a 404 says that the bucket is missing, rather than an object in it."""
    text = f"{error} {getattr(error.response, 'text', '')}".lower()
    return "bucket does not exist" in text or "bucket not found" in text
