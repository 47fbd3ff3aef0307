"""``doctor``: whether a storage does what leases need, and what it costs, in words.

It writes one record, of a lease that nobody uses, and leaves it there, released: leases are never
deleted, and the next examination goes on from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from tako_sync.abc import Absent, LeaseBackend, Snapshot, Version
from tako_sync.errors import (
    BackendDeniedError,
    BackendError,
    BackendUnavailableError,
    VersionConflictError,
)
from tako_sync.findings import NOTE, OK, PROBLEM, Finding, Report
from tako_sync.flag import Flag
from tako_sync.record import Identity, Record, State, stamp
from tako_sync.runtime import Runtime, current, nonce

T = TypeVar("T")

_SCRATCH: Final = Identity("tako", "doctor", "scratch")
_TRIES: Final = 4
_APART: Final = 10.0
"""Seconds between host and storage beyond which it is worth a word."""


def doctor(binding: Runtime | LeaseBackend | str | None = None) -> Report:
    """Examine a storage; return what was found. Raises nothing for a fault of the storage.

    A handful of requests, each bounded by the policy, and one scratch record. No real lease is
    touched or waited for.

    Args:
        binding: a ``Runtime``, a backend or its URL; by default what ``configure`` has bound.

    Raises:
        ConfigurationError: no backend can be made of ``binding``.
    """
    if binding is None:
        runtime = current()
    elif isinstance(binding, Runtime):
        runtime = binding
    else:
        runtime = Runtime(binding)
    return Report(runtime.backend.describe(), tuple(_Checkup(runtime).findings()))


class _Checkup:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._clock = runtime.clock
        self._policy = runtime.policy
        self._reads: list[float] = []
        self._writes: list[float] = []
        self._seen: Snapshot | None = None

    def findings(self) -> Iterator[Finding]:
        yield from self._round_trip()
        yield from self._list()
        yield from self._times()
        yield from self._clocks()
        yield from self._runtime.backend.examine(self._policy, timeout=self._policy.request_timeout)
        yield self._timings()

    # --- Compare and swap

    def _round_trip(self) -> Iterator[Finding]:
        try:
            first = self._read()
            self._seen = first
            second = self._write(first.version)
            refused = self._is_refused(first.version)
            third = self._write(second)
            refused = refused and self._is_refused(second)
            found = self._read()
        except BackendDeniedError as error:
            yield Finding(PROBLEM, f"it refuses: {error}")
        except BackendUnavailableError as error:
            yield Finding(
                PROBLEM,
                f"it cannot be reached within {self._policy.request_timeout:g} s: {error}",
                "see that it is up, and that this machine can reach it",
            )
        except BackendError as error:
            yield Finding(
                PROBLEM,
                f"a scratch record could not be written: {error}",
                "run this again: somebody else may be examining it at this moment",
            )
        else:
            self._seen = found
            if refused and found.version == third:
                yield Finding(OK, "a record was read, created or replaced, and read again")
                yield Finding(OK, "it compares and swaps: writes of an old version are refused")
            else:
                yield Finding(
                    PROBLEM,
                    "it does not compare and swap: a write of an old version was taken, so two "
                    "processes would hold one lease",
                    "use another storage; some emulators and proxies are like this",
                )

    def _read(self) -> Snapshot:
        requests, within = self._runtime.requests, self._policy.request_timeout
        return self._patiently(lambda: requests.read(_SCRATCH.key, within=within), self._reads)

    def _write(self, expect: Version | Absent) -> Version:
        requests, within = self._runtime.requests, self._policy.request_timeout
        body = self._record().encode()
        return self._patiently(
            lambda: requests.write(_SCRATCH.key, body, expect=expect, within=within), self._writes
        )

    def _is_refused(self, expect: Version | Absent) -> bool:
        try:
            self._write(expect)
        except VersionConflictError:
            return True
        return False

    def _patiently(self, request: Callable[[], T], times: list[float]) -> T:
        """Make a request, again where the storage asks for a pause: one write a second, say."""
        for _ in range(_TRIES - 1):
            began = self._clock.monotonic()
            try:
                answer = request()
            except BackendUnavailableError as error:
                if not error.retry_after:
                    raise
                self._clock.wait(Flag(), error.retry_after)
            else:
                times.append(self._clock.monotonic() - began)
                return answer
        return request()

    def _record(self) -> Record:
        now = self._clock.wall()
        return Record(
            identity=_SCRATCH,
            owner=self._runtime.owner(),
            write=nonce(),
            state=State.RELEASED,
            ttl=self._policy.ttl,
            margin=self._policy.ttl / 10,
            fence=0,
            acquired=stamp(now),
            expires=stamp(now),
            note="written by tako_sync.doctor: nobody uses this lease",
        )

    def _list(self) -> Iterator[Finding]:
        if self._seen is None:
            return
        try:
            keys = self._runtime.requests.list("run-", within=self._policy.request_timeout)
        except BackendError as error:
            yield Finding(NOTE, f"leases cannot be listed: {error}")
        else:
            leases = len([key for key in keys if key != _SCRATCH.key])
            yield Finding(OK, f"{leases} leases are recorded there, held or free")

    # --- Time

    def _times(self) -> Iterator[Finding]:
        if not self._reads or not self._writes:
            return
        read, write = statistics.median(self._reads), statistics.median(self._writes)
        slowest, allowed = max(self._reads + self._writes), self._policy.request_timeout
        text = (
            f"a read takes {read * 1000:.1f} ms, a write {write * 1000:.1f} ms; a request may "
            f"take {allowed:g} s"
        )
        if slowest > allowed / 4:
            yield Finding(
                NOTE,
                f"{text}, and the slowest took {slowest:.2f} s",
                "give leases a longer ttl: LeasePolicy(ttl=...)",
            )
        else:
            yield Finding(OK, text)

    def _clocks(self) -> Iterator[Finding]:
        if self._seen is None:
            return
        now = self._seen.now
        if now is None:
            yield Finding(
                NOTE,
                "the storage has no clock: each process goes by its own observation, so a single "
                "attempt of a new process cannot take over from a dead holder",
            )
            return
        middle = (now.earliest + now.latest) / 2
        apart = self._clock.wall().timestamp() - middle
        if abs(middle) < 1e9 or abs(apart) <= _APART:  # not a time of day, or the same one
            yield Finding(OK, "the storage has a clock: a dead holder is known by one look")
        else:
            yield Finding(
                NOTE,
                f"the clocks of this host and of the storage are {abs(apart):.0f} s apart; that "
                "does leases no harm: no decision compares them",
            )

    def _timings(self) -> Finding:
        policy = self._policy
        margin = policy.margin(self._runtime.backend.clock_skew)
        return Finding(
            OK,
            f"ttl {policy.ttl:g} s: a crash frees a name after that; a holder that is cut off "
            f"knows after {policy.ttl - margin:g} s at most; renewals each {policy.heartbeat:g} s; "
            f"waiters look each {policy.poll:g} s",
        )
