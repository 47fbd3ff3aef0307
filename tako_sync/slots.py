"""What a Cron remembers in its lease's record, and which slot is to be run: no waiting, no I/O.

A lease alone does not give once per slot: a job of milliseconds has ended, and its lease is free,
before a process whose clock is slightly behind looks. So the record tells which slot was last
granted, in the very write that grants it.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Final

from attrs import frozen

from tako_sync.record import Content, moment, printable, stamp
from tako_sync.rules import memo_of

RUNNING: Final = "running"
DONE: Final = "done"
FAILED: Final = "failed"
_TRIES: Final = 2
"""How often a slot is begun at most, whatever cuts it short."""


@frozen
class Run:
    """One run of a slot, as the record tells it.

    Attributes:
        slot: when it was due.
        state: ``running``, ``done`` or ``failed``. One whose lease is free and that is still
            ``running`` was cut short.
        tries: how often it was begun.
        by: the owner that ended it; empty while it runs.
        seconds: how long it took; 0 while it runs.
        error: what it raised, as a text.
    """

    slot: datetime
    state: str
    tries: int = 1
    by: str = ""
    seconds: float = 0.0
    error: str = ""

    def encode(self) -> str:
        facts = {"slot": stamp(self.slot), "state": self.state, "tries": self.tries}
        if self.state != RUNNING:
            facts |= {"by": self.by, "seconds": round(self.seconds, 3)}
        if self.error:
            facts["error"] = printable(self.error)
        return json.dumps(facts)


class NotWanted(Exception):
    """The slot need not be run: it was, or a later one was, or none is known to be missing."""


class Passed(NotWanted):
    """A run that the record tells of stands against it.

    Attributes:
        run: that one.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.run = run


class Later(Passed):
    """A later slot was begun."""


class CutShort(Passed):
    """The slot's run was cut short, and it is not to be run again."""


def last_run(content: Content) -> Run | None:
    """Return what a record remembers; None if nothing, or nothing that can be read."""
    return decode(memo_of(content))


def decode(text: str) -> Run | None:
    """Return the run that a memo tells of; None likewise."""
    try:
        facts = json.loads(text) if text else {}
        slot = moment(facts["slot"])
        if slot is None or slot.tzinfo is None:
            return None
        return Run(
            slot,
            str(facts["state"]),
            int(facts["tries"]),
            str(facts.get("by", "")),
            float(facts.get("seconds", 0.0)),
            str(facts.get("error", "")),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def plan(content: Content, slot: datetime, *, again: bool, waited_for: bool) -> str:
    """Return what the grant for ``slot`` is to remember.

    Args:
        content: the record of a lease that is free.
        again: whether a run that was cut short is repeated, once.
        waited_for: whether this process was there when the slot came. Else the slot is wanted only
            if the record shows that others were, before, and that nobody ran it.

    Raises:
        NotWanted: it is not to be run.
    """
    last = last_run(content)
    if last is None:
        if not waited_for:
            raise NotWanted
        return Run(slot, RUNNING).encode()
    if last.slot > slot:
        raise Later(last)
    if last.slot == slot and last.state != RUNNING:
        raise NotWanted
    if last.slot < slot:
        return Run(slot, RUNNING).encode()
    if not again or last.tries >= _TRIES:
        raise CutShort(last)
    return Run(slot, RUNNING, last.tries + 1).encode()
