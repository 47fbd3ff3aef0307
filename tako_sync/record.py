"""The record of a lease: one small JSON document, and how its bytes are read.

``owner`` and ``expires`` stand in it as every tako writes them. Reading never fails: what
stands in the storage is ours (:class:`Record`), another tako's (:class:`Foreign`),
:class:`Unreadable`, or nothing (None).
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from attrs import evolve, field, frozen

from tako_sync.snapshot import ABSENT, BODY_LIMIT, Snapshot, Version

FORMAT: Final = 1
MAX_TTL: Final = 3600.0
"""Seconds. A record that claims more is unreadable rather than held for so long."""
MAX_MEMO: Final = 4096
"""Characters."""
FOREIGN_TTL: Final = 30.0
FOREIGN_MARGIN: Final = 3.0
"""Seconds. What a record without ttl and margin of its own is judged by."""


class State(str, enum.Enum):
    """What a record says of its lease; a state of a later format counts as held."""

    HELD = "held"
    RELEASED = "released"
    BROKEN = "broken"


@frozen
class Identity:
    """Whose lease it is. Two identities may share one key; their records tell them apart."""

    app: str
    env: str
    name: str

    @property
    def key(self) -> str:
        return f"run-{self.app}-{self.env}-{self.name}"

    def __str__(self) -> str:
        return printable(f"{self.app}/{self.env}/{self.name}")


@frozen
class Last:
    """The hold before: who, from when to when, and how it ended."""

    owner: str
    acquired: str
    released: str
    outcome: str


@frozen
class Record:
    """A record as this library writes it.

    Attributes:
        identity: whose lease it is.
        owner: ``host:pid:nonce`` of the campaign that acquired it; constant while held.
        write: the name of this very write, fresh for each attempt.
        state: held, released or broken.
        ttl: seconds after which it is free if it has not changed.
        margin: seconds by which its holder gives up earlier, and observers wait longer.
        fence: the fencing token.
        acquired: when it was acquired, ISO 8601, by the holder's wall clock: for people.
        expires: when it would expire, likewise.
        note: free text of the holder's binding.
        last: the hold before this one.
        handover: who asked the holder to hand over, if anyone did.
        broken_by: who broke it, if anyone did.
        memo: what the users of the lease remember from hold to hold, as the text of a JSON
            object; empty if nothing. It means nothing here.
    """

    identity: Identity
    owner: str
    write: str
    state: State
    ttl: float
    margin: float
    fence: int
    acquired: str
    expires: str
    note: str = ""
    last: Last | None = None
    handover: str = ""
    broken_by: str = ""
    memo: str = ""

    def encode(self) -> bytes:
        body: dict[str, Any] = {
            "owner": self.owner,
            "expires": self.expires,
            "format": FORMAT,
            "state": self.state.value,
            "write": self.write,
            "ttl": self.ttl,
            "margin": self.margin,
            "fence": self.fence,
            "acquired": self.acquired,
            "note": self.note,
            "app": self.identity.app,
            "env": self.identity.env,
            "name": self.identity.name,
        }
        if self.last is not None:
            body["last"] = {
                "owner": self.last.owner,
                "acquired": self.last.acquired,
                "released": self.last.released,
                "outcome": self.last.outcome,
            }
        if self.handover:
            body["handover"] = self.handover
        if self.broken_by:
            body["broken_by"] = self.broken_by
        if self.memo:
            body["memo"] = json.loads(self.memo)
        return json.dumps(body).encode()

    def but(self, **changes: Any) -> Record:
        """Return a copy with ``changes``."""
        return evolve(self, **changes)


@frozen
class Foreign:
    """A record with ``owner`` and ``expires`` alone, as the Go framework writes it."""

    owner: str
    expires: str
    ttl: float = FOREIGN_TTL
    margin: float = FOREIGN_MARGIN


@frozen
class Unreadable:
    """Bytes that are no record of any tako."""

    problem: str
    ttl: float = FOREIGN_TTL
    margin: float = FOREIGN_MARGIN


_LINE: Final = 500
"""Characters. Anybody may have written what stands in the storage."""

Content = Record | Foreign | Unreadable | None


def read(snapshot: Snapshot) -> Content:
    """Return what ``snapshot`` holds. Never raises, whatever the bytes."""
    if snapshot.version is ABSENT:
        return None
    try:
        return _decode(snapshot.body)
    except _Problem as problem:
        return Unreadable(str(problem))


class _Problem(Exception):
    pass


def _decode(body: bytes) -> Record | Foreign:
    if len(body) > BODY_LIMIT:
        raise _Problem(f"larger than {BODY_LIMIT // 1024} KiB")
    if not body:
        raise _Problem("empty")
    try:
        document = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise _Problem("not JSON") from None
    if not isinstance(document, dict):
        raise _Problem("not a JSON object")
    if "format" not in document:
        owner, expires = document.get("owner"), document.get("expires")
        if isinstance(owner, str) and owner and isinstance(expires, str):
            return Foreign(owner, expires)
        raise _Problem("neither a format nor an owner with expires")
    return _ours(document)


def _ours(document: Mapping[str, Any]) -> Record:
    _integer(document, "format", least=1)
    ttl = _seconds(document, "ttl")
    margin = _seconds(document, "margin")
    if not 0 < ttl <= MAX_TTL:
        raise _Problem(f"a ttl of {ttl:g} s")
    if not 0 <= margin < ttl:
        raise _Problem(f"a margin of {margin:g} s for a ttl of {ttl:g} s")
    state = _text(document, "state")
    return Record(
        identity=Identity(_text(document, "app"), _text(document, "env"), _text(document, "name")),
        owner=_text(document, "owner"),
        write=_text(document, "write"),
        state=State(state) if state in set(State) else State.HELD,
        ttl=ttl,
        margin=margin,
        fence=_integer(document, "fence", least=0),
        acquired=_text(document, "acquired"),
        expires=_text(document, "expires"),
        note=_optional(document, "note"),
        last=_last(document.get("last")),
        handover=_optional(document, "handover"),
        broken_by=_optional(document, "broken_by"),
        memo=_memo(document.get("memo")),
    )


def _last(value: object) -> Last | None:
    """Read what is only for people: anything odd here is left out, not refused."""
    if not isinstance(value, dict):
        return None
    texts = [value.get(key) for key in ("owner", "acquired", "released", "outcome")]
    return Last(*(text if isinstance(text, str) else "" for text in texts))


def _memo(value: object) -> str:
    """Take an object as it is, up to a bound; anything odd is left out, not refused."""
    if not isinstance(value, dict):
        return ""
    text = json.dumps(value)
    return text if len(text) <= MAX_MEMO else ""


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise _Problem(f"no {key}")
    return value


def _optional(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""


def _seconds(document: Mapping[str, Any], key: str) -> float:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Problem(f"no {key} in seconds")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise _Problem(f"a {key} that is not finite")
    return seconds


def _integer(document: Mapping[str, Any], key: str, least: int) -> int:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise _Problem(f"no {key} from {least} up")
    return value


# --- For people ------------------------------------------------------------------------


@frozen
class Holder:
    """Who holds a lease, for people and for :meth:`tako_sync.Lock.break_`.

    Attributes:
        owner: the identity string in the record.
        version: the storage's version of the record that was read.
        state: ``held``, ``broken`` or ``unreadable``.
        since: when it was acquired, by the holder's wall clock; None if the record is silent.
        fence: its fencing token; None likewise.
        left: seconds after which it is free at the latest, if it does not change.
        note: free text of the holder's binding.
    """

    owner: str
    version: Version
    state: str
    since: datetime | None
    fence: int | None
    left: float
    note: str = ""
    handover: str = field(default="", repr=False)

    @property
    def host(self) -> str:
        return self.owner.rsplit(":", 2)[0]

    @property
    def pid(self) -> int | None:
        parts = self.owner.rsplit(":", 2)
        return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else None

    def __str__(self) -> str:
        if self.state == "unreadable":
            return f"a record that cannot be read (at most {self.left:.0f} s left)"
        facts = [f"since {stamp(self.since)}"] if self.since else []
        facts += [f"fence {self.fence}"] if self.fence is not None else []
        facts += [f"at most {self.left:.0f} s left"]
        facts += [self.state] if self.state != "held" else []
        facts += [printable(self.note)] if self.note else []
        return f"{printable(self.owner)} ({', '.join(facts)})"


def holder(content: Record | Foreign | Unreadable, version: Version, left: float) -> Holder:
    """Describe the holder that ``content`` names."""
    if isinstance(content, Unreadable):
        return Holder("", version, "unreadable", None, None, left)
    if isinstance(content, Foreign):
        return Holder(content.owner, version, "held", None, None, left)
    return Holder(
        content.owner,
        version,
        content.state.value,
        moment(content.acquired),
        content.fence,
        left,
        content.note,
        content.handover,
    )


def printable(text: str) -> str:
    """Return ``text`` from a record as one line that is not too long, for logs and messages."""
    cut = text if len(text) <= _LINE else f"{text[:_LINE]}…"
    if cut.isprintable():
        return cut
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def stamp(at: datetime, after: float = 0.0) -> str:
    """Write a moment, and ``after`` seconds later, as the record has it."""
    moment = at + timedelta(seconds=after) if after else at
    return moment.isoformat().replace("+00:00", "Z")


def moment(text: str) -> datetime | None:
    """Read a moment from a record; None if it is not one."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
