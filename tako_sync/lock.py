"""``Lock``: guards a critical section across all instances of an application."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Literal, NoReturn, ParamSpec, Protocol, TypeVar, overload

from tako_sync import breaking, checks, names
from tako_sync.ctx import Ctx
from tako_sync.errors import ConfigurationError, LeaseBusyError, UsageError
from tako_sync.record import Holder, Identity
from tako_sync.runtime import Runtime, current, longest_wait
from tako_sync.tenure import Tenure, note_loss

T = TypeVar("T")
P = ParamSpec("P")


class TryResult(tuple[bool, "T | None"]):
    """What ``try_do`` answers: ``ran, value = lock.try_do(fn)``. True if the body ran.

    Attributes:
        ran: whether the body ran.
        value: what it returned; None if it did not run.
        holder: who holds the lease, if the body did not run.
    """

    _fields = ("ran", "value")
    holder: Holder | None

    def __new__(
        cls, ran: bool, value: T | None = None, holder: Holder | None = None
    ) -> TryResult[T]:
        result = super().__new__(cls, (ran, value))
        result.holder = holder
        return result

    @property
    def ran(self) -> bool:
        return self[0]

    @property
    def value(self) -> T | None:
        return self[1]

    def __bool__(self) -> bool:
        return self.ran

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.ran, self.value, self.holder

    def __repr__(self) -> str:
        return f"TryResult(ran={self.ran}, value={self.value!r})"


class _Guard(Protocol):
    def __call__(self, fn: Callable[P, T], /) -> Callable[P, T]: ...


class _SkippingGuard(Protocol):
    def __call__(self, fn: Callable[P, T], /) -> Callable[P, T | None]: ...


class Lock:
    """At most one body at a time runs under a name, across all processes that share a storage.

    A holder that loses the lease while its body runs is told by its ctx before anyone else can
    have it; a body that does not ask goes on, and overlaps. Send ``ctx.fence`` along with every
    write, and have the receiver refuse a smaller one than it has seen: that alone makes a
    paused holder harmless. Locks are not reentrant and not fair.

    The name is the identity: two locks of one name are the same lock. There are no options.

    Args:
        name: 1 to 100 characters from ``a-z0-9._-``, a constant of the program.

    Raises:
        ConfigurationError: the name is malformed or reserved.
    """

    def __init__(self, name: str, *unwanted: object, **options: object) -> None:
        if unwanted or options:
            raise UsageError(
                "Lock accepts no options: the lease policy is framework-owned "
                "(tests and operators set it with tako_sync.configure(policy=...))"
            )
        self._name = names.lease(name)
        self._home: Runtime | None = None

    @property
    def name(self) -> str:
        return self._name

    def bound_to(self, runtime: Runtime) -> Lock:
        """Return the lock of this name under ``runtime``, whatever ``configure`` says."""
        lock = Lock(self._name)
        lock._home = runtime
        return lock

    # --- Running a body

    def do(
        self, fn: Callable[[Ctx], T], *, ctx: Ctx | None = None, timeout: float | None = None
    ) -> T:
        """Wait until the lease is held, run ``fn(ctx)`` holding it, return its value.

        Args:
            fn: takes the ctx as its one argument.
            ctx: a parent; its end ends the waiting, and cancels the body's ctx.
            timeout: seconds to wait at most; None for as long as the policy's ``wait`` says: by
                default for ever.

        Raises:
            CampaignTimeoutError: not free in time; it names the holder.
            LeaseLostError: ``fn`` returned, but the lease had been lost; it has the value.
            NotReentrantError: called by the body that holds this very lease.
            BackendDeniedError: the storage refuses for good.
        """
        checks.body(fn)
        allowed = self._allowed(timeout)
        with self._tenure(checks.parent(ctx)) as tenure:
            tenure.campaign(allowed)
            return tenure.run(fn)

    def try_do(self, fn: Callable[[Ctx], T], *, ctx: Ctx | None = None) -> TryResult[T]:
        """Run ``fn(ctx)`` if the lease is free right now; never waits for another holder.

        Returns:
            ``ran, value``. ``ran`` is False if someone else holds it, which is no error.

        Raises:
            BackendUnavailableError: it could not be settled whether the lease is held.
            RecordUnreadableError: what is stored cannot be read, and has not aged.
            LeaseLostError: ``fn`` returned, but the lease had been lost; it has the value.
            BackendDeniedError: the storage refuses for good.
        """
        checks.body(fn)
        with self._tenure(checks.parent(ctx)) as tenure:
            holder = tenure.attempt()
            if holder is not None:
                return TryResult(False, None, holder)
            return TryResult(True, tenure.run(fn))

    def hold(self, *, ctx: Ctx | None = None, timeout: float | None = None) -> Hold:
        """Return a block that holds the lease: ``with lock.hold(timeout=10) as ctx:``.

        Args and errors are those of :meth:`do`; ``timeout=0`` makes one attempt. If the block
        ends normally after a loss, ``LeaseLostError`` is raised at its end.
        """
        parent, allowed = checks.parent(ctx), self._allowed(timeout)
        return Hold(functools.partial(self._tenure, parent), allowed, self._name)

    @overload
    def guard(self, fn: Callable[P, T], /) -> Callable[P, T]: ...
    @overload
    def guard(self, *, busy: Literal["skip"], timeout: float | None = None) -> _SkippingGuard: ...
    @overload
    def guard(
        self, *, busy: Literal["wait", "raise"] = "wait", timeout: float | None = None
    ) -> _Guard: ...
    def guard(
        self,
        fn: Any = None,
        *,
        busy: str = "wait",
        timeout: float | None = None,
    ) -> Any:
        """Decorate a function so that each call holds the lease. It keeps its own arguments.

        Inside, ``tako_sync.current_ctx()`` finds the ctx.

        Args:
            busy: what a call does while someone else holds the lease: ``wait``, ``skip``
                (return None) or ``raise`` (``LeaseBusyError``).
            timeout: seconds to wait at most. By default ``wait`` waits as :meth:`do` does, the
                others not at all.
        """
        if busy not in ("wait", "skip", "raise"):
            raise ConfigurationError(f"busy is 'wait', 'skip' or 'raise', not {busy!r}")
        checks.timeout(timeout)
        asked = timeout if timeout is not None or busy == "wait" else 0.0

        def decorate(guarded: Callable[..., Any]) -> Callable[..., Any]:
            checks.guarded(guarded)

            @functools.wraps(guarded)
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._tenure(None) as tenure:
                    try:
                        tenure.campaign(self._allowed(asked))
                    except LeaseBusyError:
                        if busy == "skip":
                            return None
                        raise
                    return tenure.run(lambda ctx: guarded(*args, **kwargs))

            return call

        return decorate if fn is None else decorate(fn)

    # --- Looking and breaking

    def holder(self) -> Holder | None:
        """Return who holds the lease, since when, its fence and time left; None if it is free."""
        return breaking.who(self._runtime, self._identity)

    def break_(
        self, holder: Holder | None = None, *, version: str = "", now: bool = False, by: str = ""
    ) -> None:
        """Break the lease by force, exactly as ``holder`` (or ``version``) showed it.

        The holder learns of it at its next heartbeat; until it has ended, or for a ttl, the name
        stays held. With ``now`` it is free at once, and two bodies may overlap.

        Args:
            holder: what :meth:`holder` returned.
            version: its version, where there is no more to show.
            now: free it at once.
            by: who breaks it, for the record.

        Raises:
            LeaseBusyError: it has changed since it was shown.
        """
        shown, owner = checks.shown(holder, version)
        breaking.break_lease(
            self._runtime, self._identity, version=shown, owner=owner, now=now, by=checks.by(by)
        )

    def request_handover(self, holder: Holder, *, by: str = "") -> None:
        """Ask ``holder`` to hand over: its ctx is cancelled at its next heartbeat.

        It keeps the lease until its body has returned.

        Raises:
            LeaseBusyError: it has changed since it was shown.
            UsageError: nobody holds it, or it was asked already.
        """
        shown, owner = checks.shown(holder, "")
        breaking.request_handover(
            self._runtime, self._identity, version=shown, owner=owner, by=checks.by(by)
        )

    # --- What people try first

    def acquire(self, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(
            "Lock has no acquire(): write `with lock.hold(timeout=...) as ctx:` or "
            "lock.do(fn); a lease must end with the work it guards"
        )

    def release(self, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(
            "Lock has no release(): the end of `with lock.hold() as ctx:` or of lock.do(fn) is it"
        )

    def locked(self) -> NoReturn:
        raise UsageError(
            "Lock has no locked(): the answer is old when it arrives. To run only if it is free, "
            "write lock.try_do(fn); to see who holds it, lock.holder()"
        )

    def __enter__(self) -> NoReturn:
        raise UsageError("write `with lock.hold() as ctx:` in place of `with lock:`")

    def __exit__(self, *exc_info: object) -> None: ...

    # --- Inside

    @property
    def _runtime(self) -> Runtime:
        return self._home if self._home is not None else current()

    @property
    def _identity(self) -> Identity:
        return self._runtime.identity(self._name)

    def _allowed(self, timeout: float | None) -> float | None:
        allowed = checks.timeout(timeout)
        return longest_wait(self._runtime.policy) if allowed is None else allowed

    def _tenure(self, parent: Ctx | None) -> Tenure:
        runtime = self._runtime
        return Tenure(runtime, runtime.identity(self._name), parent)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lock):
            return NotImplemented
        return (self._name, self._home) == (other._name, other._home)

    def __hash__(self) -> int:
        return hash((self._name, self._home))

    def __reduce__(self) -> tuple[type[Lock], tuple[str]]:
        return Lock, (self._name,)  # the name is the identity; the binding is the process's

    def __repr__(self) -> str:
        return f"Lock({self._name!r})"


class Hold:
    """A block that holds a lease. Made by :meth:`Lock.hold`; used once."""

    # Here for the collector's sake: Ctrl-C may strike before __init__ has set them.
    _tenure: Tenure | None = None
    _leave: Callable[[], None] | None = None

    def __init__(self, make: Callable[[], Tenure], timeout: float | None, name: str) -> None:
        self._make: Callable[[], Tenure] | None = make
        self._timeout = timeout
        self._name = name

    def __enter__(self) -> Ctx:
        make, self._make = self._make, None
        if make is None:
            raise UsageError(f'this hold of lease "{self._name}" was used: call hold() anew')
        self._tenure = tenure = make()
        try:
            tenure.campaign(self._timeout)
            tenure.begin()
            self._leave = tenure.ctx.enter()
        except BaseException:
            tenure.close()
            raise
        return tenure.ctx

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        tenure, leave = self._tenure, self._leave
        if tenure is None or leave is None:
            raise UsageError(f'this hold of lease "{self._name}" is not entered, or was left')
        try:
            loss = tenure.conclude("returned" if error is None else "raised")
        finally:
            tenure.close()
            leave()
            self._tenure = self._leave = None  # nothing for __del__, which swallows a Ctrl-C
        if error is not None:
            note_loss(error, loss)
        elif loss is not None:
            raise loss.with_traceback(None)

    def __del__(self) -> None:
        # Entered and dropped without an exit: nobody is left to end it.
        if self._tenure is not None:
            self._tenure.abandon()
        if self._leave is not None:
            self._leave()
