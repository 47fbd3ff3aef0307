"""Distributed leases for threaded Python: one at a time, across all processes.

The floors, from the ground up; a module imports only from those below it (setup.cfg):

    errors                          what can go wrong, as types
    snapshot, record                what is stored, and how it is read
    policy, events, names           how long, what happened, what it is called
    abc                             what implementers write against
    rules, claim, tenancy           the lease protocol, without waiting
    flag, fork, alarm, clock        waiting, processes, time
    retry, bounded                  trying again, and no longer than allowed
    backends, lease, line, runtime  storage, one hold, the binding of this process
    ctx, look, checks               what a body receives; one look; what is refused
    campaign, heartbeat, release, breaking
    tenure                          one hold from campaign to release: who comes when
    runner, vigil, declared         a loop in a thread; does it run anywhere; what it is called
    schedule, slots                 when a Cron is due; which of its slots is to be run
    lock, singleton, cron, shutdown what a user writes
    probe, checkup, listing         whether a storage does what leases need; what is in it
    application, endpoint           what a module declares; how a process is asked for its health
    dev, serve, deploy              all of it in one process; one thing in a container; manifests
    testing, contrib, demo          for tests; for frameworks, each by itself; to be seen at work

Nothing is imported before it is used: ``import tako_sync`` costs a few milliseconds.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it, without the 20 ms that its import can cost
if TYPE_CHECKING:
    from typing import Any

    from tako_sync.checkup import doctor as doctor
    from tako_sync.cron import Cron as Cron
    from tako_sync.cron import CronConfig as CronConfig
    from tako_sync.ctx import Ctx as Ctx
    from tako_sync.ctx import current_ctx as current_ctx
    from tako_sync.errors import BackendDeniedError as BackendDeniedError
    from tako_sync.errors import BackendError as BackendError
    from tako_sync.errors import BackendUnavailableError as BackendUnavailableError
    from tako_sync.errors import CampaignTimeoutError as CampaignTimeoutError
    from tako_sync.errors import ConfigurationError as ConfigurationError
    from tako_sync.errors import CtxCancelledError as CtxCancelledError
    from tako_sync.errors import CtxDeadlineError as CtxDeadlineError
    from tako_sync.errors import EventLoopWarning as EventLoopWarning
    from tako_sync.errors import HandoverRequestedError as HandoverRequestedError
    from tako_sync.errors import LeaseBusyError as LeaseBusyError
    from tako_sync.errors import LeaseLostError as LeaseLostError
    from tako_sync.errors import LossReason as LossReason
    from tako_sync.errors import NameCollisionError as NameCollisionError
    from tako_sync.errors import NotAssuredError as NotAssuredError
    from tako_sync.errors import NotReentrantError as NotReentrantError
    from tako_sync.errors import RecordUnreadableError as RecordUnreadableError
    from tako_sync.errors import ShutdownError as ShutdownError
    from tako_sync.errors import TakoError as TakoError
    from tako_sync.errors import UsageError as UsageError
    from tako_sync.errors import VersionConflictError as VersionConflictError
    from tako_sync.footprint import Footprint as Footprint
    from tako_sync.lock import Lock as Lock
    from tako_sync.lock import TryResult as TryResult
    from tako_sync.policy import LeasePolicy as LeasePolicy
    from tako_sync.record import Holder as Holder
    from tako_sync.runner import Runner as Runner
    from tako_sync.runtime import Runtime as Runtime
    from tako_sync.runtime import configure as configure
    from tako_sync.shutdown import install_signal_handlers as install_signal_handlers
    from tako_sync.singleton import Singleton as Singleton
    from tako_sync.singleton import SingletonConfig as SingletonConfig
    from tako_sync.vigil import Health as Health

_HOMES = {
    "checkup": ("doctor",),
    "cron": ("Cron", "CronConfig"),
    "ctx": ("Ctx", "current_ctx"),
    "errors": (
        "BackendDeniedError",
        "BackendError",
        "BackendUnavailableError",
        "CampaignTimeoutError",
        "ConfigurationError",
        "CtxCancelledError",
        "CtxDeadlineError",
        "EventLoopWarning",
        "HandoverRequestedError",
        "LeaseBusyError",
        "LeaseLostError",
        "LossReason",
        "NameCollisionError",
        "NotAssuredError",
        "NotReentrantError",
        "RecordUnreadableError",
        "ShutdownError",
        "TakoError",
        "UsageError",
        "VersionConflictError",
    ),
    "footprint": ("Footprint",),
    "lock": ("Lock", "TryResult"),
    "policy": ("LeasePolicy",),
    "record": ("Holder",),
    "runner": ("Runner",),
    "runtime": ("Runtime", "configure"),
    "shutdown": ("install_signal_handlers",),
    "singleton": ("Singleton", "SingletonConfig"),
    "vigil": ("Health",),
}
_HOME_OF = {name: home for home, members in _HOMES.items() for name in members}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
