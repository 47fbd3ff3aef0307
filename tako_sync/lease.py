"""The handle of one hold: how long it is assured, and whether it is lost.

Every question is answered from the holder's own monotonic clock at the moment it is asked,
so a hung request, a starved or dead heartbeat or a stopped process cannot make anybody
believe in a hold that another may already have.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import datetime

from tako_sync import fork
from tako_sync.abc import Clock
from tako_sync.claim import Grant
from tako_sync.errors import BackendDeniedError, CtxCancelledError, LeaseLostError, LossReason
from tako_sync.events import Event, Lost
from tako_sync.flag import Flag
from tako_sync.record import Holder, moment


class Lease:
    """One hold of a lease, from the grant to its end.

    Args:
        generation: of the process that campaigned: a forked child is another.
        max_silence: seconds without a :meth:`beat` after which the hold is lost on purpose.

    Attributes:
        name: the lease's name.
        owner: the identity string in the record.
        fence: the fencing token: larger than that of any earlier hold, constant meanwhile.
        since: when it was acquired, by the wall clock.
        over: raised when the hold has ended, by its body's return or by loss. The heartbeat
            raises it at the deadline; :attr:`end` does not wait for that.
        freed: raised when the lease may be free again: after the release, or at the loss.
    """

    def __init__(
        self,
        name: str,
        grant: Grant,
        clock: Clock,
        tell: Callable[[Event], None],
        generation: int,
        max_silence: float = math.inf,
    ) -> None:
        self.name = name
        self.owner = grant.record.owner
        self.fence = grant.record.fence
        self.since: datetime | None = moment(grant.record.acquired)
        self.over = Flag()
        self.freed = Flag()
        self.handover = Flag()
        self.asked_by = ""
        """Who asked for a hand-over, once ``handover`` is raised."""
        self.trouble: BaseException | None = None
        """What the last renewal failed with; None after one that landed."""
        self._version = grant.version
        self._note = grant.record.note
        self._assured_from_sent = grant.deadline - grant.sent
        self._deadline = grant.deadline
        self._max_silence = max_silence
        self._heard = clock.monotonic()
        self._clock = clock
        self._tell = tell
        # Reentrant: a collection of garbage may strike inside, and drop a hold that was forgotten.
        self._lock = threading.RLock()
        self._end: BaseException | None = None
        self._generation = generation

    @property
    def end(self) -> BaseException | None:
        """Why the hold is over: a ``LeaseLostError``, or what says that it was given up."""
        if self._end is None:
            if self._generation != fork.generation():
                # No lock here: another thread of the parent may have held it at the fork.
                self._end = LeaseLostError(self.name, LossReason.FORKED, self.fence)
            elif self._clock.monotonic() >= self._until:
                self._expire()
        return self._end

    @property
    def loss(self) -> LeaseLostError | None:
        """The loss, once the hold is lost. Final: a lost hold is never revived."""
        return end if isinstance(end := self.end, LeaseLostError) else None

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the holder."""
        return self._generation != fork.generation()

    def remaining(self) -> float:
        """Return the seconds for which the hold is assured; 0 once it is over."""
        if self.end is not None:
            return 0.0
        return max(0.0, self._until - self._clock.monotonic())

    @property
    def _until(self) -> float:
        return min(self._deadline, self._heard + self._max_silence)

    def beat(self) -> None:
        """Take in that the body is alive: its silence begins anew."""
        if self.end is None:  # one that comes too late does not revive the hold
            self._heard = self._clock.monotonic()

    def holder(self) -> Holder:
        """Describe this hold as its record does."""
        return Holder(
            self.owner, self._version, "held", self.since, self.fence, self.remaining(), self._note
        )

    def prolong(self, sent: float) -> bool:
        """Take in a renewal that landed; return whether it came in time.

        Args:
            sent: the monotonic time at which the landed attempt was sent.
        """
        with self._lock:
            # Read inside the lock. Interleaving prevented: the answer arrives in time, this
            # thread is descheduled, a body asks after the deadline and is told "lost", and
            # then the deadline moves: the lost hold would be alive again.
            in_time = self._end is None and self._clock.monotonic() < self._until
            if in_time:
                self._deadline = max(self._deadline, sent + self._assured_from_sent)
                self.trouble = None
        return in_time

    def ask_for_handover(self, by: str) -> bool:
        """Pass a request on to the body; return whether it is the first of this hold."""
        if self.handover.is_set():
            return False
        self.asked_by = by
        self.handover.set()
        return True

    def lose(self, reason: LossReason) -> None:
        """End the hold as lost, unless it has ended already."""
        loss = LeaseLostError(self.name, reason, self.fence)
        self._finish(lambda: loss)

    def conclude(self) -> LeaseLostError | None:
        """End the hold as given up by its body; return the loss if it had been lost before.

        This is the verdict on the body's work: what is found later does not count.
        """
        end = self.end
        if end is None:
            given_up = CtxCancelledError(f'the hold of lease "{self.name}" has ended')
            end = self._finish(lambda: self._expired() or given_up)
        return end if isinstance(end, LeaseLostError) else None

    def _expire(self) -> None:
        self._finish(self._expired)

    def _expired(self) -> LeaseLostError | None:
        if self._clock.monotonic() < self._until:
            return None  # a renewal landed between the question and the lock
        if self._until < self._deadline:
            return LeaseLostError(self.name, LossReason.SILENT, self.fence)
        if self.trouble is None:
            return LeaseLostError(self.name, LossReason.EXPIRED, self.fence)
        denied = isinstance(self.trouble, BackendDeniedError)
        reason = LossReason.DENIED if denied else LossReason.UNREACHABLE
        loss = LeaseLostError(self.name, reason, self.fence)
        loss.__cause__ = self.trouble
        return loss

    def _finish(self, verdict: Callable[[], BaseException | None]) -> BaseException | None:
        """Set the end, once; the first to do so tells of it."""
        with self._lock:
            if self._end is not None:
                return self._end
            end = self._end = verdict()
        if isinstance(end, LeaseLostError):
            self._tell(Lost(self.name, self.fence, end.reason))
            self.freed.set()
        if end is not None:
            self.over.set()
            self.handover.forget()
        return end

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        state = "held" if self.end is None else "over"
        return f"<Lease {self.name} fence={self.fence} {state}>"
