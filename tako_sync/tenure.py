"""One hold from campaign to release: the only place that orders them.

Order at the end: the verdict, at the instant when the body has returned; then the heartbeat
is stopped and sends nothing more; then the release. So nothing is renewed after its release,
and no release comes before the body has really ended.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from typing import Final, TypeVar

from tako_sync.campaign import Campaign, longest_poll
from tako_sync.claim import Grant
from tako_sync.ctx import Ctx, enclosing_leases
from tako_sync.errors import EventLoopWarning, LeaseLostError, LossReason, NotReentrantError
from tako_sync.events import Acquired, Busy
from tako_sync.heartbeat import Heartbeat
from tako_sync.lease import Lease
from tako_sync.record import Holder, Identity
from tako_sync.release import Release
from tako_sync.rules import Held
from tako_sync.runtime import Runtime
from tako_sync.tenancy import Tenancy

T = TypeVar("T")

_MAYBE_STILL_OURS: Final = frozenset(
    {LossReason.EXPIRED, LossReason.UNREACHABLE, LossReason.DENIED, LossReason.BROKEN}
)
"""Losses after which the record may be our own still: releasing it frees the lease sooner."""


def acquire(
    runtime: Runtime, identity: Identity, parent: Ctx | None, timeout: float | None
) -> Tenure:
    """Campaign until held, or until the time is over; return the hold, not yet begun.

    Args:
        timeout: seconds; None for ever.

    Raises:
        NotReentrantError: the calling body holds this very lease.
        CampaignTimeoutError: the time is over.
        TakoError: the parent's cause, if it was cancelled; an error of the storage.
    """
    _warn_of_event_loop()
    _refuse_to_wait_for_oneself(runtime, identity)
    started = runtime.clock.monotonic()
    limit = math.inf if timeout is None else started + timeout
    campaign = Campaign(runtime, identity, parent=parent, limit=limit, timeout=timeout or math.inf)
    return campaign.until_held(
        lambda grant: _tenure(runtime, identity, parent, campaign, grant, started)
    )


def acquire_at_once(runtime: Runtime, identity: Identity, parent: Ctx | None) -> Tenure | Holder:
    """Make one attempt; return the hold, not yet begun, or who has it.

    Raises:
        BackendUnavailableError: whether it is held could not be settled.
        RecordUnreadableError: what stands there cannot be read, and has not aged.
        TakoError: the parent's cause, if it was cancelled; an error of the storage.
    """
    _warn_of_event_loop()
    if parent is not None:
        parent.check()
    started = runtime.clock.monotonic()
    campaign = Campaign(runtime, identity, parent=parent)
    found = campaign.once()
    if isinstance(found, Held):
        runtime.tell(Busy(identity.name, found.holder))
        return found.holder
    return _tenure(runtime, identity, parent, campaign, found, started)


def _tenure(
    runtime: Runtime,
    identity: Identity,
    parent: Ctx | None,
    campaign: Campaign,
    grant: Grant,
    started: float,
) -> Tenure:
    waited = runtime.clock.monotonic() - started
    fence = grant.record.fence
    runtime.tell(Acquired(identity.name, fence, campaign.how, waited, campaign.contended))
    return Tenure(runtime, identity, grant, parent)


class Tenure:
    """One hold. ``begin``, run the body under ``ctx``, ``conclude``; ``abandon`` in any case.

    Attributes:
        ctx: what the body receives.
    """

    def __init__(
        self, runtime: Runtime, identity: Identity, grant: Grant, parent: Ctx | None
    ) -> None:
        self._runtime = runtime
        self._identity = identity
        self._grant = grant
        self._known = runtime.known(identity.key)
        self.lease = Lease(identity.name, grant, runtime.clock, runtime.tell)
        self.ctx = Ctx(runtime.clock, parent=parent, lease=self.lease)
        self._tenancy = Tenancy(grant)
        self._heartbeat = Heartbeat(runtime, identity, self.lease, self._tenancy, grant.sent)
        self._releasing = False
        self._enter_the_books()

    def begin(self) -> None:
        """Start the heartbeat."""
        self._heartbeat.start()

    def _enter_the_books(self) -> None:
        now = self._runtime.clock.monotonic()
        known = self._known
        if known.ended is None or now - known.ended >= longest_poll(self._runtime):
            known.streak = None  # others have had the time of a poll
        if known.streak is None:
            known.streak = now
        known.lease = self.lease

    def conclude(self, outcome: str) -> LeaseLostError | None:
        """End the hold and give the lease back; return the loss, if it was lost before.

        Args:
            outcome: how the body ended, for the record.
        """
        loss = self.lease.conclude()
        self._give_back("lost" if loss is not None else outcome)
        return loss

    def abandon(self) -> None:
        """See to it that nothing of the hold goes on. Does nothing after :meth:`conclude`.

        It is the second chance when an exception (Ctrl-C) strikes inside that.
        """
        if self._releasing:
            return
        self._heartbeat.signal()
        self.lease.conclude()
        if not self.lease.forked:
            self._runtime.clock.spawn(
                lambda: self._give_back("abandoned"), f"tako-release-{self.lease.name}"
            )

    def desert(self) -> None:
        """End the hold as a process that dies: no renewal any more, and no release."""
        self._heartbeat.stop()
        self._releasing = True
        self.lease.conclude()
        if self._known.lease is self.lease:
            self._known.lease = None
        self.lease.freed.set()

    def _give_back(self, outcome: str) -> None:
        if self.lease.forked:
            return  # the lease is the parent's, as is every thread that serves it
        self._heartbeat.stop()
        self._releasing = True
        free = None
        try:
            loss = self.lease.loss
            if loss is None or loss.reason in _MAYBE_STILL_OURS:
                free = Release(
                    self._runtime,
                    self._identity,
                    self.lease,
                    self._tenancy,
                    outcome,
                    self._grant.sent,
                ).run()
        finally:
            known = self._known
            if known.lease is self.lease:
                known.lease = None
                known.free = free
                known.ended = self._runtime.clock.monotonic()
            self.lease.freed.set()


def run(tenure: Tenure, body: Callable[[Ctx], T]) -> T:
    """Run ``body`` under the hold; return its value, or raise what it raised.

    Raises:
        LeaseLostError: the body returned, but the lease had been lost; it carries the value.
    """
    try:
        try:
            tenure.begin()
            leave = tenure.ctx.enter()
            try:
                value = body(tenure.ctx)
            finally:
                leave()
        except BaseException as error:
            note_loss(error, tenure.conclude("raised"))
            raise
        loss = tenure.conclude("returned")
        if loss is not None:
            loss.value = value
            raise loss.with_traceback(None)
        return value
    finally:
        tenure.abandon()


def note_loss(error: BaseException, loss: LeaseLostError | None) -> None:
    """Attach ``loss`` as a note to the body's own ``error``, which goes on as it is."""
    if loss is None or error is loss:
        return
    note = f"{loss} (reason: {loss.reason.value}, fence: {loss.fence})"
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        setattr(error, "__notes__", [*getattr(error, "__notes__", []), note])  # noqa: B010


def _refuse_to_wait_for_oneself(runtime: Runtime, identity: Identity) -> None:
    held = runtime.known(identity.key).lease
    if held is not None and held.end is None and any(held is mine for mine in enclosing_leases()):
        raise NotReentrantError(
            f'lease "{identity.name}" is held by the body that asks for it: it would wait for '
            "itself for ever. Locks are not reentrant; pass the ctx on instead, or use try_do"
        )


_warned = False


def _warn_of_event_loop() -> None:
    global _warned
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or _warned:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    _warned = True
    warnings.warn(
        "tako_sync blocks the thread that calls it, and an event loop is running in this one; "
        "write: await asyncio.to_thread(relock.do, body)",
        EventLoopWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """Return the ``stacklevel`` that makes a warning of who calls this point at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tako_sync."):
        level, frame = level + 1, frame.f_back
    return level
