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
    oldest = sorted(sent.items(), key=lambda item: (item[1], item[0]))[:MOST]
    return json.dumps({"sent": {_short(name): at.timestamp() for name, at in oldest}})


def decode(memo: str) -> dict[str, float]:
    """Return times by the short form of names; empty if nothing can be read."""
    try:
        found = json.loads(memo)["sent"] if memo else {}
        return {str(short): float(at) for short, at in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def remembered(memo: str, name: str) -> datetime | None:
    """Return when an entry was last sent, in UTC; None if that is not remembered."""
    at = decode(memo).get(_short(name))
    try:
        return None if at is None else datetime.fromtimestamp(at, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


def _short(name: str) -> str:
    return hashlib.blake2s(name.encode(), digest_size=6).hexdigest()
