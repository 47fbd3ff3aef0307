"""A hold's knowledge of its own record, without waiting: renewal, loss, release.

The caller does the reading and writing: ``renewal``, then ``landed`` or, after a conflict,
``saw``; at the end ``release``, then ``released`` or, after a conflict, ``saw_at_release``.
"""

from __future__ import annotations

import enum
from datetime import datetime

from attrs import frozen

from tako_sync import rules
from tako_sync.claim import Draft, Grant
from tako_sync.errors import LossReason
from tako_sync.record import Content, Record, State, Unreadable
from tako_sync.rules import Free, Sighting
from tako_sync.snapshot import Version


@frozen
class Landed:
    """A renewal of ours stands in the storage.

    Attributes:
        sent: of the attempt that landed.
    """

    sent: float


@frozen
class Open:
    """Nothing is settled: try again, from the version now known."""


@frozen
class Gone:
    """The hold is lost, for good."""

    reason: LossReason


Standing = Landed | Open | Gone


class Ending(enum.Enum):
    """What a look after a refused release says."""

    DONE = "our release stands"
    AGAIN = "our record stands: release it from the version now known"
    NOT_OURS = "the record is not ours any more: nothing is left to release"


class Tenancy:
    """The record of one hold, as far as it is known to have landed."""

    def __init__(self, grant: Grant) -> None:
        self.record = grant.record
        self.version = grant.version
        self.memo: str = grant.record.memo
        """What the renewals and the release are to remember."""
        self._renewals: dict[str, float] = {}
        self._releases: set[str] = set()

    # --- While held

    def renewal(self, write: str, sent: float, at: datetime) -> Draft:
        """Return the next renewal, and remember it. Arguments as in :meth:`Claim.draft`."""
        self._renewals[write] = sent
        renewed = rules.renewed(self.record, write, at).but(memo=self.memo)
        return Draft(renewed, self.version, sent)

    def landed(self, draft: Draft, version: Version) -> Landed:
        """Take in that the storage confirmed a renewal; the other attempts are dead."""
        return self._adopt(draft.record, version, draft.sent)

    def saw(self, sighting: Sighting) -> Standing:
        """Take in a look after a refused renewal. The refusal alone proves nothing."""
        content, version = sighting.content, sighting.version
        if isinstance(content, Record) and isinstance(version, str):
            if content.state is State.HELD and content.write in self._renewals:
                return self._adopt(content, version, self._renewals[content.write])
            if version != self.version and self._is_last_landed(content):
                # A hand-over request keeps our `write`. Nothing of ours was written, so the
                # deadline stays; renewals that expect the old version are dead.
                self._adopt(content, version, 0.0)
                return Open()
        if version == self.version:
            return Open()
        if self._is_own_broken(content) and isinstance(version, str):
            self.version = version  # so that the release overwrites it
        return Gone(self._why_gone(content))

    def _adopt(self, record: Record, version: Version, sent: float) -> Landed:
        self.record = record
        self.version = version
        self._renewals.clear()
        return Landed(sent)

    def _is_last_landed(self, content: Record) -> bool:
        return content.state is State.HELD and content.write == self.record.write

    def _is_own_broken(self, content: Content) -> bool:
        return (
            isinstance(content, Record)
            and content.state is State.BROKEN
            and content.owner == self.record.owner
        )

    def _why_gone(self, content: Content) -> LossReason:
        if content is None:
            return LossReason.DELETED
        if isinstance(content, Unreadable):
            return LossReason.UNREADABLE
        if isinstance(content, Record) and content.owner == self.record.owner:
            return LossReason.BROKEN  # with `now`, it says released rather than broken
        return LossReason.TAKEN

    # --- At the end

    def release(self, write: str, at: datetime, outcome: str) -> Draft:
        """Return the write that frees the lease, and remember it. It can only touch our record."""
        self._releases.add(write)
        freed = rules.released(self.record, write, at, outcome).but(memo=self.memo)
        return Draft(freed, self.version, 0.0)

    def released(self, draft: Draft, version: Version) -> Free:
        """Take in that the storage confirmed the release; return what is now known to be free."""
        return Free("released", version, draft.record)

    def saw_at_release(self, sighting: Sighting) -> Ending:
        """Take in a look after a refused release."""
        content, version = sighting.content, sighting.version
        if version == self.version:
            return Ending.AGAIN
        if not isinstance(content, Record) or not isinstance(version, str):
            return Ending.NOT_OURS
        if content.write in self._releases:
            return Ending.DONE
        ours = content.state is State.HELD and (
            content.write in self._renewals or content.write == self.record.write
        )
        if ours or self._is_own_broken(content):
            self.record, self.version = content, version
            return Ending.AGAIN
        return Ending.NOT_OURS
