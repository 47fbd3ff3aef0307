"""Holding the very lease that code under test campaigns for, as another process would."""

from __future__ import annotations

from types import TracebackType

from tako_sync import names
from tako_sync.errors import LeaseBusyError
from tako_sync.runtime import Runtime, current
from tako_sync.tenure import Tenure


class Occupation:
    """A lease held by a process that is not the one under test. Also a ``with`` block.

    Attributes:
        fence: the fencing token of the hold.
    """

    def __init__(self, tenure: Tenure) -> None:
        self._tenure: Tenure | None = tenure
        self.fence = tenure.lease.fence
        tenure.begin()

    def release(self) -> None:
        """Give the lease back, as that process would. A second call does nothing."""
        tenure, self._tenure = self._tenure, None
        if tenure is not None:
            tenure.conclude("returned")

    def crash(self) -> None:
        """End as a process that dies: the lease stays held until it has aged a ttl."""
        tenure, self._tenure = self._tenure, None
        if tenure is not None:
            tenure.desert()

    def __enter__(self) -> Occupation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def occupy(name: str, runtime: Runtime | None = None) -> Occupation:
    """Hold the lease ``name`` until :meth:`Occupation.release`, heartbeat included.

    It is held through a binding of its own on the same storage, so that the code under test
    meets it as it meets another process: it is busy, and not its own.

    Args:
        name: of a lock, or of a framework's lease (``singleton-…``).
        runtime: the binding of the code under test; by default that of this process.

    Raises:
        ConfigurationError: nothing can be named so: it would hold what no code campaigns for.
        LeaseBusyError: someone holds it already.
    """
    names.part("a lease's name", name)
    home = runtime or current()
    other = Runtime(home.backend, app=home.app, env=home.env, policy=home.policy, clock=home.clock)
    tenure = Tenure(other, other.identity(name), None)
    holder = tenure.attempt()
    if holder is not None:
        raise LeaseBusyError(name, holder)
    return Occupation(tenure)
