"""The repeated renewal of one hold, in a thread of its own that is never held up by a request.

It renews each ttl/3, tries again soon after a failure, and ends the hold at its deadline or
when a look shows that it is lost. What a look means is decided in :mod:`tako_sync.tenancy`.
"""

from __future__ import annotations

import logging
from typing import Final

from tako_sync.abc import Task
from tako_sync.errors import BackendError, BackendUnavailableError, VersionConflictError
from tako_sync.events import HandoverRequested, Recovered, Renewed, Unreachable
from tako_sync.flag import Flag
from tako_sync.lease import Lease
from tako_sync.look import look
from tako_sync.record import Identity
from tako_sync.retry import Backoff, Pause, until_settled
from tako_sync.runtime import Runtime, nonce
from tako_sync.tenancy import Gone, Landed, Tenancy

_EARLY: Final = 0.05
"""A beat comes up to this share of the interval early, so that the many leases of a process
that were acquired at one instant are not renewed at one instant. Never late: k beats have
been sent by k intervals."""

log: Final = logging.getLogger("tako_sync")


class Heartbeat:
    """Keeps one hold alive until stopped.

    Args:
        runtime: the binding.
        identity: the lease's.
        lease: the hold, told of each renewal and of its loss.
        tenancy: the hold's record; nobody else uses it until :meth:`stop` has returned.
        sent: when the granting write was sent, on the monotonic clock.
    """

    def __init__(
        self, runtime: Runtime, identity: Identity, lease: Lease, tenancy: Tenancy, sent: float
    ) -> None:
        self._runtime = runtime
        self._clock = runtime.clock
        self._policy = runtime.policy
        self._identity = identity
        self._lease = lease
        self._tenancy = tenancy
        self._first = sent
        self._beats = 0
        self._due = 0.0
        self._stop = Flag()
        self._backoff = Backoff(self._clock, self._policy.ttl / 30, self._policy.ttl / 15)
        self._told = False  # that the storage fails
        self._task: Task | None = None
        self._patience = self._policy.request_timeout

    def start(self) -> None:
        self._due = self._next_due()
        first = self._due - self._clock.monotonic()
        self._task = self._clock.after(
            first, self._run, f"tako-heartbeat-{self._lease.name}", self._stop
        )

    def stop(self) -> None:
        """Send nothing more. Waits for a renewal under way, once, at most a request timeout."""
        self._stop.set()
        if self._task is not None:
            # Not once more, if Ctrl-C ends the wait: who strikes does not want to wait.
            patience, self._patience = self._patience, 0.0
            self._task.join(patience)
            self._task = None

    def signal(self) -> None:
        """Send nothing more, without waiting."""
        self._stop.set()

    def _run(self) -> None:
        while not self._over():
            try:
                try:
                    self._beat()
                except BaseException as error:
                    # Whatever it is: a dead heartbeat under a live hold would be worse.
                    self._lease.trouble = error
                    log.exception("heartbeat of lease %s failed; trying again", self._lease)
                    self._sleep(self._backoff.failed().seconds)
            except BaseException:  # noqa: BLE001, S110 - struck while dealing with the first
                pass

    def _beat(self) -> None:
        """Wait until the next renewal is due, and renew until it is settled."""
        while (now := self._clock.monotonic()) < self._due:
            # The sooner of the two: nobody else wakes those who wait on the ctx.
            self._clock.wait(self._stop, min(self._due - now, self._lease.remaining()))
            if self._over():
                return
        until_settled(self._renew, self._sleep)
        self._due = self._next_due()

    def _over(self) -> bool:
        return self._stop.is_set() or self._lease.end is not None

    def _next_due(self) -> float:
        """Return the next moment of the grid that the grant began, minus a jitter."""
        interval = self._policy.heartbeat
        elapsed = self._clock.monotonic() - self._first
        self._beats = max(self._beats + 1, int(elapsed / interval) + 1)
        return self._first + interval * (self._beats - _EARLY * self._clock.random())

    def _renew(self) -> bool | Pause:
        """Send one renewal; return True once it is settled, for better or worse."""
        if self._over():
            return True
        sent = self._clock.monotonic()
        due = self._first + self._beats * self._policy.heartbeat
        draft = self._tenancy.renewal(nonce(), sent, self._clock.wall())
        within = min(self._policy.request_timeout, self._lease.remaining())
        try:
            version = self._runtime.requests.write(
                self._identity.key, draft.record.encode(), expect=draft.expect, within=within
            )
            standing = self._tenancy.landed(draft, version)
        except VersionConflictError:
            return self._after_conflict(due)
        except BaseException as error:  # noqa: BLE001 - SystemExit too is no reason to stop
            return self._failed(error)
        return self._landed(standing, due)

    def _after_conflict(self, due: float) -> bool | Pause:
        if self._over():
            return True
        within = min(self._policy.request_timeout, self._lease.remaining())
        try:
            sighting = look(self._runtime, self._identity, within=within)
        except BaseException as error:  # noqa: BLE001
            return self._failed(error)
        before = self._tenancy.version
        standing = self._tenancy.saw(sighting)
        if isinstance(standing, Landed):
            return self._landed(standing, due)
        if isinstance(standing, Gone):
            self._lease.lose(standing.reason)
            return True
        self._look_for_handover()
        if self._tenancy.version != before:
            return Pause(0.0)
        return self._failed(BackendUnavailableError("refused, though nobody has changed it"))

    def _landed(self, standing: Landed, due: float) -> bool:
        if not self._lease.prolong(standing.sent):
            return True
        self._backoff.reset()
        if self._told:
            self._told = False
            self._runtime.tell(Recovered(self._lease.name, "renewing"))
        late = max(0.0, standing.sent - due)
        self._runtime.tell(Renewed(self._lease.name, self._lease.fence, late))
        self._look_for_handover()
        return True

    def _failed(self, error: BaseException) -> Pause:
        self._lease.trouble = error
        if not self._told:
            self._told = True
            if isinstance(error, BackendError):
                self._runtime.tell(Unreachable(self._lease.name, "renewing", error))
            else:
                log.error(
                    "heartbeat of lease %s: a fault of the backend", self._lease, exc_info=error
                )
        return self._backoff.failed(getattr(error, "retry_after", 0.0))

    def _look_for_handover(self) -> None:
        by = self._tenancy.record.handover
        if by and not self._lease.handover.is_set():
            # In a thread of its own: it calls what the body registered, which may take its time,
            # and the lease must be renewed meanwhile.
            self._clock.spawn(lambda: self._hand_on(by), f"tako-handover-{self._lease.name}")

    def _hand_on(self, by: str) -> None:
        if self._lease.ask_for_handover(by):
            self._runtime.tell(HandoverRequested(self._lease.name, self._lease.fence, by))

    def _sleep(self, seconds: float) -> None:
        left = self._lease.remaining()
        last_chance = left - self._policy.request_timeout
        if seconds > last_chance > 0:
            # As where a storage asks for more time (429) than is left: one more attempt can save
            # the hold, a pause cannot.
            seconds = last_chance
        self._clock.wait(self._stop, min(seconds, left))
