"""A scratch lease, written as holders write: whether a storage compares and swaps, and how fast.

The lease has a name that no application can choose. Its record is left there, released, and the
next examination goes on from it: leases are never deleted, and one is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from tako_sync import record
from tako_sync.abc import ABSENT, Absent, Snapshot, Version
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    VersionConflictError,
)
from tako_sync.findings import OK, PROBLEM, Finding
from tako_sync.flag import Flag
from tako_sync.record import Record, State, stamp
from tako_sync.runtime import Runtime, nonce

T = TypeVar("T")

SCRATCH: Final = "tako-doctor"
_NEVER_WRITTEN: Final = "tako-doctor-nothing"
_ROUNDS: Final = 3
"""How often it begins anew where somebody else examines the same storage."""
_TRIES: Final = 4
_LONGEST_PAUSE: Final = 5.0
"""Seconds. A storage that asks for more between two requests is reported, not waited for."""

_MEND: Final = "mend what this names, then run this again"


class Probe:
    """One examination; :meth:`run` once, then look at what it has measured.

    Attributes:
        reads, writes: seconds that each request took which was answered with a success.
        seen: the last answer to a read; None if there was none.
        host: this host's time of day before and after that answer, in seconds.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.reads: list[float] = []
        self.writes: list[float] = []
        self.seen: Snapshot | None = None
        self.host = (0.0, 0.0)
        self._runtime = runtime
        self._clock = runtime.clock
        self._within = runtime.policy.request_timeout
        self._identity = runtime.identity(SCRATCH)
        self._owner = runtime.owner()
        self._fence = 0
        self._written: dict[bytes, Version | None] = {}
        self._found: list[Finding] = []
        self._doing = "reading"

    def run(self) -> list[Finding]:
        """Read, create, replace, have two writes refused, read again; raises nothing."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what was found
            found = fault(self._doing, error, self._within)
            if found.text not in [said.text for said in self._found]:  # a bucket that is missing
                self._found.append(found)
        return self._found

    def _run(self) -> None:
        first = self._first()
        for _ in range(_ROUNDS):
            if first is not None and not self._is_ours(first):
                return
            if self._compare_and_swap(first):
                if first is not None and first.version is not ABSENT:
                    self._look_for_nothing()
                return
            self._doing = "reading"
            first = self._read(self._identity.key)
        self._say(
            "compare-and-swap",
            PROBLEM,
            "others wrote the scratch lease meanwhile, so that nothing can be told",
            "run this again when nobody else examines this storage",
        )

    def _say(self, checked: str, verdict: str, text: str, advice: str = "") -> None:
        self._found.append(Finding(checked, verdict, text, advice))

    # --- What is there

    def _first(self) -> Snapshot | None:
        """Look; None if that is not allowed, which does not say yet what else is."""
        try:
            return self._read(self._identity.key)
        except BackendDeniedError as error:
            self._found.append(fault("reading", error, self._within))
            return None

    def _is_ours(self, snapshot: Snapshot) -> bool:
        """Whether the scratch record may be replaced: it may be anything in a shared storage."""
        content = record.read(snapshot)
        if content is None:
            return True
        if isinstance(content, Record) and content.identity == self._identity:
            if content.state is State.RELEASED:
                self._fence = content.fence
                return True
            what = "a lease that is held"
        elif isinstance(content, Record):
            what = f"a lease of {content.identity}"
        else:
            what = "something that is no record of ours"
        self._say(
            "compare-and-swap",
            PROBLEM,
            f"not tested, and nothing written: under {self._identity.key} stands {what}",
            "see whose it is, and remove it if nobody needs it",
        )
        return False

    def _look_for_nothing(self) -> None:
        """Read a record that is not there: some answer that with a refusal to who may not list."""
        self._doing = "a free name"
        snapshot = self._read(self._runtime.identity(_NEVER_WRITTEN).key)
        if snapshot.version is ABSENT:
            self._say("a free name", OK, "a lease that nobody has used reads as free")

    # --- Compare and swap

    def _compare_and_swap(self, first: Snapshot | None) -> bool:
        """Return whether something could be told: not where others wrote in between."""
        if first is None or not isinstance(first.version, str):
            self._doing = "creating"
            created = self._write(ABSENT)
            if created is None:
                return first is None  # never seen, and there before: nothing more can be tried
            base: Version = created
        else:
            base = first.version
        readable = first is not None or self._read_after_a_refusal()
        self._doing = "writing"
        if self._write(ABSENT) is not None:
            return self._broken("a second creation of one record was taken")
        self._doing = "replacing"
        replaced = self._write(base)
        if replaced is None:
            if readable and self._read(self._identity.key).version == base:
                return self._broken("a write is refused that names the very version which stands")
            return False
        if self._write(base) is not None:
            return self._broken("a write was taken that named an older version")
        return self._settled(first, replaced) if readable else self._kept()

    def _settled(self, first: Snapshot | None, replaced: Version) -> bool:
        self._doing = "reading"
        found = self._read(self._identity.key)
        if found.version == replaced:
            if self._written.get(found.body) == replaced:
                return self._kept()
            return self._broken("a read shows other bytes than were written")
        known = {ABSENT, *self._written.values(), first.version if first else None}
        if found.version in known or found.body in self._written:
            return self._broken("a read shows an older state than that of the write before it")
        return False

    def _kept(self) -> bool:
        self._say(
            "compare-and-swap",
            OK,
            "kept: a second creation and a write that named an older version were both refused",
        )
        return True

    def _read_after_a_refusal(self) -> bool:
        try:
            self._read(self._identity.key)
        except BackendDeniedError:
            return False
        self._say(
            "a free name",
            PROBLEM,
            "what is there may be read, but not that there is nothing: the first hold of each name "
            "will fail as the read above did",
            "grant the permission to list as well",
        )
        return True

    def _broken(self, what: str) -> bool:
        self._say(
            "compare-and-swap",
            PROBLEM,
            f"not kept: {what}, so two processes would hold one lease, or none",
            "use another storage; some emulators, caches and proxies are like this",
        )
        return True

    # --- Requests

    def _read(self, key: str) -> Snapshot:
        requests = self._runtime.requests

        def read() -> Snapshot:
            before = self._clock.wall().timestamp()
            snapshot = requests.read(key, within=self._within)
            self.seen, self.host = snapshot, (before, self._clock.wall().timestamp())
            return snapshot

        return self._patiently(read, self.reads)

    def _write(self, expect: Version | Absent) -> Version | None:
        """Write; return the new version, or None if the expected one does not stand there."""
        requests, body = self._runtime.requests, self._body()
        self._written[body] = None
        try:
            version = self._patiently(
                lambda: requests.write(
                    self._identity.key, body, expect=expect, within=self._within
                ),
                self.writes,
            )
        except VersionConflictError:
            return None
        self._written[body] = version
        return version

    def _patiently(self, request: Callable[[], T], times: list[float]) -> T:
        """Make a request, again where the storage asks for a pause: one write a second, say."""
        tries = 0
        while True:
            began = self._clock.monotonic()
            try:
                answer = request()
            except BackendUnavailableError as error:
                tries += 1
                if not 0 < error.retry_after <= _LONGEST_PAUSE or tries == _TRIES:
                    raise
                self._clock.wait(Flag(), error.retry_after)
            else:
                times.append(self._clock.monotonic() - began)
                return answer

    def _body(self) -> bytes:
        now = stamp(self._clock.wall())
        return Record(
            identity=self._identity,
            owner=self._owner,
            write=nonce(),
            state=State.RELEASED,
            ttl=self._runtime.policy.ttl,
            margin=self._runtime.policy.ttl / 10,
            fence=self._fence,
            acquired=now,
            expires=now,
            note="written by tako_sync.doctor: nobody uses this lease",
        ).encode()


def fault(checked: str, error: Exception, within: float, verdict: str = PROBLEM) -> Finding:
    """Say what a request's failure means.

    Args:
        checked: what was being done.
        within: the seconds that the request had.
    """
    if isinstance(error, BackendDeniedError):
        return Finding(checked, verdict, f"refused: {error}", _MEND)
    if isinstance(error, BackendUnavailableError):
        text = f"no answer that counts within {within:g} s: {error}"
        advice = "see that it is up, and that this machine can reach it"
        return Finding(checked, verdict, text, advice)
    return Finding(
        checked,
        verdict,
        f"the backend has raised what no backend may: {error!r}",
        "that is a bug in it: tell its makers",
    )
