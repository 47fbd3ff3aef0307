"""What a beat has sent, as the record of its lease remembers it: no clock, no I/O.

Each beat would otherwise know only what it has sent itself, and the one that takes over would send
again what had been sent since it was started.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Final

MOST: Final = 120
"""Entries that a record has room for."""


def encode(sent: Mapping[str, datetime]) -> str:
    """Return the text for entries that were last sent at those times.

    If there are too many, those that were sent longest ago are remembered: one that is sent often
    comes soon again.
    """
    times = {name: _number(at) for name, at in sent.items()}
    oldest = sorted(times.items(), key=lambda item: (item[1], item[0]))[:MOST]
    return json.dumps({"sent": {_short(name): number for name, number in oldest}})


def decode(memo: str) -> dict[str, float]:
    """Return times by the short form of names; empty if nothing can be read."""
    try:
        found = json.loads(memo)["sent"] if memo else {}
        return {str(short): float(at) for short, at in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def remembered(memo: str, name: str, like: datetime) -> datetime | None:
    """Return when an entry was last sent; None if that is not remembered.

    Args:
        like: a time as the entry's schedule has it: in a zone, or naive.
    """
    number = decode(memo).get(_short(name))
    try:
        at = None if number is None else datetime.fromtimestamp(number, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    if at is None or like.tzinfo is None:
        return at and at.replace(tzinfo=None)
    return at.astimezone(like.tzinfo)


def _number(at: datetime) -> float:
    # A naive time is what some schedules have (``nowfun``): only they know what it means, and get
    # it back as it was, on a machine of another zone, too.
    return (at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)).timestamp()


def _short(name: str) -> str:
    return hashlib.blake2s(name.encode(), digest_size=6).hexdigest()
