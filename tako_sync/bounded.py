"""Storage requests that never outlast their time, whatever the backend does.

A timeout given to an HTTP client bounds each read of a socket, not the whole: a server that
drips a byte a second holds the caller for as long as it likes. So a request runs in a thread
of its own, and who waits for it waits for so long and no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from tako_sync import fork
from tako_sync.abc import Absent, Clock, Interval, LeaseBackend, Snapshot, Version
from tako_sync.errors import BackendUnavailableError
from tako_sync.findings import Finding
from tako_sync.flag import Flag
from tako_sync.policy import LeasePolicy

T = TypeVar("T")

_BACKENDS_SHARE: Final = 0.9
"""The backend gets this share of the time, so that its own error comes first: it says more."""


class Requests:
    """A backend's requests, each bounded in time.

    Args:
        backend: who answers them.
        clock: who measures.
    """

    def __init__(self, backend: LeaseBackend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock

    def read(self, key: str, *, within: float, give_up: Flag | None = None) -> Snapshot:
        """Read ``key``; raises ``BackendUnavailableError`` after ``within`` seconds.

        Args:
            give_up: when raised, the wait for the answer ends at once.
        """
        return self._call(
            lambda timeout: self._backend.read(key, timeout=timeout), within, give_up, None
        )

    def write(
        self,
        key: str,
        body: bytes,
        *,
        expect: Version | Absent,
        within: float,
        give_up: Flag | None = None,
        late: Callable[[Version], None] | None = None,
    ) -> Version:
        """Write ``key``; raises ``BackendUnavailableError`` after ``within`` seconds.

        Args:
            late: called, in the request's thread, with the version of a write that was
                confirmed after its caller had stopped waiting.
        """
        return self._call(
            lambda timeout: self._backend.write(key, body, expect=expect, timeout=timeout),
            within,
            give_up,
            late,
        )

    def written(
        self, key: str, version: Version, *, within: float, give_up: Flag | None = None
    ) -> Interval | None:
        """Ask when ``version`` was written; raises ``BackendUnavailableError`` as :meth:`read`."""
        return self._call(
            lambda timeout: self._backend.written(key, version, timeout=timeout),
            within,
            give_up,
            None,
        )

    def list(self, prefix: str, *, within: float) -> list[str]:
        """List keys; raises ``BackendUnavailableError`` after ``within`` seconds."""
        return self._call(
            lambda timeout: list(self._backend.list(prefix, timeout=timeout)), within, None, None
        )

    def examine(
        self,
        policy: LeasePolicy,
        tell: Callable[[Finding], object],
        *,
        timeout: float,
        within: float,
    ) -> None:
        """Have the backend examine itself; raises ``BackendUnavailableError`` as :meth:`read`.

        Args:
            tell: called with each finding as it comes, also with those that come too late.
            timeout: seconds for each request of the examination.
            within: seconds for all of it.
        """

        def examine(_timeout: float) -> None:
            for finding in self._backend.examine(policy, timeout=timeout):
                tell(finding)

        self._call(examine, within, None, None)

    def _call(
        self,
        request: Callable[[float], T],
        within: float,
        give_up: Flag | None,
        late: Callable[[T], None] | None,
    ) -> T:
        if within <= 0:
            raise BackendUnavailableError("no time is left for a request")
        fork.settle()
        if self._backend.prompt:
            return request(within)
        call = _Call(lambda: request(within * _BACKENDS_SHARE), late)
        try:
            self._clock.spawn(call.run, "tako-request")
        except RuntimeError:  # no more threads, or the interpreter is shutting down
            call.run()
        wake = Flag()
        call.done.watch(wake.set)
        if give_up is not None:
            give_up.watch(wake.set)
        try:
            self._clock.wait(wake, within)
        finally:
            if give_up is not None:
                give_up.unwatch(wake.set)
            answered = not call.abandon()  # also when Ctrl-C ends the wait
        if not answered:
            raise BackendUnavailableError(
                f"no answer from {self._backend.describe()} within {within:.3g} s"
            )
        return call.result()


class _Call(Generic[T]):
    """One request in a thread of its own, whose answer is taken by one side only."""

    def __init__(self, request: Callable[[], T], late: Callable[[T], None] | None) -> None:
        self.done = Flag()
        self._request = request
        self._late = late
        self._answer: Any = None
        self._error: BaseException | None = None
        self._order: list[str] = []  # append is atomic: the first entry decides

    def run(self) -> None:
        try:
            self._answer = self._request()
        except BaseException as error:  # noqa: BLE001 - the waiting side raises it
            self._error = error
        self._order.append("answered")
        self.done.set()
        if self._order[0] == "abandoned" and self._error is None and self._late is not None:
            self._late(self._answer)

    def abandon(self) -> bool:
        """Stop waiting; return whether the answer had not come yet."""
        self._order.append("abandoned")
        return self._order[0] == "abandoned"

    def result(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # else the error and this frame keep each other alive
        answer: T = self._answer
        return answer
