"""Processes over one register, without threads: a world that is moved step by step.

The protocol's own parts are the real ones: ``Claim``, ``Tenancy``, ``rules``, ``Lease``,
``Known``, ``Backoff``. What orders them in the product (campaign, heartbeat, release, tenure)
waits in threads; here the same order is written once more as generators, which yield whatever
they wait for. Who drives the world decides what the network, the clocks, the operators and
death do in between. Not here: fork, rate limits, several waiters of one process in a line, the
rest after ten seconds back to back, records of Go or that cannot be read.

A body is *believed* from the grant until it ends, its loss is seen, or its deadline is over
by its process's own clock. Requests are messages: applied never, late, or twice; answered
never, late, with somebody else's conflict, or with an error though they were applied.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Final, NoReturn

from tako_sync import fork, rules
from tako_sync.abc import Clock, Interval, Snapshot, Task, Version
from tako_sync.claim import Claim, Draft, Finding, Grant, OwnBroken
from tako_sync.errors import BackendUnavailableError, LossReason, VersionConflictError
from tako_sync.events import Event, Lost
from tako_sync.lease import Lease
from tako_sync.policy import LeasePolicy
from tako_sync.record import Content, Identity, Record, State
from tako_sync.retry import Backoff
from tako_sync.rules import Free, Held, Sighting, Terms
from tako_sync.runtime import Known
from tako_sync.snapshot import ABSENT, Absent
from tako_sync.tenancy import Ending, Gone, Landed, Tenancy

POLICY: Final = LeasePolicy()
IDENTITY: Final = Identity("shop", "test", "reindex")
_EPOCH: Final = datetime(2026, 1, 1, tzinfo=timezone.utc)
_RACES: Final = 3
_STILL_OURS: Final = {
    LossReason.EXPIRED,
    LossReason.UNREACHABLE,
    LossReason.DENIED,
    LossReason.BROKEN,
}


class Violation(AssertionError):
    """The protocol broke a promise."""


@dataclass(frozen=True)
class Weather:
    """How the storage of one world is, and how far clocks may stray.

    Attributes:
        ticking: whether the storage tells its time.
        width: half the width of its intervals, in seconds.
        skew: seconds by which any of its clocks may be wrong beyond its interval.
        wall: seconds by which a wall clock may be wrong.
    """

    ticking: bool = True
    width: float = 0.0
    skew: float = 0.0
    wall: float = 40.0

    @property
    def terms(self) -> Terms:
        return Terms.of(POLICY, self.skew)

    @property
    def drift(self) -> float:
        """The share by which a monotonic clock may run fast or slow: all that the margin allows."""
        return 0.99 * (self.terms.margin - 2 * self.skew) / POLICY.ttl


# --- The storage and the network ---------------------------------------------------------


@dataclass(frozen=True)
class Look:
    content: Content
    snapshot: Snapshot


Answer = Look | Version | BackendUnavailableError | VersionConflictError


class Register:
    """The storage: one record under compare-and-swap, and a clock that is roughly right."""

    cycle = 10**9  # no version comes twice: a promise that a mutant breaks

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0
        self._written: Interval | None = None
        self.content: Content = None
        self.version: Version | Absent = ABSENT
        self.history: list[tuple[float, Version, Record]] = []

    def read(self) -> Look:
        return Look(self.content, Snapshot(b"", self.version, self._written, self._now()))

    def write(self, record: Record, expect: Version | Absent) -> Answer:
        if self.version != expect:
            return VersionConflictError("not the version expected")
        self._world.check_write(self.content, record)
        self._count += 1
        self.version = str(self._count % Register.cycle)
        self.content, self._written = record, self._now()
        self.history.append((self._world.now, self.version, record))
        return self.version

    def delete(self) -> None:
        self.content, self.version, self._written = None, ABSENT, None

    def _now(self) -> Interval | None:
        weather, chance = self._world.weather, self._world.chance
        if not weather.ticking:
            return None
        middle = self._world.now + chance.choice((-1, 0, 1)) * weather.skew
        left, right = chance.choice((0.0, weather.width)), chance.choice((0.0, weather.width))
        return Interval(middle - left, middle + right)


@dataclass(eq=False)
class Message:
    """A request on its way. ``answer`` is what its sender has, or finds once it runs again."""

    sender: Process | None
    carry_out: Callable[[], Answer]
    is_write: bool = True
    late: Callable[[Version], None] | None = None
    results: list[Answer] = field(default_factory=list)
    answer: Answer | None = None
    abandoned: bool = False

    def apply(self) -> None:
        self.results.append(self.carry_out())

    def deliver(self, answer: Answer) -> None:
        if self.answer is None:
            self.answer = answer
            if self.abandoned and self.late is not None and isinstance(answer, str):
                self.late(answer)


# --- Waiting -----------------------------------------------------------------------------


def _never() -> bool:
    return False


@dataclass
class Wait:
    """What an activity yields: it goes on when the time, the answer or the wish is there."""

    due: float  # of the world's time
    wake: Callable[[], bool] = _never
    message: Message | None = None

    def over(self, now: float) -> bool:
        if self.message is not None and self.message.answer is not None:
            return True
        return now >= self.due or self.wake()


Steps = Generator[Wait, None, Any]


class Activity:
    """A thread of a process."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.wait = Wait(0.0)
        self.done = False

    def go_on(self) -> None:
        try:
            self.wait = next(self.steps)
        except StopIteration:
            self.done = True


