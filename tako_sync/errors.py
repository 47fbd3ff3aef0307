"""Every error that tako_sync raises on purpose, in one place.

All share :class:`TakoError`, survive the way to another process, and carry what a program
needs as attributes, so that nobody has to compare messages. There are two such ways: pickle
(``multiprocessing``), which keeps everything, and JSON (Celery's results), which makes an error
anew from its class and its ``args``: so these are what its constructor takes.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tako_sync.record import Holder


class TakoError(Exception):
    """The base of every error raised by tako_sync."""

    _message: str | None = None

    def _says(self, message: object, *made_of: Any) -> None:
        """Have this as the message, and ``args`` be what makes such an error anew."""
        self._message, self.args = str(message), made_of  # a backend may hand on what it caught

    def __str__(self) -> str:
        return super().__str__() if self._message is None else self._message

    def __reduce__(self) -> tuple[Callable[..., TakoError], tuple[Any, ...]]:
        return _revive, (type(self), self.args, self.__dict__.copy())


def _revive(cls: type[TakoError], args: tuple[Any, ...], state: dict[str, Any]) -> TakoError:
    error = cls.__new__(cls, *args)
    error.args = args  # an OSError, as TimeoutError is, leaves them to an __init__ of ours
    error.__dict__.update(state)
    return error


# --- Bad input: raised where it is written -------------------------------------------


class ConfigurationError(TakoError, ValueError):
    """A name, a timing, a backend URL or an environment variable cannot work."""


class UsageError(TakoError, TypeError):
    """A call of the wrong shape; the message says what to write instead."""


class NotReentrantError(TakoError, RuntimeError):
    """``do`` was called inside a hold of the same name and would wait for itself for ever."""


# --- Contention ------------------------------------------------------------------------


class LeaseBusyError(TakoError):
    """Someone else holds the lease.

    Attributes:
        lease: the lease's name.
        holder: who holds it, as far as the record tells; None if it could not be read, and in
            a copy that was made by JSON: the message names it still.
    """

    def __init__(self, lease: str, holder: Holder | None = None, message: str = "") -> None:
        super().__init__()
        text = message or f'lease "{lease}" is busy: {_held_by(holder)}'
        self._says(text, lease, None, text)
        self.lease = lease
        self.holder = holder


class CampaignTimeoutError(LeaseBusyError, TimeoutError):
    """The lease did not become free within the given time.

    Attributes:
        timeout: the seconds that were allowed.
    """

    def __init__(
        self, lease: str, timeout: float, holder: Holder | None = None, message: str = ""
    ) -> None:
        text = message or f'lease "{lease}" was not free within {timeout:g} s: {_held_by(holder)}'
        super().__init__(lease, holder, text)
        self._says(text, lease, timeout, None, text)
        self.timeout = timeout


def _held_by(holder: Holder | None) -> str:
    return f"held by {holder}" if holder is not None else "its holder is not known"


# --- The end of a hold -----------------------------------------------------------------


class LossReason(str, enum.Enum):
    """Why a hold ended without a release. A ``str``: compare with the value or the member."""

    EXPIRED = "expired"
    """The deadline passed and no renewal had failed: the process was stopped or starved."""
    UNREACHABLE = "unreachable"
    """The deadline passed while the storage could not be reached."""
    DENIED = "denied"
    """The deadline passed while the storage refused the renewals."""
    TAKEN = "taken"
    """Another holder's record stands in the storage."""
    BROKEN = "broken"
    """An operator broke the lease by force."""
    DELETED = "deleted"
    """The record is gone."""
    UNREADABLE = "unreadable"
    """The record was replaced by something that cannot be read."""
    SILENT = "silent"
    """The body was not heard of, by ``ctx.beat()``, for as long as its Singleton allows."""
    FORKED = "forked"
    """This process is a forked child; the lease stayed with the parent."""

    __str__ = str.__str__


class LeaseLostError(TakoError):
    """The hold ended without a release; work after the loss point may overlap another's.

    Attributes:
        lease: the lease's name.
        reason: a :class:`LossReason`.
        fence: the fencing token of the lost hold.
        value: what the body returned, if it returned all the same; else None. Also None in
            a copy that was pickled where it cannot be, or made by JSON: the news of the loss
            counts more.
    """

    def __init__(self, lease: str, reason: LossReason, fence: int, value: Any = None) -> None:
        super().__init__()
        self._says(
            f'lease "{lease}" was lost while held (ttl expired or forcibly taken) '
            "— work after the loss point may not have run",
            lease,
            reason,
            fence,
        )
        self.lease = lease
        self.reason = LossReason(reason)
        self.fence = fence
        self.value = value

    def __reduce__(self) -> tuple[Callable[..., TakoError], tuple[Any, ...]]:
        state = {name: held for name, held in self.__dict__.items() if name != "value"}
        return _revive_lost, (type(self), self.args, state, _IfItCan(self.value))


