"""A lease that is given back when a transaction has ended: right after its commit, or rollback.

Django runs hooks on commit in the order of their registration, and leaves out those behind one that
fails. But a lease is to be free before any of them, which may have others ask for it; and its loss
is to be told, but not at their cost. So where Django runs the hooks of a connection, leases come
first, and losses last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from tako_sync.errors import LeaseLostError
from tako_sync.runtime import Runtime
from tako_sync.tenure import Tenure, note_loss

_RUN: Final = "run_and_clear_commit_hooks"


class Deferred:
    """A hook on commit; where there is none, for a rollback, Django drops it.

    Nobody else is to refer to it but blocks that join it, while they last.

    Args:
        tenure: the lease, held.
        runtime, name: which it is.
    """

    def __init__(self, tenure: Tenure, runtime: Runtime, name: str) -> None:
        self.tenure = tenure
        self._is = runtime, name
        self._left = [tenure]
        self.joined = 0
        """Blocks that have joined it, and go on: it is not given back before their end."""

    def waits_for(self, runtime: Runtime, name: str) -> bool:
        """Return whether it is this lease, and was not given back."""
        return self._is == (runtime, name) and bool(self._left)

    def wait_for_the_end(self, connection: BaseDatabaseWrapper) -> None:
        """Give the lease back when the transaction ends that is open on a connection."""
        if self not in pending(connection):
            if not isinstance(vars(connection).get(_RUN), _LeasesFirst):
                setattr(connection, _RUN, _LeasesFirst(connection))
            transaction.on_commit(self, using=connection.alias)

    def conclude(self) -> LeaseLostError | None:
        """Give the lease back, unless that was done or is to wait for a block; return its loss."""
        loss = None
        while self._left and not self.joined:
            with self._left.pop() as tenure:
                loss = tenure.conclude("returned")
        return loss

    def __call__(self) -> None:
        """Be run by ``captureOnCommitCallbacks``, or by Django when nothing is left to be done."""
        loss = self.conclude()
        if loss is not None:
            raise loss

    def __del__(self) -> None:
        while self._left:
            self._left.pop().close()


def pending(connection: BaseDatabaseWrapper) -> Iterator[Deferred]:
    """Return the leases that wait for the transaction to end that is open on a connection."""
    hooks = [function for _, function, *_ in connection.run_on_commit]
    return (hook for hook in hooks if isinstance(hook, Deferred))


class _LeasesFirst:
    """In place of a connection's method that runs the hooks on commit."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._run: Callable[[], None] = getattr(connection, _RUN)

    def __call__(self) -> None:
        losses: list[LeaseLostError] = []
        try:
            if not self._connection.in_atomic_block:
                found = [hook.conclude() for hook in pending(self._connection)]
                losses.extend(filter(None, found))
        finally:
            try:
                self._run()
            except BaseException as error:
                for loss in losses:
                    note_loss(error, loss)
                raise
        if losses:
            first, *others = losses
            for loss in others:
                note_loss(first, loss)
            raise first
