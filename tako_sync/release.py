"""Giving a lease back: for a moment in the caller's time, then in a thread, until it is settled.

A release overwrites, never deletes: the fence lives in the record. It can only ever touch a
record of this very hold.
"""

from __future__ import annotations

from tako_sync.errors import BackendUnavailableError, TakoError, VersionConflictError
from tako_sync.events import Released, ReleaseUnconfirmed
from tako_sync.flag import Flag
from tako_sync.lease import Lease
from tako_sync.look import look
from tako_sync.record import Identity
from tako_sync.retry import Backoff, Pause, until_settled
from tako_sync.rules import Free
from tako_sync.runtime import Runtime, log, nonce
from tako_sync.tenancy import Ending, Tenancy


class _OutOfTime(Exception):
    pass


class Release:
    """The release of one hold.

    Args:
        runtime, identity, lease, tenancy: the hold.
        began: the monotonic time of the grant.
    """

    def __init__(
        self,
        runtime: Runtime,
        identity: Identity,
        lease: Lease,
        tenancy: Tenancy,
        began: float,
    ) -> None:
        self._runtime = runtime
        self._clock = runtime.clock
        self._policy = runtime.policy
        self._identity = identity
        self._lease = lease
        self._tenancy = tenancy
        self._began = began
        self._outcome = ""
        self._error: Exception | None = None
        self._backoff = Backoff(self._clock, self._policy.ttl / 300, self._policy.poll)
        self._struck: Exception | None = None
        self._settled = False
        self._goes_on = False
        self._owed = 0.0  # seconds of the pause that did not fit into the caller's time

    def run(self, outcome: str) -> Free | None:
        """Release, for a ttl/30 at most; return what is then known to be free.

        If it is not settled by then, a thread of its own goes on. The heartbeat has been stopped.
        Called again, where Ctrl-C cut the first call short, it does what is left to do.

        Args:
            outcome: how the body ended, for the record.
        """
        if self._settled or self._goes_on:
            return None
        self._outcome = outcome
        try:
            return self._until(self._clock.monotonic() + self._policy.ttl / 30)
        except _OutOfTime:
            return None
        finally:
            if not self._settled:  # also when Ctrl-C ended the moment
                self._go_on_in_a_thread()

    def _go_on_in_a_thread(self) -> None:
        self._goes_on = True
        try:
            self._clock.spawn(self._go_on, f"tako-release-{self._lease.name}")
        except RuntimeError as error:  # no more threads, or the interpreter is shutting down
            self._unconfirmed(error)

    def _go_on(self) -> None:
        try:
            # Beyond this, the record has aged: it is free, or somebody else's.
            limit = self._clock.monotonic() + self._tenancy.record.ttl
            self._clock.wait(Flag(), self._owed)
            self._until(limit)
        except _OutOfTime:
            self._unconfirmed(self._error)

    def _until(self, limit: float) -> Free | None:
        def attempt() -> Free | Pause | None:
            return self._attempt(limit)

        def sleep(seconds: float) -> None:
            if self._clock.monotonic() + seconds >= limit:
                self._owed = seconds
                raise _OutOfTime
            self._clock.wait(Flag(), seconds)

        return until_settled(attempt, sleep)

    def _attempt(self, limit: float) -> Free | Pause | None:
        try:
            return self._write(limit)
        except BackendUnavailableError as error:
            self._error = error
            return self._backoff.failed(error.retry_after)
        except Exception as error:  # noqa: BLE001 - denied, a fault of the backend, or a signal's
            if not isinstance(error, TakoError) and self._struck is None:
                # Perhaps what a signal handler raised, such as Celery's soft time limit. The body
                # has ended: its outcome counts, and the lease is to be free.
                self._struck = error
                return Pause(0.0)
            self._unconfirmed(error)  # trying again cannot help
            return None

    def _write(self, limit: float) -> Free | Pause | None:
        draft = self._tenancy.release(nonce(), self._clock.wall(), self._outcome)
        try:
            version = self._runtime.requests.write(
                self._identity.key,
                draft.record.encode(),
                expect=draft.expect,
                within=self._within(limit),
            )
        except VersionConflictError:
            return self._look(limit)
        return self._confirmed(self._tenancy.released(draft, version))

    def _look(self, limit: float) -> Free | Pause | None:
        before = self._tenancy.version
        sighting = look(self._runtime, self._identity, within=self._within(limit))
        ending = self._tenancy.saw_at_release(sighting)
        if ending is Ending.AGAIN:
            return Pause(0.0) if self._tenancy.version != before else self._backoff.failed()
        if ending is Ending.DONE:
            return self._confirmed(Free("released", sighting.version, sighting.content))
        self._settled = True  # somebody else's, or nothing: it was released long ago
        return None

    def _within(self, limit: float) -> float:
        return min(self._policy.request_timeout, limit - self._clock.monotonic())

    def _confirmed(self, free: Free) -> Free:
        self._settled = True
        if self._struck is not None:
            log.warning("lease %s: released, in spite of %r", self._lease.name, self._struck)
        held = self._clock.monotonic() - self._began
        self._runtime.tell(Released(self._lease.name, self._lease.fence, held))
        return free

    def _unconfirmed(self, error: Exception | None) -> None:
        self._settled = True
        self._runtime.tell(ReleaseUnconfirmed(self._lease.name, self._lease.fence, error))
