"""One campaign's knowledge, without waiting: what it may write, and which writes are its own.

The caller does the reading and writing, in this order: ``saw`` each look; ``draft`` a write
when it is free; ``landed`` when the storage confirmed it. After a doubt (timeout, reset, 5xx)
draft again for the same version: the retry is itself the test. After a conflict, look.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from attrs import frozen

from tako_sync import rules
from tako_sync.errors import NameCollisionError
from tako_sync.record import Content, Identity, Record, State
from tako_sync.rules import Free, Held, Sighting, Terms
from tako_sync.snapshot import Absent, Version


@frozen
class Draft:
    """A write about to be sent.

    Attributes:
        record: what to write.
        expect: the version that must be current.
        sent: the monotonic time read before the body was built; validity counts from it.
    """

    record: Record
    expect: Version | Absent
    sent: float


@frozen
class Grant:
    """A write of ours that is known to have landed and holds the lease.

    Attributes:
        sent: of the attempt that landed, which need not be the last one.
    """

    record: Record
    version: Version
    sent: float

    @property
    def deadline(self) -> float:
        """The monotonic time from which on the holder no longer believes in it."""
        return self.sent + self.record.ttl - self.record.margin


@frozen
class OwnBroken:
    """An operator broke a record of this very campaign: overwrite it with released."""

    content: Record
    version: Version


Finding = Free | Held | Grant | OwnBroken


Plan = Callable[[Content], str]
"""Says what a grant over such a record is to remember; raises if none is wanted after all."""


class Claim:
    """The attempts of one campaign and the largest fence it has seen.

    Args:
        plan: asked before each write that would acquire; by default the memo is carried on.
    """

    def __init__(
        self, identity: Identity, owner: str, terms: Terms, plan: Plan = rules.memo_of
    ) -> None:
        self.identity = identity
        self.owner = owner
        self.terms = terms
        self._plan = plan
        self._attempts: dict[str, tuple[Version | Absent, float]] = {}  # write: expect, sent
        self._largest = 0

    def saw(self, sighting: Sighting) -> Finding:
        """Take in a look and say what it means for this campaign.

        Raises:
            NameCollisionError: the record belongs to another identity under the same key.
        """
        content, version = sighting.content, sighting.version
        if not isinstance(content, Record) or not isinstance(version, str):
            self._forget_the_dead(version)
            return rules.judge(sighting)
        if content.identity != self.identity:
            raise NameCollisionError(self.identity.key, str(self.identity), str(content.identity))
        self._largest = max(self._largest, content.fence)
        mine = self._attempts.get(content.write)
        if mine is not None and content.state is State.HELD:
            # By `write`, never by `owner`: and the deadline counts from this attempt's own
            # `sent`, not from that of a later retry which did not land.
            _expect, sent = mine
            return Grant(content, version, sent)
        self._forget_the_dead(version)
        if content.state is State.BROKEN and content.owner == self.owner:
            return OwnBroken(content, version)
        return rules.judge(sighting)

    def draft(self, free: Free, write: str, sent: float, at: datetime) -> Draft:
        """Return the write that acquires ``free``, and remember it.

        Args:
            free: what the last look, or a release by this process, said.
            write: a name for this write, fresh.
            sent: the monotonic time, read before this call.
            at: the wall clock, for people.
        """
        memo = self._plan(free.content)
        fence = rules.next_fence(free.content, self._largest, free.now)
        self._largest = max(self._largest, fence)
        record = rules.granted(self.identity, self.owner, write, self.terms, free, fence, at, memo)
        self._attempts[write] = free.version, sent
        return Draft(record, free.version, sent)

    def landed(self, draft: Draft, version: Version) -> Grant:
        """Take in that the storage confirmed ``draft``. The other attempts are dead."""
        # This one stays: if it landed too late and cannot be given back, it is still our own.
        self._attempts = {draft.record.write: (draft.expect, draft.sent)}
        return Grant(draft.record, version, draft.sent)

    def refused(self, draft: Draft) -> None:
        """Take in that the storage refused ``draft`` for good: it was and will not be applied."""
        self._attempts.pop(draft.record.write, None)

    @property
    def in_doubt(self) -> bool:
        """Whether a write of this campaign may stand in the storage, or may yet."""
        return bool(self._attempts)

    def _forget_the_dead(self, version: Version | Absent) -> None:
        # The register has left the version that these expect, and no version comes twice.
        # ABSENT may come back (a deletion), so an attempt to create stays alive for ever.
        for write, (expect, _sent) in list(self._attempts.items()):
            if expect != version and isinstance(expect, str):
                del self._attempts[write]
