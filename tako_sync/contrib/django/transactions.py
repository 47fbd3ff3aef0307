"""A lease that outlasts its block, until the transaction ends in which that is.

Released inside ``atomic()``, or a view under ``ATOMIC_REQUESTS``, a lease frees its name before the
work is committed: the next holder begins, and does not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from django.db import DEFAULT_DB_ALIAS, connections

from tako_sync import checks
from tako_sync.contrib.django.atomic import by_hand, ends_itself
from tako_sync.contrib.django.commit import Deferred, pending
from tako_sync.ctx import Ctx
from tako_sync.errors import NotReentrantError, UsageError
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
    committed or rolled back: the outermost one; or the ``atomic()`` in which the block ended, if
    that is rolled back. It is given back before any hook on commit runs. A further block of the
    same lease in that transaction joins the first: same ctx, same fence. Outside of a transaction
    it ends with the block, as that of ``Lock.hold``.

    A lease that is lost before the end of the block raises ``LeaseLostError`` there, which rolls
    the transaction back. One that is lost between there and the commit is told by the same error
    after the commit, when all hooks have run: what was committed may have overlapped another's
    work. Fences close that gap (:mod:`tako_sync.contrib.django.fenced`).

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
        NotReentrantError: a further block in a transaction, with a ``ctx`` of its own.
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
    _earlier: Deferred | None = None

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
        joined = self._join()
        if joined is not None:
            return joined.ctx
        self._tenure = tenure = self._lock._tenure(self._parent)
        try:
            tenure.campaign(self._lock._allowed(self._timeout))
            tenure.begin()
            self._leave = tenure.ctx.enter()
        except BaseException:
            tenure.close()
            raise
        return tenure.ctx

    def _join(self) -> Tenure | None:
        """Enter the lease that an earlier block has left to this transaction, if one has."""
        earlier = self._left_by_another()
        if earlier is None:
            return None
        tenure = earlier.tenure
        if self._parent is None and tenure.lease.loss is None:
            earlier.joined += 1
            self._earlier, self._tenure, self._leave = earlier, tenure, tenure.ctx.enter()
            return tenure
        del earlier  # a traceback would keep it beyond the rollback that is to drop it
        tenure.ctx.check()
        raise NotReentrantError(
            f'lease "{self._lock.name}" is held until this transaction ends: a further block in it '
            "joins the first, and cannot have a ctx of its own"
        )

    def _left_by_another(self) -> Deferred | None:
        runtime, name = self._lock._runtime, self._lock.name
        found = pending(connections[self._using])
        return next((hook for hook in found if hook.waits_for(runtime, name)), None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tenure, leave, earlier = self._tenure, self._leave, self._earlier
        if tenure is None or leave is None:
            raise UsageError(f'this hold of lease "{self._lock.name}" is not entered, or was left')
        try:
            loss = tenure.lease.loss
            waits = loss is None and ends_itself(self._using)
            if earlier is not None:
                earlier.joined -= 1
            elif waits and self._until_commit:
                earlier = Deferred(tenure, self._lock._runtime, self._lock.name)
            if earlier is None:
                loss = tenure.conclude("returned" if error is None else "raised")
            elif waits:
                earlier.wait_for_the_end(connections[self._using])
            else:
                loss = earlier.conclude() or loss
        except BaseException:
            tenure.close()
            raise
        finally:
            leave()
            self._tenure = self._leave = self._earlier = None
        if error is not None:
            note_loss(error, loss)
        elif loss is not None:
            raise loss.with_traceback(None)
