"""A lease that outlasts the transaction in which its block ends.

Released inside ``atomic()``, or a view under ``ATOMIC_REQUESTS``, a lease frees its name before the
work is committed: the next holder begins, and does not see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from tako_sync import checks
from tako_sync.contrib.django.atomic import by_hand, in_transaction
from tako_sync.ctx import Ctx
from tako_sync.errors import UsageError
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.runtime import Runtime
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
    (:mod:`tako_sync.contrib.django.fenced`). As with any hook on commit that fails, Django leaves
    out those that were registered later; those that are registered inside the block come before,
    and run under the lease.

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
        UsageError: ``until_commit`` where transactions are managed by hand: Django says nothing
            of their ends.
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
        if self._until_commit and by_hand(self._using):
            raise UsageError(
                f"until_commit=True: autocommit is off on {self._using!r}, and Django does not say "
                "when a transaction ends that is managed by hand. Write atomic(), or commit inside "
                "the block"
            )
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
                _AtTheEnd(tenure, self._lock._runtime, connections[self._using])
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

    Django has no hook for rollbacks: it drops the hooks for the commit, which no longer comes. But
    one that fails keeps those behind it from being called, and who keeps its traceback keeps them
    from being dropped. So at each poll it is looked whether the transaction has the hook still.
    """

    def __init__(self, tenure: Tenure, runtime: Runtime, connection: BaseDatabaseWrapper) -> None:
        self._tenures = [tenure]  # pop is atomic: what ends it first, ends it
        self._runtime = runtime
        self._connection = connection
        self._over = Flag()
        self._look_later()
        # Nobody else may refer to it: see above.
        transaction.on_commit(self, using=connection.alias)

    def __call__(self) -> None:
        for tenure in self._taken():
            with tenure:
                loss = tenure.conclude("returned")
            if loss is not None:
                raise loss

    def __del__(self) -> None:
        self._give_back()

    def _give_back(self) -> None:
        for tenure in self._taken():
            tenure.close()

    def _taken(self) -> Iterator[Tenure]:
        try:
            tenure = self._tenures.pop()
        except IndexError:
            return
        self._over.set()
        self._looking.join(0)  # takes back what has not begun
        yield tenure

    def _look_later(self) -> None:
        hook = weakref.ref(self)

        def look() -> None:
            found = hook()
            if found is not None:
                found._look()

        poll = self._runtime.policy.poll
        self._looking = self._runtime.clock.after(poll, look, "tako-commit", self._over)

    def _look(self) -> None:
        if any(function is self for _, function, *_ in list(self._connection.run_on_commit)):
            self._look_later()
        else:
            self._give_back()
