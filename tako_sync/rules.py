"""The rules of a lease that need no waiting: is it free, the next fence, the next record.

Pure functions over values. A simulator can run millions of them without a thread.
"""

from __future__ import annotations

import math
from datetime import datetime

from attrs import frozen

from tako_sync.policy import LeasePolicy
from tako_sync.record import (
    FOREIGN_MARGIN,
    FOREIGN_TTL,
    Content,
    Foreign,
    Holder,
    Identity,
    Last,
    Record,
    State,
    Unreadable,
    holder,
    stamp,
)
from tako_sync.snapshot import Absent, Interval, Snapshot, Version


@frozen
class Terms:
    """What a binding writes into the records of its leases.

    Attributes:
        ttl, margin: seconds, as in :class:`~tako_sync.record.Record`.
        note: free text.
    """

    ttl: float
    margin: float
    note: str = ""

    @classmethod
    def of(cls, policy: LeasePolicy, clock_skew: float, note: str = "") -> Terms:
        return cls(policy.ttl, policy.margin(clock_skew), note)

    @property
    def assured(self) -> float:
        """Seconds from sending a write that lands to the holder's deadline."""
        return self.ttl - self.margin


@frozen
class Sighting:
    """One look at a record, with what this process knows of its age.

    Attributes:
        content: what stood there.
        snapshot: the storage's answer.
        arrived: when the answer arrived, on this process's monotonic clock.
        since: when the answer arrived that first showed this version, on the same clock.
            From the arrival, never from the sending: a look sent before the record was written
            may have been answered after it, and would make the record older than it is.
    """

    content: Content
    snapshot: Snapshot
    arrived: float
    since: float

    @property
    def version(self) -> Version | Absent:
        return self.snapshot.version


@frozen
class Free:
    """The lease may be acquired, by one write that expects ``version``.

    Attributes:
        how: ``new``, ``released``, ``expired`` or ``unreadable``.
        content: what stands there.
        now: the storage's time at the look, if there was a look and it has a clock.
    """

    how: str
    version: Version | Absent
    content: Content
    now: Interval | None = None


@frozen
class Held:
    """The lease is held, or may be.

    Attributes:
        left: seconds from the look after which it is free at the latest, unless it changes.
    """

    left: float
    content: Record | Foreign | Unreadable
    version: Version

    @property
    def holder(self) -> Holder:
        return holder(self.content, self.version, self.left)


def judge(sighting: Sighting) -> Free | Held:
    """Say whether a lease is free: no record, a released one, or one that has aged a ttl.

    The age counts from when the storage applied the write, which is later than when its
    holder sent it. Nothing that the writer believed about time is trusted.
    """
    content, version = sighting.content, sighting.version
    if content is None:
        return Free("new", version, content, sighting.snapshot.now)
    if isinstance(content, Record) and content.state is State.RELEASED:
        return Free("released", version, content, sighting.snapshot.now)
    left = min(_left_by_storage(sighting, content.ttl), _left_by_observation(sighting, content))
    if left <= 0:
        how = "unreadable" if isinstance(content, Unreadable) else "expired"
        return Free(how, version, content, sighting.snapshot.now)
    assert isinstance(version, str)  # there is content, so there is a version
    return Held(left, content, version)


def age_is_open(sighting: Sighting, written_after: float) -> bool:
    """Say whether the lease may be free by an age that the storage has not told, but could.

    Args:
        written_after: a moment on this process's monotonic clock before which this version did
            not stand there: the last look before it came.
    """
    content, snapshot = sighting.content, sighting.snapshot
    if content is None or snapshot.written is not None or snapshot.now is None:
        return False
    if isinstance(content, Record) and content.state is State.RELEASED:
        return False
    return sighting.arrived - written_after >= content.ttl


def _left_by_storage(sighting: Sighting, ttl: float) -> float:
    written, now = sighting.snapshot.written, sighting.snapshot.now
    if written is None or now is None:
        return math.inf
    return ttl - (now.earliest - written.latest)


def _left_by_observation(sighting: Sighting, content: Record | Foreign | Unreadable) -> float:
    # Both the record's own: an observer with a shorter ttl must not take over early. The
    # margin covers the drift between the observer's clock and the holder's.
    return sighting.since + content.ttl + content.margin - sighting.arrived


def next_fence(previous: Content, largest_seen: int, now: Interval | None) -> int:
    """Return a fence above all that were handed out for this name.

    The storage's time keeps it rising even where the record, and the number in it, was
    deleted behind the library's back.
    """
    fences = [1, largest_seen + 1]
    if isinstance(previous, Record):
        fences.append(previous.fence + 1)
    if now is not None:
        fences.append(math.floor(now.latest * 1e6))
    return max(fences)


# --- The next record -------------------------------------------------------------------


def memo_of(content: Content) -> str:
    """Return what is remembered in a record; empty if nothing."""
    return content.memo if isinstance(content, Record) else ""


def granted(
    identity: Identity,
    owner: str,
    write: str,
    terms: Terms,
    free: Free,
    fence: int,
    at: datetime,
    memo: str,
) -> Record:
    """Return the record that acquires ``free`` for ``owner``."""
    return Record(
        identity=identity,
        owner=owner,
        write=write,
        state=State.HELD,
        ttl=terms.ttl,
        margin=terms.margin,
        fence=fence,
        acquired=stamp(at),
        expires=stamp(at, terms.ttl),
        note=terms.note,
        last=_last_of(free.content),
        memo=memo,
    )


def _last_of(content: Content) -> Last | None:
    if isinstance(content, Foreign):
        return Last(content.owner, "", "", "expired")
    if not isinstance(content, Record):
        return None
    if content.state is State.RELEASED:
        return content.last
    return Last(content.owner, content.acquired, "", "expired")


def renewed(record: Record, write: str, at: datetime) -> Record:
    """Return the record that prolongs ``record``; a hand-over request is carried on."""
    return record.but(write=write, expires=stamp(at, record.ttl))


def released(record: Record, write: str, at: datetime, outcome: str) -> Record:
    """Return the record that frees ``record`` and remembers its hold. It keeps the fence."""
    now = stamp(at)
    return record.but(
        write=write,
        state=State.RELEASED,
        expires=now,
        handover="",
        last=Last(record.owner, record.acquired, now, outcome),
    )


def broken(
    content: Record | Foreign | Unreadable,
    identity: Identity,
    write: str,
    at: datetime,
    by: str,
    *,
    now: bool,
) -> Record:
    """Return the record with which an operator breaks the lease that ``content`` holds.

    It counts as held until it has aged a ttl, since the holder learns of it only at its
    next heartbeat. With ``now`` it is free at once, and two bodies may overlap.
    """
    record = content if isinstance(content, Record) else _blank(content, identity, at)
    if not now:
        return record.but(write=write, state=State.BROKEN, broken_by=by)
    return released(record, write, at, "broken").but(broken_by=by)


def _blank(content: Foreign | Unreadable, identity: Identity, at: datetime) -> Record:
    return Record(
        identity=identity,
        owner=content.owner if isinstance(content, Foreign) else "",
        write="",
        state=State.HELD,
        ttl=FOREIGN_TTL,
        margin=FOREIGN_MARGIN,
        fence=0,
        acquired=stamp(at),
        expires=stamp(at, FOREIGN_TTL),
    )