class Cancelled(Exception):
    """The caller does not want the lease any more."""


class _OutOfTime(Exception):
    pass


# --- A process ---------------------------------------------------------------------------


class _OwnClock(Clock):
    def __init__(self, world: World) -> None:
        self._world = world
        self.rate = 1 + world.chance.choice((-1, -1, 0, 1, 1)) * world.weather.drift
        self._offset = world.chance.uniform(0, 1000)
        self._wall = timedelta(seconds=world.chance.choice((-1, 0, 1)) * world.weather.wall)

    def monotonic(self) -> float:
        return self._world.now * self.rate + self._offset

    def wall(self) -> datetime:
        return _EPOCH + timedelta(seconds=self._world.now) + self._wall

    def random(self) -> float:
        return self._world.chance.random()

    def wait(self, event: object, timeout: float | None = None) -> NoReturn:
        raise NotImplementedError

    def spawn(self, target: Callable[[], object], name: str) -> Task:
        raise NotImplementedError


@dataclass(eq=False)
class Job:
    """One call of ``do`` or ``try_do``, from the campaign to the end of its body."""

    once: bool
    work: float
    stubborn: bool
    cancelled: bool = False
    hold: Hold | None = None
    outcome: str = ""


class Process:
    """A process: what it knows, and its threads. It may stand still, and it may die."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.clock = _OwnClock(world)
        self.known = Known()
        self.activities: list[Activity] = []
        self.jobs: list[Job] = []
        self.paused = False
        self.dead = False
        self.cut_off = False  # none of its requests gets through by itself
        self.asked = 0.0  # when its last look was sent

    def do(self, job: Job) -> Job:
        self.jobs.append(job)
        self.spawn(self._work(job))
        return job

    def spawn(self, steps: Steps) -> Activity:
        activity = Activity(steps)
        self.activities.append(activity)
        return activity

    def sleep(self, seconds: float, wake: Callable[[], bool] = _never) -> Wait:
        return Wait(self.world.now + max(0.0, seconds) / self.clock.rate, wake)

    def _work(self, job: Job) -> Steps:
        campaign = Campaign(self, job)
        try:
            try:
                found = yield from (campaign.once() if job.once else campaign.until_held())
            finally:
                campaign.settle()
            if isinstance(found, Held):
                job.outcome = "busy"
                self.world.check_busy(campaign.claim, found)
                return
            job.hold = hold = Hold(self, job, found)
            yield from hold.run()
            job.outcome = "ran"
        except Cancelled:
            job.outcome = "cancelled"
        except BackendUnavailableError:
            job.outcome = "unresolved"
        finally:
            self.jobs.remove(job)

    # --- Requests, as in bounded and look

    def request(self, message: Message, within: float, wake: Callable[[], bool] = _never) -> Steps:
        if within <= 0:
            raise BackendUnavailableError("no time is left for a request")
        self.world.send(message)
        wait = self.sleep(within, wake)
        wait.message = message
        yield wait
        if message.answer is None:
            message.abandoned = True
            raise BackendUnavailableError("no answer")
        if isinstance(message.answer, Exception):
            raise message.answer
        return message.answer

    def write(
        self,
        record: Record,
        expect: Version | Absent,
        within: float,
        wake: Callable[[], bool] = _never,
        late: Callable[[Version], None] | None = None,
    ) -> Steps:
        message = Message(self, lambda: self.world.register.write(record, expect), late=late)
        return (yield from self.request(message, within, wake))

    def look(self, within: float, wake: Callable[[], bool] = _never) -> Steps:
        self.asked = self.clock.monotonic()
        message = Message(self, self.world.register.read, is_write=False)
        found = yield from self.request(message, within, wake)
        arrived = self.clock.monotonic()
        since = self.known.first_seen(found.snapshot.version, arrived)
        return Sighting(found.content, found.snapshot, arrived, since)


class Campaign:
    """As in ``tako_sync.campaign``."""

    def __init__(self, process: Process, job: Job) -> None:
        self.process = process
        self.clock = process.clock
        self.claim = Claim(IDENTITY, process.world.owner(process), process.world.weather.terms)
        self._job = job
        self._retry: Free | None = None
        self._backoff = Backoff(self.clock, POLICY.ttl / 300, POLICY.poll)
        self._strays: list[Grant] = []
        self._outcome = ""

    def once(self) -> Steps:
        failures: list[float] = []
        while True:
            try:
                found = yield from self._attempt()
            except BackendUnavailableError:
                failures.append(self.clock.monotonic())
                pause = self._backoff.failed()
                tired = failures[0] + POLICY.request_timeout
                if failures[-1] + pause.seconds > tired and len(failures) > 1:
                    raise
            else:
                return self._end_with(found)
            yield from self._sleep(pause.seconds)

    def until_held(self) -> Steps:
        releasing: Lease | None = None
        while True:
            self._go_on()
            local = self._not_yet_freed()
            if local is not None and local.end is None:
                yield from self._sleep(local.remaining(), local)
                continue
            if local is not None and local is not releasing:
                releasing = local
                yield from self._sleep(POLICY.poll, local)
                continue
            try:
                found = yield from self._attempt()
            except BackendUnavailableError:
                self._go_on()
                yield from self._sleep(self._backoff.failed().seconds, local)
                continue
            self._backoff.reset()
            if isinstance(found, Grant):
                return self._end_with(found)
            pause = POLICY.jittered(POLICY.poll, self.clock.random())
            spread = POLICY.poll * POLICY.jitter * self.clock.random()
            yield from self._sleep(min(pause, found.left + spread), local or self._not_yet_freed())

    def settle(self) -> None:
        if not self._outcome:
            self._outcome = "given up"
            for stray in self._strays:
                self.process.spawn(self._give_back(stray.record, stray.version))

    def _end_with(self, found: Grant | Held) -> Grant | Held:
        if isinstance(found, Grant):
            self._outcome = "granted"
            self.process.known.free = None
        return found

    def _attempt(self) -> Steps:
        finding: Finding = self._retry or self._left_by_us() or (yield from self._look())
        lost_races, moved = 0, False
        while True:
            if isinstance(finding, Grant):
                if not self._job.cancelled and self.clock.monotonic() < finding.deadline:
                    return finding
                yield from self._give_back(finding.record, finding.version)
                self._go_on()
                raise BackendUnavailableError("the grant arrived after its own deadline")
            if isinstance(finding, Held):
                return finding
            if lost_races >= _RACES:
                content = finding.content
                ours = isinstance(content, Record) and content.owner == self.claim.owner
                if content is None or ours or not moved:
                    raise BackendUnavailableError("writes are refused, though nobody changed it")
                return Held(0.0, content, str(finding.version))
            if isinstance(finding, OwnBroken):
                lost_races += 1
                yield from self._give_back(finding.content, finding.version)
                finding = yield from self._look()
            else:
                try:
                    finding = yield from self._write(finding)
                except VersionConflictError:
                    lost_races += 1
                    self._retry, refused = None, finding.version
                    finding = yield from self._look()
                    moved = finding.version != refused

    def _left_by_us(self) -> Free | None:
        known = self.process.known
        free, known.free = known.free, None
        return free

    def _look(self) -> Steps:
        sighting = yield from self.process.look(POLICY.request_timeout, self._unwanted)
        return self.claim.saw(sighting)

    def _write(self, free: Free) -> Steps:
        self._go_on()
        self._retry = free
        sent = self.clock.monotonic()
        draft = self.claim.draft(free, self.process.world.nonce(), sent, self.clock.wall())
        version = yield from self.process.write(
            draft.record,
            draft.expect,
            POLICY.request_timeout,
            self._unwanted,
            lambda version: self._landed_late(draft, version),
        )
        return self.claim.landed(draft, version)

    def _landed_late(self, draft: Draft, version: Version) -> None:
        if not self._outcome:
            self._strays.append(Grant(draft.record, version, draft.sent))
        elif self._outcome == "given up":
            self.process.spawn(self._give_back(draft.record, version))

    def _give_back(self, ours: Record, version: Version) -> Steps:
        self._retry = None
        freed = rules.released(ours, self.process.world.nonce(), self.clock.wall(), "given back")
        try:
            yield from self.process.write(freed, version, POLICY.request_timeout)
        except (BackendUnavailableError, VersionConflictError):
            pass

    def _not_yet_freed(self) -> Lease | None:
        local = self.process.known.lease
        return local if local is not None and not local.freed.is_set() else None

    def _go_on(self) -> None:
        if self._job.cancelled:
            raise Cancelled

    def _unwanted(self) -> bool:
        return self._job.cancelled

    def _sleep(self, seconds: float, local: Lease | None = None) -> Steps:
        freed = local.freed.is_set if local is not None else _never
        yield self.process.sleep(seconds, lambda: self._job.cancelled or freed())
        self._go_on()


class Hold:
    """As in ``tako_sync.tenure``, with its heartbeat and its release."""

    def __init__(self, process: Process, job: Job, grant: Grant) -> None:
        self.process = process
        self.clock = process.clock
        self.lease = Lease(IDENTITY.name, grant, process.clock, self._told, fork.generation())
        self.tenancy = Tenancy(grant)
        self.losses = 0
        self._first = grant.sent
        self._job = job
        self._was_over = False
        self._stopped = False
        self._beats = Backoff(self.clock, POLICY.ttl / 30, POLICY.ttl / 15)
        self._tries = Backoff(self.clock, POLICY.ttl / 300, POLICY.poll)

    def believed(self) -> bool:
        """Ask as a body asks its ctx."""
        over = self.lease.end is not None
        if self._was_over and not over:
            raise Violation(f"{self.lease!r} was over and is alive again")
        self._was_over = over
        return not over and not self.process.dead

    def run(self) -> Steps:
        self.process.known.lease = self.lease
        self.process.world.check_grant(self)
        beat = self.process.spawn(self._heartbeat())
        yield self.process.sleep(self._job.work, self._heeded)
        loss = self.lease.conclude()
        self.process.world.concluded(self)
        self._stopped = True
        yield self.process.sleep(POLICY.request_timeout, lambda: beat.done)
        free = None
        if loss is None or loss.reason in _STILL_OURS:
            free = yield from self._release()
        known = self.process.known
        if known.lease is self.lease:
            known.lease, known.free = None, free
        self.lease.freed.set()

    def _heeded(self) -> bool:
        return not self._job.stubborn and (
            self.lease.end is not None or self.lease.handover.is_set()
        )

    def _told(self, event: Event) -> None:
        if isinstance(event, Lost):
            self.losses += 1
            if self.losses > 1:
                raise Violation("a loss was told twice")
            self.process.world.lost(self, event)

    # --- As in heartbeat

    def _heartbeat(self) -> Steps:
        beats = 0
        while not self._over():
            beats = max(beats + 1, int((self.clock.monotonic() - self._first) / 10.0) + 1)
            due = self._first + POLICY.heartbeat * (beats - 0.05 * self.clock.random())
            while (now := self.clock.monotonic()) < due:
                yield self._pause(min(due - now, self.lease.remaining()))
                if self._over():
                    return
            while (pause := (yield from self._renew())) is not None:
                yield self._pause(min(pause, self.lease.remaining()))

    def _renew(self) -> Steps:
        """Return the seconds after which to try again; None once settled."""
        if self._over():
            return None
        sent = self.clock.monotonic()
        draft = self.tenancy.renewal(self.process.world.nonce(), sent, self.clock.wall())
        try:
            version = yield from self.process.write(draft.record, draft.expect, self._within())
            standing = self.tenancy.landed(draft, version)
        except VersionConflictError:
            return (yield from self._after_conflict())
        except BackendUnavailableError as error:
            self.lease.trouble = error
            return self._beats.failed().seconds
        return self._landed(standing)

    def _after_conflict(self) -> Steps:
        if self._over():
            return None
        try:
            sighting = yield from self.process.look(self._within())
        except BackendUnavailableError as error:
            self.lease.trouble = error
            return self._beats.failed().seconds
        before = self.tenancy.version
        standing = self.tenancy.saw(sighting)
        if isinstance(standing, Landed):
            return self._landed(standing)
        if isinstance(standing, Gone):
            self.process.world.check_loss(self, sighting.content)
            self.lease.lose(standing.reason)
            return None
        self._look_for_handover()
        return 0.0 if self.tenancy.version != before else self._beats.failed().seconds

    def _landed(self, standing: Landed) -> None:
        if self.lease.prolong(standing.sent):
            self._beats.reset()
            self._look_for_handover()

    def _look_for_handover(self) -> None:
        if self.tenancy.record.handover:
            self.lease.ask_for_handover(self.tenancy.record.handover)

    def _over(self) -> bool:
        return self._stopped or self.lease.end is not None

    def _within(self) -> float:
        return min(POLICY.request_timeout, self.lease.remaining())

    def _pause(self, seconds: float) -> Wait:
        return self.process.sleep(seconds, lambda: self._stopped)

    # --- As in release

    def _release(self) -> Steps:
        try:
            return (yield from self._release_until(self.clock.monotonic() + POLICY.ttl / 30))
        except _OutOfTime:
            self.process.spawn(self._go_on_releasing())
            return None

    def _go_on_releasing(self) -> Steps:
        try:
            yield from self._release_until(self.clock.monotonic() + self.tenancy.record.ttl)
        except _OutOfTime:
            pass

    def release_again(self) -> None:
        """A release is idempotent: one more does no harm, whoever has the lease by now."""
        self.process.spawn(self._go_on_releasing())

    def _release_until(self, limit: float) -> Steps:
        while True:
            found = yield from self._release_once(limit)
            if not isinstance(found, float):
                return found
            if self.clock.monotonic() + found >= limit:
                raise _OutOfTime
            yield self.process.sleep(found)

    def _release_once(self, limit: float) -> Steps:
        """Return the seconds after which to try again, what is free now, or None."""
        draft = self.tenancy.release(self.process.world.nonce(), self.clock.wall(), "returned")
        try:
            version = yield from self.process.write(
                draft.record, draft.expect, self._release_time(limit)
            )
            return self.tenancy.released(draft, version)
        except BackendUnavailableError:
            return self._tries.failed().seconds
        except VersionConflictError:
            pass
        try:
            sighting = yield from self.process.look(self._release_time(limit))
        except BackendUnavailableError:
            return self._tries.failed().seconds
        before = self.tenancy.version
        ending = self.tenancy.saw_at_release(sighting)
        if ending is Ending.AGAIN:
            return 0.0 if self.tenancy.version != before else self._tries.failed().seconds
        if ending is Ending.DONE:
            return Free("released", sighting.version, sighting.content)
        return None

    def _release_time(self, limit: float) -> float:
        return min(POLICY.request_timeout, limit - self.clock.monotonic())


# --- The world ---------------------------------------------------------------------------

Move = Callable[["World", Message], None]
Fate = Sequence[tuple[float, Move]]
"""What becomes of a request: after so many seconds, this."""


def _at_once(message: Message) -> Fate | None:
    return None


class World:
    """All of it. Each public method is one step; a broken promise raises :class:`Violation`.

    Attributes:
        fate: asked for each request what becomes of it; None is carried out and answered at once.
        steps: turns that the processes had, and moves of a walk.
    """

    running: Process | None = None  # whose step it is, for mutants that ask its clock

    def __init__(self, seed: int, weather: Weather, processes: int = 3) -> None:
        self.chance = random.Random(seed)
        self.weather = weather
        self.now = 10_000.0
        self.register = Register(self)
        self.flying: list[Message] = []
        self.holds: list[Hold] = []
        self.ended: list[Hold] = []
        self.fate: Callable[[Message], Fate | None] = _at_once
        self._planned: list[tuple[float, int, Move, Message]] = []  # a heap
        self.steps = self.grants = self.takeovers = self.lost_holds = 0
        self._names = 0
        self._deleted = False  # all promises about overlap and fences are off
        self._excused = -1  # the largest fence of a lease that was broken with ``now``
        self._largest = 0
        self._peaceful = False
        self.processes = [Process(self, f"p{i}") for i in range(processes)]

    # --- Names

    @staticmethod
    def epoch(now: float) -> datetime:
        """Return the time of day at ``now``, by a clock that is right."""
        return _EPOCH + timedelta(seconds=now)

    def nonce(self) -> str:
        self._names += 1
        return f"w{self._names}"

    def owner(self, process: Process) -> str:
        self._names += 1
        return f"{process.name}:1:{self._names}"

    # --- Time and turns

    def advance(self, seconds: float) -> None:
        """Let time pass; whoever is due on the way, and does not stand still, runs."""
        until = self.now + seconds
        self._settle()
        while (due := self._next_due()) <= until:
            self.now = max(self.now, due)
            self._settle()
        self.now = until

    def advance_to_next(self, most: float = 40.0) -> None:
        """Let time pass until somebody is due."""
        self.advance(min(most, max(0.0, self._next_due() - self.now)))

    def _next_due(self) -> float:
        planned = self._planned[0][0] if self._planned else math.inf
        return min(planned, min(self._dues(), default=math.inf))

    def _dues(self) -> Iterator[float]:
        for process in self.processes:
            if not process.paused:
                for activity in process.activities:
                    yield activity.wait.due

    def _settle(self) -> None:
        for _round in range(500):
            while self._planned and self._planned[0][0] <= self.now:
                _at, _number, move, message = heapq.heappop(self._planned)
                move(self, message)
            moved = False
            for process in self.processes:
                if process.paused or process.dead:
                    continue
                World.running = process
                for activity in list(process.activities):
                    if activity.wait.over(self.now):
                        moved = True
                        self.steps += 1
                        activity.go_on()
                        if activity.done:
                            process.activities.remove(activity)
            if not moved:
                return
        raise Violation("somebody goes round and round and never waits")

    # --- The network

    def send(self, message: Message) -> None:
        sender, fate = message.sender, self.fate(message)
        if sender is not None and sender.cut_off:
            fate = fate or ()
        if fate is None:
            message.apply()
            message.deliver(message.results[0])
            return
        self.flying = [*self.flying[-11:], message]
        for delay, move in fate:
            self._names += 1
            heapq.heappush(self._planned, (self.now + delay, self._names, move, message))

    def apply(self, message: Message) -> None:
        """Have it carried out; a second time, if it was."""
        message.apply()

    def answer(self, message: Message) -> None:
        """Have the sender get the answer of the last time it was carried out."""
        if message.results:
            message.deliver(message.results[-1])

    def refuse(self, message: Message) -> None:
        """Answer with a conflict that proves nothing: it may have been applied, or may be yet."""
        if message.is_write:
            message.deliver(VersionConflictError("says who?"))

    def fail(self, message: Message) -> None:
        """Answer with a 503; what becomes of the request is open."""
        message.deliver(BackendUnavailableError("503"))

    def drop(self, message: Message) -> None:
        """Have nothing more become of it."""
        self._planned = [plan for plan in self._planned if plan[3] is not message]
        heapq.heapify(self._planned)
        self.flying.remove(message)

    # --- Processes

    def start(self, process: Process, *, once: bool, work: float, stubborn: bool) -> Job | None:
        if len(process.jobs) >= 2:
            return None
        job = process.do(Job(once, work, stubborn))
        self._settle()
        return job

    def cancel(self, process: Process) -> None:
        for job in process.jobs:
            job.cancelled = job.cancelled or job.hold is None
        self._settle()

    def pause(self, process: Process) -> None:
        process.paused = True

    def resume(self, process: Process) -> None:
        process.paused = False
        self._settle()

    def kill(self, process: Process) -> None:
        """Kill it; another one takes its place, which knows nothing. Requests fly on."""
        process.dead = True
        self.holds = [hold for hold in self.holds if hold.process is not process]
        place = self.processes.index(process)
        self.processes[place] = Process(self, process.name)

    def ask(self, process: Process) -> None:
        """Have its bodies ask whether they may go on."""
        if not process.paused:
            for hold in self.holds:
                if hold.process is process:
                    hold.believed()
            self._settle()

    def release_again(self) -> None:
        if self.ended:
            self.chance.choice(self.ended).release_again()
            self._settle()

    # --- Operators

    def break_lease(self, *, now: bool = False) -> None:
        content, version = self.register.content, self.register.version
        if isinstance(content, Record) and content.state is not State.RELEASED:
            at = _EPOCH + timedelta(seconds=self.now)
            broken = rules.broken(content, IDENTITY, self.nonce(), at, "operator", now=now)
            self._operate(broken, version, content.fence if now else -1)

    def request_handover(self) -> None:
        look = self.register.read()
        content = look.content
        if not isinstance(content, Record) or content.state is not State.HELD:
            return
        fresh = Sighting(content, look.snapshot, self.now, self.now)
        if content.handover or not isinstance(rules.judge(fresh), Held):
            return
        self._operate(content.but(handover="operator"), look.snapshot.version, -1)

    def _operate(self, record: Record, expect: Version | Absent, excused: int) -> None:
        def carry_out() -> Answer:
            answer = self.register.write(record, expect)
            if isinstance(answer, str):
                self._excused = max(self._excused, excused)
            return answer

        self.send(Message(None, carry_out))
        self._settle()

    def delete(self) -> None:
        self._deleted = True
        self.register.delete()

    # --- Promises

    def check_grant(self, hold: Hold) -> None:
        self.grants += 1
        fence = hold.lease.fence
        if self._may_judge(fence):
            if fence <= self._largest:
                raise Violation(f"fence {fence} was granted after {self._largest}")
            self._largest = fence
        if hold.believed():
            for other in self.holds:
                if self._may_judge(min(fence, other.lease.fence)) and other.believed():
                    raise Violation(f"two holders: {other.lease!r} and {hold.lease!r}")
        self.holds.append(hold)

    def check_believed(self) -> None:
        """Look for two holders without asking: a body may not ask for long."""
        believed = [
            hold.lease
            for hold in self.holds
            if hold.lease._end is None
            and hold.clock.monotonic() < hold.lease._deadline
            and self._may_judge(hold.lease.fence)
        ]
        if len(believed) > 1:
            raise Violation(f"two holders: {believed}")

    def concluded(self, hold: Hold) -> None:
        self.holds.remove(hold)
        self.ended = [*self.ended[-2:], hold]

    def check_write(self, before: Content, after: Record) -> None:
        """Check each record at the moment when the storage accepts it."""
        if self._deleted or not isinstance(before, Record):
            return
        if (after.owner, after.fence) == (before.owner, before.fence):
            if before.state is State.RELEASED and after.state is not State.RELEASED:
                raise Violation("a released lease is held again without a grant")
            return
        if after.state is not State.HELD or after.fence <= before.fence:
            raise Violation(f"only a grant replaces another's record: {before} by {after}")
        self.takeovers += before.state is not State.RELEASED
        for hold in self.holds:
            if self._may_judge(hold.lease.fence) and hold.believed():
                raise Violation(f"{hold.lease!r} was overwritten while it was believed")

    def check_busy(self, claim: Claim, held: Held) -> None:
        if isinstance(held.content, Record) and held.content.owner == claim.owner:
            raise Violation("busy, for its own write")

    def check_loss(self, hold: Hold, found: Content) -> None:
        if (
            isinstance(found, Record)
            and found.state is State.HELD
            and found.owner == hold.lease.owner
            and not self._deleted
        ):
            raise Violation("a loss although the record is its own and held")

    def lost(self, hold: Hold, event: Lost) -> None:
        self.lost_holds += 1
        if self._peaceful:
            raise Violation(f"lost in peace: {event.message}")

    def _may_judge(self, fence: int) -> bool:
        return not self._deleted and fence > self._excused

    # --- The end

    def make_peace(self) -> None:
        """Heal all, let everyone finish, and check that all do, and that the name is free then."""
        self._end_the_war()
        for process in self.processes:
            process.paused = process.cut_off = False
        for job in self._jobs():
            job.work = min(job.work, 15.0)
        # Whoever lost something in the war has the time to notice.
        self.advance(POLICY.ttl + 100.0)
        self._peaceful = True
        waiting = len(self._jobs())
        patience = (waiting + 1) * (self._patience() + 20.0)
        self._run_until(lambda: not self._jobs(), patience, "one waits for ever")
        self._inherit()

    def die_out(self) -> None:
        """Kill all, let their last requests land, and check that the name becomes free."""
        for process in list(self.processes):
            self.kill(process)
        self._end_the_war()
        self._peaceful = True
        self._inherit()

    def _end_the_war(self) -> None:
        self._planned.clear()
        self.fate = _at_once
        for message in self.flying:
            if not message.results and self.chance.random() < 0.5:
                message.apply()
            message.deliver(self.chance.choice(message.results or [BackendUnavailableError("")]))
        self.flying.clear()

    def _inherit(self) -> None:
        heir = Process(self, "heir")
        self.processes.append(heir)
        before = self.grants
        heir.do(Job(once=False, work=25.0, stubborn=False))
        self._run_until(lambda: self.grants > before, self._patience(), "a ghost has it")
        self._run_until(lambda: not heir.jobs, 40.0, "the heir does not end")
        content, snapshot = self.register.content, self.register.read().snapshot
        if not isinstance(rules.judge(Sighting(content, snapshot, self.now, self.now)), Free):
            raise Violation("all have released, and it is held")

    def _jobs(self) -> list[Job]:
        return [job for process in self.processes for job in process.jobs]

    def _patience(self) -> float:
        """The seconds after which a record that nobody touches is acquired."""
        weather = self.weather
        wait = POLICY.ttl + 4 * weather.width + 2 * weather.skew
        if not weather.ticking:
            wait = (POLICY.ttl + weather.terms.margin) / (1 - weather.drift)
        return wait + 1.25 * POLICY.poll / (1 - weather.drift) + 1.0

    def _run_until(self, happened: Callable[[], bool], within: float, complaint: str) -> None:
        until = self.now + within
        while not happened():
            if self.now >= until:
                raise Violation(f"{complaint}, after {within:.1f} s: {self.register.content}")
            self.advance_to_next(until - self.now)


# --- A random walk -------------------------------------------------------------------------

_STRIDES: Final = (0.1, 0.5, 1.0, 2.0, 4.0, 5.0, 8.0, 12.0, 24.0, 31.0)
_WORKS: Final = (0.5, 5.0, 15.0, 40.0, 100.0)


def some_weather(chance: random.Random) -> Weather:
    """Return a storage with a good clock, a poor one, a skewed one, or none."""
    return chance.choice(
        (
            Weather(),
            Weather(width=1.0),
            Weather(width=0.5, skew=2.0),
            Weather(ticking=False),
        )
    )


def a_fate(chance: random.Random) -> Fate:
    """Return what may become of a request on a bad network."""
    first, then, later = (chance.choice(_DELAYS) * chance.random() for _ in range(3))
    then += first
    later += then
    return chance.choice(
        (
            (),
            [(first, World.apply)],
            [(first, World.apply), (then, World.answer)],
            [(first, World.apply), (then, World.answer)],
            [(first, World.apply), (then, World.answer)],
            [(first, World.apply), (then, World.fail)],
            [(first, World.fail), (then, World.apply)],
            [(first, World.apply), (then, World.refuse)],
            [(first, World.refuse), (then, World.apply)],
            [(first, World.refuse)],
            [(first, World.apply), (then, World.apply), (later, World.answer)],
        )
    )


_DELAYS: Final = (0.1, 1.0, 5.0, 5.0, 9.0, 35.0)


def walk(seed: int, steps: int = 150) -> World:
    """Go through a world by chance, and then to its end; raise Violation at a broken promise."""
    chance = random.Random(seed)
    world = World(seed, some_weather(chance), processes=chance.choice((2, 3, 3)))
    rough = chance.choice((0.05, 0.2, 0.5))
    world.fate = lambda message: a_fate(chance) if chance.random() < rough else None
    deletions = chance.random() < 0.1
    for _step in range(steps):
        world.steps += 1
        _step_by_chance(world, chance, deletions)
    if chance.random() < 0.5:
        world.make_peace()
    else:
        world.die_out()
    return world


def duel(seed: int, weather: Weather | None = None) -> World:
    """One holds, and at some instant stands still or is cut off; the other waits for the end."""
    chance = random.Random(seed)
    world = World(seed, weather or some_weather(chance), processes=2)
    rough = chance.choice((0.2, 0.5))
    world.fate = lambda message: a_fate(chance) if chance.random() < rough else None
    holder, rival = world.processes
    world.start(holder, once=False, work=200.0, stubborn=True)
    world.advance(chance.uniform(0.0, 5.0))
    early = chance.random() < 0.5
    if early:
        world.start(rival, once=False, work=5.0, stubborn=True)
    for _beat in range(chance.choice((0, 1, 1, 2))):
        world.advance(POLICY.heartbeat)
    holder.paused, holder.cut_off = chance.choice(((True, False), (False, True)))
    if not early:
        world.start(rival, once=False, work=5.0, stubborn=True)
    world.advance(3.0)
    world.fate = lambda message: a_fate(chance) if chance.random() < rough / 4 else None
    world.advance(37.0)
    world.resume(holder)
    world.advance(20.0)
    return world


def _step_by_chance(world: World, chance: random.Random, deletions: bool) -> None:
    pick = chance.random()
    process = chance.choice(world.processes)
    if pick < 0.35:
        world.advance_to_next()
    elif pick < 0.60:
        world.advance(chance.choice(_STRIDES) * chance.choice((0.9, 1.0, 1.1)))
    elif pick < 0.78:
        world.start(
            process,
            once=chance.random() < 0.3,
            work=chance.choice(_WORKS),
            stubborn=chance.random() < 0.5,
        )
    elif pick < 0.84:
        (world.resume if process.paused else world.pause)(process)
    elif pick < 0.88:
        process.cut_off = not process.cut_off
    elif pick < 0.90:
        world.ask(process)
    elif pick < 0.92:
        world.cancel(process)
    elif pick < 0.94:
        world.release_again()
    elif pick < 0.95:
        world.kill(process)
    elif pick < 0.97:
        world.request_handover()
    elif pick < 0.99:
        world.break_lease(now=chance.random() < 0.1)
    elif deletions and pick < 0.993:
        world.delete()