class _IfItCan:
    """A value that goes along into a copy; into a pickle only if it can be pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _IfItCan:
        import copy

        return _IfItCan(copy.deepcopy(self.value, memo))

    def __reduce__(self) -> tuple[type[_IfItCan], tuple[Any]]:
        import pickle

        try:
            pickle.dumps(self.value)
        except Exception:  # noqa: BLE001 - whatever the value's own code raises
            return _IfItCan, (None,)
        return _IfItCan, (self.value,)


def _revive_lost(
    cls: type[TakoError], args: tuple[Any, ...], state: dict[str, Any], value: _IfItCan
) -> TakoError:
    return _revive(cls, args, {**state, "value": value.value})


class CtxCancelledError(TakoError):
    """The ctx was cancelled; the message says by what."""


class CtxDeadlineError(CtxCancelledError, TimeoutError):
    """The ctx's own time is over."""


class ShutdownError(CtxCancelledError):
    """The process, or this loop of it, is asked to stop; a lease is kept until its body returns."""


class HandoverRequestedError(CtxCancelledError):
    """Someone asked the holder to hand over. The lease is kept until the body has returned."""


class NotAssuredError(TakoError):
    """``ctx.ensure(seconds)`` found less time assured than was asked for.

    Attributes:
        wanted: the seconds asked for.
        remaining: the seconds assured at that moment.
    """

    def __init__(self, wanted: float, remaining: float) -> None:
        super().__init__()
        self._says(
            f"{wanted:g} s were asked for, but only {remaining:.3f} s are assured",
            wanted,
            remaining,
        )
        self.wanted = wanted
        self.remaining = remaining


# --- Records ---------------------------------------------------------------------------


class NameCollisionError(TakoError):
    """The stored record belongs to another application, environment or name.

    ``run-<app>-<env>-<name>`` is ambiguous where the parts contain dashes. Rename one of
    the two, or give one of them another bucket.

    Attributes:
        key: the name under which the storage keeps the record.
        wanted: ``app/env/name`` of the caller.
        found: ``app/env/name`` of the record.
    """

    def __init__(self, key: str, wanted: str, found: str) -> None:
        super().__init__()
        self._says(
            f'"{key}" is the lease of {found}, not of {wanted}: rename one of them',
            key,
            wanted,
            found,
        )
        self.key = key
        self.wanted = wanted
        self.found = found


class RecordUnreadableError(TakoError):
    """What is stored for the lease cannot be read: neither free nor known to be held.

    It counts as held until it has stood unchanged for 30 s; then it is taken over.

    Attributes:
        lease: the lease's name.
        key: the name under which the storage keeps the record.
        problem: what is wrong with it.
    """

    def __init__(self, lease: str, key: str, problem: str, version: str) -> None:
        super().__init__()
        self._says(
            f'the record of lease "{lease}" cannot be read ({key}: {problem}); it is taken over '
            "once it has stood unchanged for 30 s. To mend it at once, when nothing can hold it: "
            f"tako_sync.Lock({lease!r}).break_(version={version!r}, now=True)",
            lease,
            key,
            problem,
            version,
        )
        self.lease = lease
        self.key = key
        self.problem = problem
        self.version = version


# --- Storage ---------------------------------------------------------------------------


class BackendError(TakoError):
    """The base of what a storage backend raises."""


class VersionConflictError(BackendError):
    """The record does not have the expected version; nothing was written by this request."""


class BackendUnavailableError(BackendError):
    """A transient fault: a write may or may not have been applied, now or later.

    Attributes:
        retry_after: the least seconds to wait before the next request; 0 if free.
    """

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__()
        self._says(message, message, retry_after)
        self.retry_after = retry_after


class BackendDeniedError(BackendError):
    """The storage refuses for good: a missing permission or a wrong configuration."""


class EventLoopWarning(RuntimeWarning):
    """tako_sync blocks its thread, and was called in one that runs an event loop."""
