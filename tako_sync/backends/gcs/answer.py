"""What an answer of GCS says: the generation, and the storage's time in two of its headers."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from tako_sync.errors import BackendUnavailableError
from tako_sync.snapshot import Interval, Version

_MD5: Final = re.compile(r"\bmd5=([^,\s]+)")


def generation(value: object) -> Version:
    """Return the generation of an object as a version.

    Raises:
        BackendUnavailableError: there is none: it is not GCS that has answered.
    """
    if not isinstance(value, int) or value <= 0:
        raise BackendUnavailableError("the answer names no generation: it is not one of GCS")
    return str(value)


def check_body(body: bytes, headers: Mapping[str, str]) -> None:
    """Look whether the body is the object's, where the answer tells; the client does not.

    Where the connection ended amid the headers, the rest of them and the body are missing: an
    empty object it would seem, which is a record that cannot be read, and the end of a hold that
    looks. And the client compares no checksum where it was asked for a range.

    Raises:
        BackendUnavailableError: it is not, or the answer does not say how long it is.
    """
    if not headers.get("Content-Length") and not headers.get("Transfer-Encoding"):
        raise BackendUnavailableError("the answer was cut off")
    said = _MD5.search(headers.get("X-Goog-Hash", ""))
    is_whole = headers.get("Content-Range", "").endswith(f"/{len(body)}")
    as_stored = headers.get("X-Goog-Stored-Content-Encoding") == "identity"
    if said is None or not is_whole or not as_stored:
        return
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    if base64.b64encode(digest).decode() != said[1]:
        raise BackendUnavailableError("the body was damaged on its way")


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
    text = f"{error} {_text(error)}".lower()
    return "bucket does not exist" in text or "bucket not found" in text


def is_of_a_proxy(error: Any) -> bool:
    """Whether an error is a page for people, as GCS sends none: of something in between."""
    return _text(error).lstrip().startswith("<")


def _text(error: Any) -> str:
    return str(getattr(error.response, "text", ""))
