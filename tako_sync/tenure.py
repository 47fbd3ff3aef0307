"""One hold from campaign to release: the only place that orders them.

Order at the end: the verdict, at the instant when the body has returned; then the heartbeat
is stopped and sends nothing more; then the release. So nothing is renewed after its release,
and no release comes before the body has really ended.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Final, TypeVar

from tako_sync import checks, fork
from tako_sync.campaign import Campaign, longest_poll
from tako_sync.claim import Grant, Plan
from tako_sync.ctx import Ctx, enclosing_leases
from tako_sync.errors import (
    CampaignTimeoutError,
    EventLoopWarning,
    LeaseLostError,
    LossReason,
    NotReentrantError,
)
from tako_sync.events import Acquired, Busy
from tako_sync.heartbeat import Heartbeat
from tako_sync.lease import Lease
from tako_sync.record import Holder, Identity
from tako_sync.release import Release
from tako_sync.rules import memo_of
from tako_sync.runtime import Runtime
from tako_sync.tenancy import Tenancy

T = TypeVar("T")

_MAYBE_STILL_OURS: Final = frozenset(
    {
        LossReason.EXPIRED,
        LossReason.UNREACHABLE,
        LossReason.DENIED,
        LossReason.BROKEN,
        LossReason.SILENT,
    }
)
"""Losses after which the record may be our own still: releasing it frees the lease sooner."""


class Tenure:
    """One hold, from its campaign to its release; made before the campaign, used once.

    A ``with`` block around campaign and body: from the moment when a grant is known, somebody
    is there to give it back, wherever an exception (Ctrl-C) strikes.

    Args:
        runtime, identity: the lease.
        parent: the caller's ctx; its end ends the campaign and cancels the body's ctx.
        max_silence: seconds; as of :class:`~tako_sync.lease.Lease`.
        plan: as of :class:`~tako_sync.claim.Claim`.
    """

    ctx: Ctx
    """What the body receives, once held."""
    lease: Lease
    """The hold, once held."""
    _tenancy: Tenancy
    _heartbeat: Heartbeat
    _release: Release

    def __init__(
        self,
        runtime: Runtime,
        identity: Identity,
        parent: Ctx | None,
        max_silence: float = math.inf,
        plan: Plan = memo_of,
    ) -> None:
        self._runtime = runtime
        self._identity = identity
        self._parent = parent
        self._max_silence = max_silence
        self._plan = plan
        self._known = runtime.known(identity.key)
        self._started = runtime.clock.monotonic()
        self._generation = fork.generation()
        self._taken = False
        self._over = False

    # --- The campaign

    def campaign(self, timeout: float | None) -> None:
        """Campaign until held; return then, the hold not yet begun.

        Args:
            timeout: seconds; None for ever; 0 for one attempt, with the errors of :meth:`attempt`.

        Raises:
            NotReentrantError: the calling body holds this very lease.
            CampaignTimeoutError: the time is over.
            TakoError: the parent's cause, if it was cancelled; an error of the storage.
        """
        if timeout == 0:
            holder = self.attempt()
            if holder is not None:
                raise CampaignTimeoutError(self._identity.name, 0.0, holder)
            return
        _warn_of_event_loop()
        _refuse_to_wait_for_oneself(self._runtime, self._identity)
        self._campaign(math.inf if timeout is None else timeout).until_held(self._take)

    def attempt(self) -> Holder | None:
        """Make one attempt; return who has the lease, or None: held, the hold not yet begun.

        Raises:
            BackendUnavailableError: whether it is held could not be settled.
            RecordUnreadableError: what stands there cannot be read, and has not aged.
            TakoError: the parent's cause, if it was cancelled; an error of the storage.
        """
        _warn_of_event_loop()
        if self._parent is not None:
            self._parent.check()
        held = self._campaign(math.inf).once(self._take)
        if held is None:
            return None
        self._runtime.tell(Busy(self._identity.name, held.holder))
        return held.holder

    def _campaign(self, timeout: float) -> Campaign:
        return Campaign(
            self._runtime,
            self._identity,
            parent=self._parent,
            limit=self._started + timeout,
            timeout=timeout,
            plan=self._plan,
        )

    def _take(self, grant: Grant, campaign: Campaign) -> None:
        runtime, name = self._runtime, self._identity.name
        self.lease = lease = Lease(
            name, grant, runtime.clock, runtime.tell, self._generation, self._max_silence
        )
        self.ctx = Ctx(runtime.clock, parent=self._parent, lease=lease)
        self._tenancy = tenancy = Tenancy(grant)
        self._heartbeat = Heartbeat(runtime, self._identity, lease, tenancy, grant.sent)
        self._release = Release(runtime, self._identity, lease, tenancy, grant.sent)
        self._taken = True  # from here on, it is this object that gives it back
        self._enter_the_books(lease)
        waited = runtime.clock.monotonic() - self._started
        runtime.tell(Acquired(name, lease.fence, campaign.how, waited, campaign.contended))

    def _enter_the_books(self, lease: Lease) -> None:
        now = self._runtime.clock.monotonic()
        known = self._known
        if known.ended is None or now - known.ended >= longest_poll(self._runtime):
            known.streak = None  # others have had the time of a poll
        if known.streak is None:
            known.streak = now
        known.lease = lease

    # --- The hold

    def begin(self) -> None:
        """Start the heartbeat."""
        self.lease.beat()
        self._heartbeat.start()

    def run(self, body: Callable[[Ctx], T]) -> T:
        """Run ``body`` under the hold; return its value, or raise what it raised.

        Raises:
            LeaseLostError: the body returned, but the lease had been lost; it carries the value.
        """
        try:
            self.begin()
            leave = self.ctx.enter()
            try:
                value = checks.finished(body(self.ctx))
            finally:
                leave()
        except BaseException as error:
            note_loss(error, self.conclude("raised"))
            raise
        loss = self.conclude("returned")
        if loss is not None:
            loss.value = value
            raise loss.with_traceback(None)
        return value

    @property
    def memo(self) -> str:
        """What the record remembers of this hold, for the holds that follow."""
        return self._tenancy.memo

    def remember(self, memo: str) -> None:
        """Have the next renewal, and the release, remember ``memo``, the text of a JSON object."""
        self._tenancy.memo = memo

    def conclude(self, outcome: str) -> LeaseLostError | None:
        """End the hold and give the lease back; return the loss, if it was lost before.

        Args:
            outcome: how the body ended, for the record.
        """
        loss = self.lease.conclude()
        self._give_back("lost" if loss is not None else outcome)
        return loss

    def __enter__(self) -> Tenure:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """See to it that nothing of the hold goes on: the second chance after :meth:`conclude`.

        In the caller's time, for a moment, as the process may be about to end.
        """
        if self._taken and not self._over:
            try:
                self.conclude("abandoned")
            finally:
                self.abandon()

    def abandon(self) -> None:
        """See to it that nothing of the hold goes on, without waiting for anything."""
        if not self._taken or self._over:
            return
        self._heartbeat.signal()
        self.lease.conclude()
        if self.lease.forked:
            return
        try:
            self._runtime.clock.spawn(
                lambda: self._give_back("abandoned"), f"tako-release-{self.lease.name}"
            )
        except RuntimeError:  # no more threads, or the interpreter is shutting down
            self._give_back("abandoned")

    def desert(self) -> None:
        """End the hold as a process that dies: no renewal any more, and no release."""
        self._heartbeat.stop()
        self.lease.conclude()
        if self._known.lease is self.lease:
            self._known.lease = None
        self.lease.freed.set()
        self._over = True

    def _give_back(self, outcome: str) -> None:
        if self.lease.forked:
            return  # the lease is the parent's, as is every thread that serves it
        self._heartbeat.stop()
        free = None
        try:
            loss = self.lease.loss
            if loss is None or loss.reason in _MAYBE_STILL_OURS:
                free = self._release.run(outcome)
        finally:
            known = self._known
            if known.lease is self.lease:
                known.lease = None
                known.free = free
                known.ended = self._runtime.clock.monotonic()
            self.lease.freed.set()
        self._over = True  # not if Ctrl-C struck in there: then it is done once more


def note_loss(error: BaseException, loss: LeaseLostError | None) -> None:
    """Attach ``loss`` as a note to the body's own ``error``, which goes on as it is."""
    if loss is None or error is loss:
        return
    note = f"{loss} (reason: {loss.reason.value}, fence: {loss.fence})"
    with contextlib.suppress(Exception):  # it is the user's: it may have no room for a note
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
