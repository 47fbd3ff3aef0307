"""What a storage backend answers: bytes, a version, and what its own clock says."""

from __future__ import annotations

import enum
from typing import Final, Literal

from attrs import frozen

BODY_LIMIT: Final = 64 * 1024
"""Bytes. A backend may cut a longer body anywhere beyond this; it is unreadable either way."""

Version = str
"""The storage's compare-and-swap stamp: opaque, compared for equality only."""


class _Absent(enum.Enum):
    ABSENT = "absent"

    def __repr__(self) -> str:
        return "ABSENT"


Absent = Literal[_Absent.ABSENT]
ABSENT: Final = _Absent.ABSENT
"""In place of a version: there is no record."""


@frozen
class Interval:
    """A moment on the storage's clock, known to lie between two bounds, in seconds."""

    earliest: float
    latest: float

    @classmethod
    def exactly(cls, moment: float) -> Interval:
        return cls(moment, moment)


@frozen
class Snapshot:
    """One read of one record.

    Attributes:
        body: the stored bytes; empty if there is no record.
        version: the version read, or ABSENT.
        written: when this version was written, on the storage's clock; None if unknown.
        now: when this read was answered, on the same clock; None if unknown.
    """

    body: bytes
    version: Version | Absent
    written: Interval | None = None
    now: Interval | None = None
