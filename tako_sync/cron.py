"""``Cron``: a function at given times; with single flight, each time once across all processes."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final, NoReturn

from attrs import frozen

from tako_sync import breaking, checks, fork
from tako_sync.ctx import Ctx
from tako_sync.declared import Declaration
from tako_sync.errors import (
    CampaignTimeoutError,
    ConfigurationError,
    TakoError,
    UsageError,
)
from tako_sync.events import CronAhead, CronCutShort, CronMissed, CronRan, CronRefused
from tako_sync.look import look
from tako_sync.policy import seconds
from tako_sync.record import Content, Holder
from tako_sync.runner import Background, Runner, loops
from tako_sync.runtime import Runtime, current
from tako_sync.schedule import Schedule, zone
from tako_sync.slots import DONE, FAILED, CutShort, Later, NotWanted, Run, decode, last_run, plan
from tako_sync.tenure import Tenure

PREFIX: Final = "cron-"
"""Of the leases of Crons."""

_GRACE: Final = 1.0
"""Seconds. So late, a slot that this process was awake for still counts as in time."""
_EARLY: Final = 5.0
"""Seconds. So early, one that was started for a slot, by another clock, waits for it."""
_NAP: Final = 30.0
"""Seconds between two looks at the time of day, which may be set meanwhile."""
_TOLD: Final = 100
_INSTANT: Final = timedelta(microseconds=1)
_APART: Final = 60.0
"""Seconds. So far ahead of this clock, a slot that was begun is told of: some clock is wrong."""

Body = Callable[[Ctx], object]

log: Final = logging.getLogger("tako_sync")


@frozen
class CronConfig:
    """What may be chosen about a Cron.

    Args:
        singleflight: each slot runs once across all processes that share the storage, rather than
            once in each process.
        tz: the zone in which the schedule is read.
        catch_up: seconds after its time in which a slot that was missed (the process slept, was
            busy with an earlier one, or no process was up) is still run: the last such slot, and
            only that. None: until the next one is due. 0: never.
        on_crash: what becomes of a slot whose run is cut short by a crash or a shutdown, with
            single flight: ``rerun`` it once, within ``catch_up``; or ``skip``.

    Raises:
        ConfigurationError: no such choice.
    """

    singleflight: bool = False
    tz: str = "UTC"
    catch_up: float | None = None
    on_crash: str = "rerun"

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.singleflight, bool):
            raise ConfigurationError(f"singleflight is True or False, not {self.singleflight!r}")
        zone(self.tz)
        if self.catch_up is not None:
            seconds("catch_up", self.catch_up, or_zero=True)
        if self.on_crash not in ("rerun", "skip"):
            raise ConfigurationError(f"on_crash is 'rerun' or 'skip', not {self.on_crash!r}")


class Cron:
    """A function that is run at given times, for as long as any process has it started.

    With single flight, each slot is run once across all processes: the record of the lease
    ``cron-<name>`` tells the last one. A slot whose run is cut short is run once more (at least
    once), or not (at most once), as ``on_crash`` says. Runs never overlap. The identity is the
    declaring variable, as of a :class:`~tako_sync.Singleton`.

    Args:
        schedule: five fields of crontab.
        fn: takes a ctx, whose ``fence`` is there with single flight only.
        config: what may be chosen.

    Raises:
        ConfigurationError: the schedule or the zone cannot be read.
        UsageError: ``fn`` is no function of a ctx.
    """

    def __init__(self, schedule: str, fn: Body, config: CronConfig | None = None) -> None:
        if config is not None and not isinstance(config, CronConfig):
            raise UsageError(f"config is a tako_sync.CronConfig, not {config!r}")
        checks.body(fn)
        self.fn = fn
        self.config = config or CronConfig()
        self.schedule = Schedule(schedule, self.config.tz)
        self._declared = Declaration("Cron", self, depth=2)
        self._home: Runtime | None = None
        self._background = Background()
        functools.update_wrapper(self, fn, updated=())

    @property
    def name(self) -> str:
        """The declaring variable's, in lower case; errors as of :attr:`Singleton.name`."""
        return self._declared.name

    @property
    def lease(self) -> str:
        """The name of its lease."""
        return PREFIX + self.name

    # --- Running

    def run(self, ctx: Ctx | None = None) -> None:
        """Run each slot as it comes; return once ``ctx`` is over and the slot's run has ended.

        What the function raises is told (``CronRan``) and survived, as are the storage's faults.

        Args:
            ctx: whose end ends it; as of :meth:`Singleton.run`.
        """
        self._run(self._runtime, checks.parent(ctx))

    def _run(self, runtime: Runtime, parent: Ctx | None) -> None:
        with self._slots(runtime, parent) as slots:
            slots.go_on()

    def run_due(self, ctx: Ctx | None = None) -> bool:
        """Run the slot that is due now, and return; True if it was run here.

        For a program that something else starts at each slot: Cloud Scheduler, a CronJob of
        Kubernetes, the cron of a machine. It may be started more than once for one slot, and up to
        five seconds early. With single flight the slot is run once all the same; where an
        earlier one still runs, it is waited for, as long as the slot is in time (``catch_up``).

        Args:
            ctx: whose end ends it; as of :meth:`Singleton.run`.

        Raises:
            CampaignTimeoutError: an earlier slot's run took all the time that this one had.
            CtxCancelledError: ``ctx`` was over before the function was.
            LeaseLostError: the lease was lost while it ran.
            BackendError: the storage refused, or did not answer in that time.
            Exception: what the function raised.
        """
        with self._slots(self._runtime, checks.parent(ctx)) as slots:
            return slots.run_due()

    @contextmanager
    def _slots(self, runtime: Runtime, parent: Ctx | None) -> Iterator[_Slots]:
        root = (parent or Ctx.background(runtime.clock)).child()
        slots = _Slots(self, runtime, root)
        leave = loops.enter(root)
        try:
            yield slots
        finally:
            leave()

    def start(self) -> Runner:
        """Run it in a thread of its own, once per process; return what stops it.

        Where :meth:`stop` has been called and the body goes on, the new thread waits for its end.
        """
        runtime = self._runtime  # that of who starts it, wherever the thread is
        loop = functools.partial(self._run, runtime)
        return self._background.start(f"cron {self.name}", runtime.clock, loop)

    def stop(self, timeout: float | None = None) -> bool:
        """Stop what :meth:`start` has started, as :meth:`tako_sync.Runner.stop`; True if it has."""
        return self._background.stop(timeout)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(
            "a Cron is not called: .run(ctx) and .start() run it at its times, .fn(ctx) is the "
            "bare function, for a test"
        )

    # --- Looking

    def last(self) -> Run | None:
        """Return the last slot that was begun anywhere, with single flight; one request."""
        runtime = self._runtime
        within = runtime.policy.request_timeout
        return last_run(look(runtime, runtime.identity(self.lease), within=within).content)

    def forget(self, run: Run) -> None:
        """Have the record forget that ``run`` was the last, as :meth:`last` has shown it.

        For a slot that was begun by a clock that was ahead: until its time, no other is run. Set
        that clock right first. Then the next slot is run by those who wait for it.

        Raises:
            LeaseBusyError: a slot is being run now.
            UsageError: the record tells of another run by now.
            BackendError: the storage did not answer, or refused.
        """

        def planned(content: Content) -> str:
            if last_run(content) != run:
                raise UsageError(f"cron {self.name}: the last run is not {run!r} any more")
            return ""

        runtime = self._runtime
        with Tenure(runtime, runtime.identity(self.lease), None, plan=planned) as tenure:
            tenure.campaign(0.0)
            tenure.run(lambda ctx: None)

    def holder(self) -> Holder | None:
        """Return who runs a slot now, with single flight, as :meth:`tako_sync.Lock.holder`."""
        runtime = self._runtime
        return breaking.who(runtime, runtime.identity(self.lease))

    def bound_to(self, runtime: Runtime) -> Cron:
        """Return the same Cron under ``runtime``, whatever ``configure`` says."""
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__)
        bound._home, bound._background = runtime, Background()
        return bound

    @property
    def _runtime(self) -> Runtime:
        return self._home if self._home is not None else current()


