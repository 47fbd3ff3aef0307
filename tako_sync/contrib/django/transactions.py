"""A lease that outlasts the transaction in which its block ends.

Released inside ``atomic()``, or a view under ``ATOMIC_REQUESTS``, a lease frees its name before the
work is committed: the next holder begins, and does not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from tako_sync import checks
from tako_sync.contrib.django.atomic import in_transaction
from tako_sync.ctx import Ctx
from tako_sync.errors import UsageError
from tako_sync.lock import Lock
from tako_sync.tenure import Tenure, note_loss


def hold(
    lock: Lock | str,
    *,
    until_commit: bool = False,
    timeout: float | None = None,
    using: str = DEFAULT_DB_ALIAS,
    ctx: Ctx | None = None,
) -> Hold:
    """Return a block that holds a lease: ``with hold("ledger", until_commit=True) as ctx:``.

    With ``until_commit``, and in a transaction, the lease is held, and renewed, until that is
    committed or rolled back: the outermost one; or the savepoint in which the block ended, if that
    is rolled back. Outside of a transaction it ends with the block, as that of ``Lock.hold``.

    A lease that is lost before the end of the block raises ``LeaseLostError`` there, which rolls
    the transaction back. One that is lost between there and the commit is told by the same error
    after it: what was committed may have overlapped another's work. Fences close that gap
    (:mod:`tako_sync.contrib.django.fenced`).

    In a ``TestCase``, whose transaction never ends, hooks on commit are run by
    ``captureOnCommitCallbacks(execute=True)``, and the lease is given back there.

    Args:
        lock: or its name.
        until_commit: whether it outlasts the transaction.
        timeout: seconds to wait for it; None as long as the settings say,
            ``TAKO["TIMEOUT"]``: 10 by default.
        using: the database whose transaction it is.
        ctx: a parent, as of ``Lock.do``.

    Raises:
        CampaignTimeoutError: not free in time, as the block is entered; and others as ``Lock.do``.
        LeaseLostError: see above.
    """
    guarding = Lock(lock) if isinstance(lock, str) else lock
    if not isinstance(guarding, Lock):
        raise UsageError(f"hold() is given a tako_sync.Lock or its name, not {lock!r}")
    if using not in connections:
        raise UsageError(f"there is no database {using!r} in DATABASES")
    return Hold(guarding, until_commit, checks.timeout(timeout), using, checks.parent(ctx))


class Hold:
    """Made by :func:`hold`; used once."""

    _tenure: Tenure | None = None
    _leave: Callable[[], None] | None = None

    def __init__(
        self,
        lock: Lock,
        until_commit: bool,
        timeout: float | None,
        using: str,
        ctx: Ctx | None,
    ) -> None:
        self._lock = lock
        self._until_commit = until_commit
        self._timeout = timeout
        self._using = using
        self._parent = ctx
        self._used = False

    def __enter__(self) -> Ctx:
        if self._used:
            raise UsageError(f'this hold of lease "{self._lock.name}" was used: call hold() anew')
        self._used = True
        self._tenure = tenure = self._lock._tenure(self._parent)
        try:
            tenure.campaign(self._lock._allowed(self._timeout))
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
        traceback: TracebackType | None,
    ) -> None:
        tenure, leave = self._tenure, self._leave
        if tenure is None or leave is None:
            raise UsageError(f'this hold of lease "{self._lock.name}" is not entered, or was left')
        try:
            lost = tenure.lease.loss is not None
            if self._until_commit and not lost and in_transaction(self._using):
                # Nobody else may refer to it: that it is dropped is how a rollback is told.
                transaction.on_commit(_AtTheEnd(tenure), using=self._using)
                return
            loss = tenure.conclude("returned" if error is None else "raised")
        except BaseException:
            tenure.close()
            raise
        finally:
            leave()
            self._tenure = self._leave = None
        if error is not None:
            note_loss(error, loss)
        elif loss is not None:
            raise loss.with_traceback(None)


class _AtTheEnd:
    """Gives a lease back after the commit, when it is called; after a rollback, when it is dropped.

    Django has no hook for rollbacks: it drops the hooks for the commit, which no longer comes.
    """

    def __init__(self, tenure: Tenure) -> None:
        self._tenure: Tenure | None = tenure

    def __call__(self) -> None:
        tenure, self._tenure = self._tenure, None
        if tenure is not None:
            with tenure:
                loss = tenure.conclude("returned")
            if loss is not None:
                raise loss

    def __del__(self) -> None:
        if self._tenure is not None:
            self._tenure.close()
