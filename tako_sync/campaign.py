"""Trying until held: looks, writes, doubts, pauses, and the line of local waiters.

What a look means and what may be written is decided in :mod:`tako_sync.claim`; here is the
order of requests and the waiting between them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final, cast

from tako_sync import fork, record, rules
from tako_sync.claim import Claim, Draft, Finding, Grant, OwnBroken, Plan
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    CampaignTimeoutError,
    CtxCancelledError,
    RecordUnreadableError,
    TakoError,
    VersionConflictError,
)
from tako_sync.events import Recovered, Unreachable, UnreadableTakenOver, Waiting
from tako_sync.flag import Flag
from tako_sync.lease import Lease
from tako_sync.look import look, look_to_judge
from tako_sync.record import Holder, Identity, Unreadable
from tako_sync.retry import Backoff, Pause, until_settled
from tako_sync.rules import Free, Held
from tako_sync.runtime import Known, Runtime, log, nonce
from tako_sync.snapshot import Version

_BACK_TO_BACK: Final = 10.0
"""Seconds of holding a name back to back after which a process leaves a poll free for others."""
_RACES: Final = 3
"""Writes that one attempt may lose to others before it pauses: the name is much wanted."""


Taker = Callable[[Grant, "Campaign"], object]
"""Takes over a grant: from its return on, the campaign does not give it back."""


class Campaign:
    """One call's way to the lease; made afresh for each.

    Args:
        runtime: the binding.
        identity: the lease.
        parent: the caller's ctx; its end ends the campaign.
        limit: monotonic time at which the campaign is out of time; ``math.inf`` for never.
        timeout: the seconds that the caller allowed, for the error.
        plan: as of :class:`~tako_sync.claim.Claim`; what it raises ends the campaign.
    """

    def __init__(
        self,
        runtime: Runtime,
        identity: Identity,
        *,
        parent: Ctx | None = None,
        limit: float = math.inf,
        timeout: float = math.inf,
        plan: Plan = rules.memo_of,
    ) -> None:
        self.contended = False
        self.how = ""
        self._runtime = runtime
        self._clock = runtime.clock
        self._policy = runtime.policy
        self._identity = identity
        self._known: Known = runtime.known(identity.key)
        self._parent = parent
        self._limit = limit
        self._timeout = timeout
        self._generation = fork.generation()
        self._claim = Claim(identity, runtime.owner(), runtime.terms, plan)
        self._retry: Free | None = None  # what a write in doubt was about: write it again
        self._holder: Holder | None = None
        self._trouble: BackendUnavailableError | None = None  # why the last poll told nothing
        self._in_line = False
        self._local: Lease | None = None  # the hold of this process that the poll saw, if any
        self._releasing: Lease | None = None  # a hold of this process that was being given back
        self._backoff = Backoff(self._clock, self._policy.ttl / 300, self._policy.poll)
        self._settling = threading.Lock()
        self._strays: list[Grant] = []  # landed after their caller had stopped waiting
        # How it ends: its grant is taken by who holds it from then on; or it is withdrawn.
        self._taken = self._withdrawn = False

    # --- The two ways

    def once(self, take: Taker) -> Held | None:
        """Make one attempt: a look and, if free, a write. Doubts are settled by trying again.

        Returns:
            who holds it; None if it was granted, and taken.

        Raises:
            BackendUnavailableError: it stayed unresolved for a request timeout.
            RecordUnreadableError: what stands there cannot be read, and has not aged.
        """
        failing_since: list[float] = []

        def attempt() -> Grant | Held | Pause:
            try:
                return self._attempt()
            except BackendUnavailableError as error:
                failing_since.append(self._clock.monotonic())
                pause = self._backoff.failed(error.retry_after)
                tired = failing_since[0] + self._policy.request_timeout
                if failing_since[-1] + pause.seconds > tired and len(failing_since) > 1:
                    raise
                return pause

        try:
            found = cast("Grant | Held", until_settled(attempt, self._sleep))
            if isinstance(found, Grant):
                self._hand_on(found, take)
                return None
        except BaseException as error:
            self._withdraw(error)
            raise
        self._withdraw()
        if isinstance(found.content, Unreadable):
            problem = found.content.problem
            raise RecordUnreadableError(
                self._identity.name, self._identity.key, problem, found.version
            )
        return found

    def until_held(self, take: Taker) -> None:
        """Poll until the lease is granted. First come, first served among local campaigns.

        Args:
            take: called with the grant before the next in line is let on, so that this one
                finds the lease held here and need not ask the storage.

        Raises:
            CampaignTimeoutError: the time is over.
            BackendDeniedError: the storage refuses for good.
            TakoError: the parent's cause, if it was cancelled.
        """
        line, turn = self._known.line, Flag()
        try:
            try:
                self._in_line = True
                line.join(turn)
                while not turn.is_set():
                    self._sleep(math.inf, turn)
                self._in_line, self._known.holder = False, None
                self._hand_on(until_settled(self._poll, self._sleep), take)
            finally:
                line.leave(turn)
        except BaseException as error:
            # Once more: Ctrl-C may have struck in there, and its traceback may be kept for ever.
            line.leave(turn)
            self._withdraw(error)
            raise

    def _poll(self) -> Grant | Pause:
        self._go_on()
        self._local = local = self._not_yet_freed()
        if (rest := self._rest()) > 0:
            return Pause(rest)
        if local is not None and local.end is None:
            # This process holds it: no request can tell more. The wait ends when it is freed.
            self._wait_for(local.holder())
            return Pause(local.remaining())
        if local is not None and local is not self._releasing:
            # Its body has ended and its release is under way: that wakes us, and a look would only
            # show the record as it was. Not twice: a release may take long, or never be sent.
            self._releasing = local
            return Pause(self._policy.poll)
        try:
            found = self._attempt()
        except BackendUnavailableError as error:
            self._trouble = error
            self._go_on()
            if not self._backoff.failing:
                self._runtime.tell(Unreachable(self._identity.name, "campaigning", error))
            return self._backoff.failed(error.retry_after)
        self._trouble = None
        if self._backoff.failing:
            self._backoff.reset()
            self._runtime.tell(Recovered(self._identity.name, "campaigning"))
        if isinstance(found, Grant):
            return found
        self._wait_for(found.holder)
        self._local = self._local or self._not_yet_freed()
        self._known.streak = None  # others have had their turn
        pause = self._policy.jittered(self._policy.poll, self._clock.random())
        # Over a whole poll: all who wait see the same expiry, and a part of one makes a herd.
        spread = min(self._policy.poll, self._policy.heartbeat) * self._clock.random()
        return Pause(min(pause, found.left + spread))

    def _not_yet_freed(self) -> Lease | None:
        local = self._known.lease
        return local if local is not None and not local.freed.is_set() else None

    def _wait_for(self, holder: Holder) -> None:
        self._holder = self._known.holder = holder
        if not self.contended:
            self.contended = True
            self._runtime.tell(Waiting(self._identity.name, holder))

    # --- One attempt

    def _attempt(self) -> Grant | Held:
        """Look and write until granted or seen held; raises where the storage fails."""
        finding: Finding = self._to_retry() or self._left_by_us() or self._look()
        lost_races, moved = 0, False
        while True:
            if isinstance(finding, Grant):
                if self._wanted(finding):
                    return finding
                self._give_back(finding.record, finding.version)
                self._go_on()
                raise BackendUnavailableError("the grant arrived after its own deadline")
            if isinstance(finding, Held):
                return finding
            if lost_races >= _RACES:
                content = finding.content
                ours = isinstance(content, record.Record) and content.owner == self._claim.owner
                if content is None or ours or not moved:
                    raise BackendUnavailableError(
                        "writes are refused, though nobody has changed it"
                    )
                # Free again, but not for long: whoever had it last stands for those who want it.
                return Held(0.0, content, str(finding.version))
            if isinstance(finding, OwnBroken):
                lost_races += 1  # where it cannot be given back, it is found again at once
                self._give_back(finding.content, finding.version)
                finding = self._look()
            else:
                try:
                    finding = self._write(finding)
                except VersionConflictError:
                    # It proves nothing: an earlier attempt of ours may have been applied.
                    lost_races += 1
                    self._retry, refused = None, finding.version
                    finding = self._look()
                    moved = finding.version != refused

    def _to_retry(self) -> Free | None:
        return self._retry

    def _left_by_us(self) -> Free | None:
        free, self._known.free = self._known.free, None
        return free

    def _look(self) -> Finding:
        sighting = look_to_judge(
            self._runtime, self._identity, within=self._request_time(), give_up=self._give_up()
        )
        return self._claim.saw(sighting)

    def _write(self, free: Free) -> Grant:
        self._go_on()  # no acquiring write starts once the campaign is over
        self._retry = free
        self.how = free.how
        sent = self._clock.monotonic()
        draft = self._claim.draft(free, nonce(), sent, self._clock.wall())
        try:
            version = self._runtime.requests.write(
                self._identity.key,
                draft.record.encode(),
                expect=draft.expect,
                within=self._request_time(),
                give_up=self._give_up(),
                late=lambda version: self._landed_late(draft, version),
            )
        except BackendDeniedError:
            self._claim.refused(draft)
            raise
        if isinstance(free.content, Unreadable):
            key, problem = self._identity.key, free.content.problem
            self._runtime.tell(UnreadableTakenOver(self._identity.name, key, problem))
        return self._claim.landed(draft, version)

    def _wanted(self, grant: Grant) -> bool:
        """Say whether the grant is one: in time, and for a caller who still waits for it."""
        cancelled = self._parent is not None and self._parent.cancelled
        in_time = self._clock.monotonic() < grant.deadline
        return in_time and not cancelled and not self._forked

    def _give_back(self, ours: record.Record, version: Version, within: float = 0.0) -> None:
        """Free a record of ours that nobody will hold. At worst it becomes free by its age.

        Args:
            within: seconds; by default a moment, as the caller's campaign is over.
        """
        self._retry = None
        if self._forked:
            return
        freed = rules.released(ours, nonce(), self._clock.wall(), "given back")
        try:
            self._runtime.requests.write(
                self._identity.key,
                freed.encode(),
                expect=version,
                within=within or self._policy.ttl / 60,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the campaign's own end counts
            log.debug("lease %s: not given back: %r", self._identity.name, error)

    # --- The end of a campaign, and writes that land after it

    def _landed_late(self, draft: Draft, version: Version) -> None:
        # Only once the campaign has ended without a grant. Interleaving prevented: this
        # attempt's answer is late, its retry finds the record and adopts it, the body runs,
        # and then this thread would release the lease under it.
        stray = Grant(draft.record, version, draft.sent)
        with self._settling:
            if not self._withdrawn:
                self._strays.append(stray)
                return
        self._give_back(stray.record, stray.version, self._policy.request_timeout)

    def _hand_on(self, grant: Grant, take: Taker) -> None:
        self._known.free = None
        take(grant, self)
        self._taken = True

    def _withdraw(self, error: BaseException | None = None) -> None:
        """Give back what nobody will hold; ``error`` is what ended the campaign, if anything."""
        if self._taken or self._forked:
            return
        with self._settling:
            self._withdrawn = True
        for stray in self._strays:
            self._give_back(stray.record, stray.version)
        if error is not None and not isinstance(error, TakoError) and self._claim.in_doubt:
            # What a signal handler raises (Ctrl-C, Celery's soft time limit) may have struck
            # between the storage's answer and its reader. For a moment only, as the process may
            # be about to end.
            try:
                sighting = look(self._runtime, self._identity, within=self._policy.ttl / 60)
                finding = self._claim.saw(sighting)
            except Exception as trouble:  # noqa: BLE001 - it ages out, and `error` counts
                log.debug("lease %s: not looked at again: %r", self._identity.name, trouble)
            else:
                if isinstance(finding, Grant):
                    self._give_back(finding.record, finding.version)

    # --- Time

    @property
    def _forked(self) -> bool:
        """Whether a signal handler or a listener has forked in here, and this is the child.

        The parent has the same writes to recognise: both would take the one grant for theirs, or
        the child would give back what the parent holds by now.
        """
        return self._generation != fork.generation()

    def _go_on(self) -> None:
        if self._forked:
            raise CtxCancelledError("the process was forked in the midst of this campaign")
        if self._parent is not None:
            self._parent.check()
        if self._clock.monotonic() >= self._limit:
            # In line, one has not looked; the first has, for all.
            holder = self._known.holder if self._in_line else self._holder
            raise CampaignTimeoutError(
                self._identity.name, self._timeout, holder
            ) from self._trouble

    def _request_time(self) -> float:
        left = self._limit - self._clock.monotonic()
        if self._parent is not None:
            left = min(left, self._parent.remaining())
        return min(self._policy.request_timeout, left)

    def _give_up(self) -> Flag | None:
        return self._parent.flag if self._parent is not None else None

    def _rest(self) -> float:
        """Return the seconds to leave the name to others, after holding it back to back."""
        known = self._known
        if known.streak is None or known.ended is None:
            return 0.0
        if known.ended - known.streak < _BACK_TO_BACK:
            return 0.0
        # A caller who has little time rests for half of it, rather than fail on a free lease. Both
        # from the same instant: half of what is left at each question would never be over.
        rest = min(longest_poll(self._runtime), (self._limit - known.ended) / 2)
        return known.ended + rest - self._clock.monotonic()

    def _sleep(self, seconds: float, turn: Flag | None = None) -> None:
        """Wait, but not past the limit; wake when the parent ends or a local hold is freed."""
        wake = Flag()
        sources = [turn] if turn is not None else []
        if self._parent is not None:
            sources.append(self._parent.flag)
        if self._local is not None:
            # The one that the poll saw, not the one that is there now. Interleaving prevented:
            # it is freed in between, and nobody wakes this waiter. One that was freed before
            # the poll, and whose body goes on, is not waited for: that would spin.
            sources.append(self._local.freed)
        for source in sources:
            source.watch(wake.set)
        until = self._limit - self._clock.monotonic()
        if self._parent is not None:
            until = min(until, self._parent.remaining())
        try:
            pause = min(seconds, until)
            self._clock.wait(wake, None if pause == math.inf else max(0.0, pause))
        finally:
            for source in sources:
                source.unwatch(wake.set)
        self._go_on()


def longest_poll(runtime: Runtime) -> float:
    """Return the seconds within which every campaign elsewhere looks once."""
    return runtime.policy.jittered(runtime.policy.poll, 1.0)
