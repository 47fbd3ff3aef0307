"""What happens to a lease, as values: for listeners, metrics and the log.

One event a change of state, none a poll. Each has a ``level`` of :mod:`logging` and a
``message``, and is logged on the logger ``tako_sync``. What else appears there are faults in the
caller's own code (listeners, callbacks, backends) and the word that no backend is configured.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import ClassVar

from attrs import frozen

from tako_sync.errors import LeaseLostError, LossReason
from tako_sync.record import Holder, printable, stamp


@frozen
class Event:
    """The base of all events.

    Attributes:
        lease: the lease's name.
    """

    level: ClassVar[int] = logging.INFO
    lease: str

    @property
    def message(self) -> str:
        raise NotImplementedError


@frozen
class Busy(Event):
    """One attempt found the lease held."""

    level: ClassVar[int] = logging.DEBUG
    holder: Holder

    @property
    def message(self) -> str:
        return f'lease "{self.lease}" is busy: held by {self.holder}'


@frozen
class Waiting(Event):
    """A campaign found the lease held and goes on polling."""

    holder: Holder

    @property
    def message(self) -> str:
        return f'waiting for lease "{self.lease}": held by {self.holder}'


@frozen
class Acquired(Event):
    """A hold began.

    Attributes:
        fence: its fencing token.
        how: ``new``, ``released``, ``expired`` (a takeover) or ``unreadable`` (likewise).
        waited: seconds from the call to the grant.
        contended: whether the campaign had to wait for another holder.
    """

    fence: int
    how: str
    waited: float
    contended: bool

    @property
    def level(self) -> int:  # type: ignore[override]  # a quiet acquisition is no news
        return logging.INFO if self.contended or self.how == "expired" else logging.DEBUG

    @property
    def message(self) -> str:
        after = f"after {self.waited:.1f} s, " if self.contended else ""
        return f'acquired lease "{self.lease}" ({after}{self.how}, fence {self.fence})'


@frozen
class UnreadableTakenOver(Event):
    """A record that could not be read stood unchanged for long enough and was replaced."""

    level: ClassVar[int] = logging.WARNING
    key: str
    problem: str

    @property
    def message(self) -> str:
        return f'lease "{self.lease}": took over an unreadable record ({self.key}: {self.problem})'


@frozen
class Unreachable(Event):
    """The storage stopped answering, for a campaign or for a heartbeat."""

    level: ClassVar[int] = logging.WARNING
    doing: str
    error: Exception

    @property
    def message(self) -> str:
        fault = f"{type(self.error).__name__}: {self.error}"
        return f'lease "{self.lease}": the storage fails while {self.doing} ({fault}); retrying'


@frozen
class Recovered(Event):
    """The storage answers again."""

    doing: str

    @property
    def message(self) -> str:
        return f'lease "{self.lease}": the storage answers again while {self.doing}'


@frozen
class Renewed(Event):
    """A heartbeat landed.

    Attributes:
        late: seconds after it was due.
    """

    level: ClassVar[int] = logging.DEBUG
    fence: int
    late: float

    @property
    def message(self) -> str:
        return f'renewed lease "{self.lease}" (fence {self.fence}, {self.late:.3f} s late)'


@frozen
class HandoverRequested(Event):
    """Someone asked the holder to hand over; its ctx is cancelled, the lease is kept."""

    fence: int
    by: str

    @property
    def message(self) -> str:
        return (
            f'lease "{self.lease}": {printable(self.by)} asks for a hand-over (fence {self.fence})'
        )


@frozen
class Lost(Event):
    """A hold ended without a release."""

    level: ClassVar[int] = logging.ERROR
    fence: int
    reason: LossReason

    @property
    def message(self) -> str:
        return f'lease "{self.lease}" was lost while held ({self.reason.value}, fence {self.fence})'


@frozen
class Released(Event):
    """A hold ended and the storage says so.

    Attributes:
        held: seconds from the grant to the confirmed release.
    """

    level: ClassVar[int] = logging.DEBUG
    fence: int
    held: float

    @property
    def message(self) -> str:
        return f'released lease "{self.lease}" after {self.held:.3f} s (fence {self.fence})'


@frozen
class ReleaseUnconfirmed(Event):
    """A release could not be confirmed; the lease becomes free by its age."""

    level: ClassVar[int] = logging.WARNING
    fence: int
    error: Exception | None

    @property
    def message(self) -> str:
        fault = f"{type(self.error).__name__}: {self.error}" if self.error else "no answer"
        return (
            f'the release of lease "{self.lease}" (fence {self.fence}) could not be confirmed '
            f"({fault}); it becomes free by its age"
        )


@frozen
class SingletonReturned(Event):
    """A Singleton's loop has ended, for whatever reason, and is to be restarted.

    Attributes:
        singleton: its name.
        pause: least seconds until this process campaigns again; others may take over meanwhile.
        error: what it raised, or its loss; None if it returned.
    """

    singleton: str
    pause: float
    error: BaseException | None

    @property
    def level(self) -> int:  # type: ignore[override]
        return logging.INFO if self.error is None else logging.ERROR

    @property
    def message(self) -> str:
        ended = "returned"
        if isinstance(self.error, LeaseLostError):
            ended = f"lost its lease ({self.error.reason.value})"
        elif self.error is not None:
            ended = f"failed with {type(self.error).__name__}: {printable(str(self.error))}"
        return f"♾ singleton {self.singleton} {ended} — restarting in {self.pause:g}s."


@frozen
class SingletonRefused(Event):
    """A Singleton cannot campaign, by an error that someone has to mend. Told once, until it can.

    Attributes:
        singleton: its name.
        error: why.
    """

    level: ClassVar[int] = logging.ERROR
    singleton: str
    error: Exception

    @property
    def message(self) -> str:
        fault = f"{type(self.error).__name__}: {self.error}"
        return f"singleton {self.singleton} cannot campaign ({fault}); trying again for ever"


@frozen
class SingletonDown(Event):
    """A Singleton's loop has not been running anywhere for its ``down_after``.

    Attributes:
        singleton: its name.
        reason: what is known of why.
    """

    level: ClassVar[int] = logging.CRITICAL
    singleton: str
    reason: str

    @property
    def message(self) -> str:
        return f"singleton {self.singleton} is down: {self.reason}"


@frozen
class SingletonUp(Event):
    """A Singleton that was down runs again, somewhere."""

    level: ClassVar[int] = logging.WARNING
    singleton: str

    @property
    def message(self) -> str:
        return f"singleton {self.singleton} is up again"


@frozen
class CronRan(Event):
    """A slot of a Cron was run here.

    Attributes:
        cron: its name.
        slot: when it was due.
        seconds: how long it took.
        error: what it raised, or its loss; None if it returned.
    """

    cron: str
    slot: datetime
    seconds: float
    error: BaseException | None

    @property
    def level(self) -> int:  # type: ignore[override]
        return logging.INFO if self.error is None else logging.ERROR

    @property
    def message(self) -> str:
        ended = f"ran for {self.seconds:.3f} s"
        if isinstance(self.error, LeaseLostError):
            ended = f"lost its lease ({self.error.reason.value}) after {self.seconds:.3f} s"
        elif self.error is not None:
            ended = f"failed with {type(self.error).__name__}: {printable(str(self.error))}"
        return f"cron {self.cron}, due {stamp(self.slot)}: {ended}"


@frozen
class CronMissed(Event):
    """Slots of a Cron passed without being run by this process, or, with single flight, by any.

    Attributes:
        cron: its name.
        slots: when they were due; the first hundred.
        why: what this process did instead.
        until: when the last of them was due, if there are more than a hundred.
    """

    level: ClassVar[int] = logging.WARNING
    cron: str
    slots: tuple[datetime, ...]
    why: str
    until: datetime | None = None

    @property
    def message(self) -> str:
        more = "" if self.until is None else f", and all up to {stamp(self.until)}"
        return f"cron {self.cron} missed {', '.join(map(stamp, self.slots))}{more}: {self.why}"


@frozen
class CronAhead(Event):
    """A Cron is run no more until a time that is more than a minute ahead of this process's clock.

    A slot of that time was begun: by a process whose clock is ahead, or was. Slots only go forward,
    so those up to then are not run. Told once for each such slot.

    Attributes:
        cron: its name.
        slot: that slot.
        ahead: seconds by which it is ahead.
        by: who began it, if the record tells.
    """

    level: ClassVar[int] = logging.ERROR
    cron: str
    slot: datetime
    ahead: float
    by: str = ""

    @property
    def message(self) -> str:
        begun = f"was begun{f' by {printable(self.by)}' if self.by else ''}"
        return (
            f"cron {self.cron}: the slot of {stamp(self.slot)} {begun}, {self.ahead:.0f} s ahead "
            "of this clock; nothing is run before that. If a clock was wrong: set it right, and "
            "see Cron.forget"
        )


@frozen
class CronCutShort(Event):
    """A slot's run was cut short, by a crash or a shutdown, and is not repeated.

    Attributes:
        cron: its name.
        slot: when it was due.
        tries: how often it was begun.
    """

    level: ClassVar[int] = logging.ERROR
    cron: str
    slot: datetime
    tries: int

    @property
    def message(self) -> str:
        return (
            f"cron {self.cron}, due {stamp(self.slot)}: was cut short (begun {self.tries} times), "
            "and is not run again"
        )


@frozen
class CronRefused(Event):
    """A Cron's slot could not be run, by an error of the storage. Told once, until one is.

    Attributes:
        cron: its name.
        error: why.
    """

    level: ClassVar[int] = logging.ERROR
    cron: str
    error: Exception

    @property
    def message(self) -> str:
        fault = f"{type(self.error).__name__}: {self.error}"
        return f"cron {self.cron} cannot tell whether it is to run ({fault})"
