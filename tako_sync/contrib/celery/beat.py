"""A beat of which any number may be started: one sends, the others stand by.

``celery -A shop beat -S tako_sync.contrib.celery.beat:LeasedScheduler``
"""

from __future__ import annotations

import logging
from typing import Any, Final

from celery.beat import ScheduleEntry, Scheduler

from tako_sync.contrib.celery.sent import encode, remembered
from tako_sync.contrib.mixins import comes_first
from tako_sync.errors import BackendDeniedError, TakoError
from tako_sync.lock import Lock
from tako_sync.runtime import current, log
from tako_sync.tenure import Tenure

DEFAULT_LEASE: Final = "celery-beat"


class LeasedMixin:
    """For a scheduler: it ticks while it holds a lease. Put it before the class of the scheduler.

    Nothing is sent once the lease is lost. It is given back when the beat ends (SIGTERM, SIGINT),
    and another one sends within a poll; of one that was killed, within a ttl and a poll. A beat
    that is paused between its look at the lease and the sending sends late, and maybe twice.

    The lease is ``celery-beat``, or what ``app.conf.tako_beat_lease`` says. Beats with different
    schedules need different ones.
    """

    _tenure: Tenure | None = None
    _ticking = False
    _closed = False
    _told = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        comes_first(cls, LeasedMixin, Scheduler)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        if self._closed:
            return self.max_interval  # type: ignore[attr-defined,no-any-return]
        self._ticking = True
        try:
            if not self._leads():
                return self._poll()
            return super().tick(*args, **kwargs)  # type: ignore[misc,no-any-return]
        finally:
            self._ticking = False

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        tenure = self._tenure
        if tenure is None or tenure.ctx.cancelled:
            return  # lost since the tick began; whoever leads now sends it
        super().apply_entry(entry, producer=producer)  # type: ignore[misc]
        self._sent(tenure)

    def close(self) -> None:
        # Celery calls this in the handler of SIGTERM, and once more when that has unwound. In the
        # handler it may have interrupted this very thread inside the lease's own machinery.
        if not self._ticking:
            self._closed = True
            self._step_down("it ends")
        super().close()  # type: ignore[misc]

    # --- The lease

    def _leads(self) -> bool:
        tenure = self._tenure
        if tenure is not None:
            if not tenure.ctx.cancelled:
                return True
            self._step_down(str(tenure.ctx.cause))
            return False
        return self._campaign()

    def _campaign(self) -> bool:
        name = getattr(self.app.conf, "tako_beat_lease", None) or DEFAULT_LEASE  # type: ignore[attr-defined]
        tenure = Lock(name)._tenure(None)
        try:
            holder = tenure.attempt()
            if holder is not None:
                self._tell(
                    logging.INFO, f"beat stands by: lease {name!r} is held by {holder.owner}"
                )
                return False
            self._tenure = tenure
            tenure.begin()
            self._resume(tenure)
            self._tell(logging.INFO, f"beat sends, under fence {tenure.lease.fence}")
            return True
        except TakoError as error:
            refused = isinstance(error, BackendDeniedError)
            self._tell(logging.ERROR if refused else logging.WARNING, f"beat stands by: {error}")
            return False
        finally:
            if self._tenure is not tenure:
                tenure.close()

    def _step_down(self, why: str) -> None:
        tenure = self._tenure
        if tenure is not None:
            with tenure:
                tenure.conclude("returned")
            self._tenure = None  # not before: a signal may strike, and close() comes once more
            self._tell(logging.INFO, f"beat stands by: {why}")

    def _poll(self) -> float:
        runtime = current()
        policy = runtime.policy
        return policy.jittered(policy.poll, runtime.clock.random())

    def _tell(self, level: int, what: str) -> None:
        if what != self._told:  # once, not at each poll
            self._told = what
            log.log(level, "%s", what)

    # --- What was sent; for schedulers that remember it themselves, nothing to do

    def _resume(self, tenure: Tenure) -> None:
        """Take over from whoever has sent until now."""

    def _sent(self, tenure: Tenure) -> None:
        """Take in that an entry was sent."""


class LeasedScheduler(LeasedMixin, Scheduler):
    """Celery's scheduler, with its times remembered by the lease: no file, on no machine.

    Of a beat that was killed, what it sent in its last ttl/3 may be sent again by the next one; of
    one that ended, nothing. An entry that nobody has sent yet counts from when a beat first led.
    """

    def _resume(self, tenure: Tenure) -> None:
        for name, entry in self.schedule.items():
            now = entry.default_now()
            at = remembered(tenure.memo, name, now)
            entry.last_run_at = now if at is None else at
        self._heap = None  # made anew from these times
        # A weekly entry is to come although beats are replaced daily: its beginning counts on.
        self._sent(tenure)

    def _sent(self, tenure: Tenure) -> None:
        times = {name: entry.last_run_at for name, entry in self.schedule.items()}
        tenure.remember(encode({name: at for name, at in times.items() if at is not None}))