class _Slots:
    """One process's part: wait for a slot, run it unless others have, and again."""

    def __init__(self, cron: Cron, runtime: Runtime, root: Ctx) -> None:
        self._cron = cron
        self._config = cron.config
        self._schedule = cron.schedule
        self._runtime = runtime
        self._clock = runtime.clock
        self._identity = runtime.identity(cron.lease)
        self._root = root
        self._refused = ""
        self._ahead: datetime | None = None
        self._generation = fork.generation()

    def go_on(self) -> None:
        last = self._clock.wall()
        if self._config.singleflight:
            slot = self._schedule.latest(last)
            if slot is not None and self._in_time(slot):
                self._run(slot, waited_for=False)
        while not self._root.cancelled:
            if self._generation != fork.generation():
                log.warning(
                    "cron %s: a child that was forked in a run has returned from there: the loop "
                    "is its parent's, and ends here",
                    self._cron.name,
                )
                return
            due = self._schedule.after(last)
            if not self._sleep_until(due, last):
                return
            # Strictly later than the last one, whatever was done to the clock.
            last = max(due, self._schedule.latest(self._clock.wall()) or due)
            self._tell_missed(due, last)
            if self._in_time(last):
                self._run(last, waited_for=True)
            else:
                self._missed((last,), "it came too late for it")

    def run_due(self) -> bool:
        slot = self._due()
        if slot is None:
            return False
        ran, error = self._run(slot, waited_for=True)
        if error is not None and not isinstance(error, NotWanted):
            raise error
        if self._root.cancelled:
            self._root.check()  # cut short: it says so, for what has started it to start it again
        return ran

    # --- Time

    def _due(self) -> datetime | None:
        now = self._clock.wall()
        coming = self._schedule.after(now)
        if (coming - now).total_seconds() <= _EARLY:
            if not self._sleep_until(coming, now):
                self._root.check()
            return coming
        slot = self._schedule.latest(now)
        if slot is not None and not self._in_time(slot):
            self._missed((slot,), "it was started too late for it")
            return None
        return slot

    def _sleep_until(self, due: datetime, last: datetime) -> bool:
        """Wait for a time of day; return whether it has come, rather than the end.

        Args:
            last: what was reached before; the clock may be set back behind that.
        """
        while (left := (due - self._clock.wall()).total_seconds()) > 0:
            self._tell_ahead(last)
            if self._root.wait(min(left, _NAP)):
                return False
        return not self._root.cancelled

    def _late(self, slot: datetime) -> float:
        return (self._clock.wall() - slot).total_seconds()

    def _in_time(self, slot: datetime) -> bool:
        return self._time_left(slot) > 0

    def _time_left(self, slot: datetime) -> float:
        """Return the seconds in which the run of a slot may still begin."""
        window = (self._schedule.after(slot) - slot).total_seconds()
        if self._config.catch_up is not None:
            window = min(window, max(self._config.catch_up, _GRACE))
        return window - self._late(slot)

    def _tell_missed(self, first: datetime, last: datetime) -> None:
        missed = self._schedule.between(first, last, _TOLD + 1)
        if missed:
            more = len(missed) > _TOLD
            until = self._schedule.latest(last - _INSTANT) if more else None
            why = "it slept, or was busy with an earlier one"
            self._missed(tuple(missed[:_TOLD]), why, until)

    def _missed(self, slots: tuple[datetime, ...], why: str, until: datetime | None = None) -> None:
        self._runtime.tell(CronMissed(self._identity.name, self._cron.name, slots, why, until))

    def _tell_ahead(self, begun: datetime, by: str = "") -> None:
        ahead = -self._late(begun)
        if ahead > _APART and begun != self._ahead:
            self._ahead = begun
            name = self._cron.name
            self._runtime.tell(CronAhead(self._identity.name, name, begun, ahead, by))

    # --- One slot

    def _run(self, slot: datetime, *, waited_for: bool) -> tuple[bool, BaseException | None]:
        """Run a slot unless it is not wanted; return whether it began here, and what it raised."""
        began: list[float] = []

        def body(ctx: Ctx) -> object:
            began.append(self._clock.monotonic())
            return self._cron.fn(ctx)

        error: BaseException | None = None
        try:
            if self._config.singleflight:
                self._run_once_everywhere(slot, body, waited_for)
            else:
                ctx = self._root.child()
                with ctx.entered():
                    checks.finished(body(ctx))
        except Exception as raised:  # noqa: BLE001 - told below
            if not began:
                self._not_run(slot, raised)
            error = raised
        except BaseException as raised:
            if threading.current_thread() is threading.main_thread():
                raise
            error = raised
        if began:
            self._refused = ""
            took = self._clock.monotonic() - began[0]
            name = self._cron.name
            self._runtime.tell(CronRan(self._identity.name, name, slot, took, error))
            if error is not None and not isinstance(error, TakoError):
                log.error("cron %s failed:", name, exc_info=error)
        return bool(began), error

    def _run_once_everywhere(self, slot: datetime, body: Body, waited_for: bool) -> None:
        again = self._config.on_crash == "rerun"

        def planned(content: Content) -> str:
            return plan(content, slot, again=again, waited_for=waited_for)

        with Tenure(self._runtime, self._identity, self._root, plan=planned) as tenure:
            tenure.campaign(max(self._time_left(slot), _GRACE))
            start = self._clock.monotonic()

            def remembered(ctx: Ctx) -> object:
                # What is cut short, by a shutdown or a loss, stays `running` in the record:
                # whoever finds that with the lease free knows that it was not finished.
                try:
                    value = body(ctx)
                except Exception as error:
                    if not ctx.cancelled:
                        self._remember(tenure, start, f"{type(error).__name__}: {error}")
                    raise
                if not ctx.cancelled:
                    self._remember(tenure, start, "")
                return value

            tenure.run(remembered)

    def _remember(self, tenure: Tenure, start: float, error: str) -> None:
        begun = decode(tenure.memo)
        if begun is None:
            return  # adopted from a write that said nothing: nothing can be said of it
        state, took = FAILED if error else DONE, self._clock.monotonic() - start
        run = Run(begun.slot, state, begun.tries, tenure.lease.owner, took, error)
        tenure.remember(run.encode())

    def _not_run(self, slot: datetime, error: Exception) -> None:
        name, lease = self._cron.name, self._identity.name
        if isinstance(error, CutShort):
            self._runtime.tell(CronCutShort(lease, name, slot, error.run.tries))
        elif isinstance(error, Later):
            self._tell_ahead(error.run.slot, error.run.by)
        elif isinstance(error, NotWanted) or self._root.cancelled:
            pass
        elif isinstance(error, CampaignTimeoutError):
            if not self._was_begun(slot):
                self._missed((slot,), f"an earlier one was running elsewhere ({error})")
        elif isinstance(error, UsageError):
            raise error
        elif repr(error) != self._refused:
            self._refused = repr(error)
            self._runtime.tell(CronRefused(lease, name, error))

    def _was_begun(self, slot: datetime) -> bool:
        try:
            last = self._cron.bound_to(self._runtime).last()
        except TakoError:
            return False
        return last is not None and last.slot >= slot
