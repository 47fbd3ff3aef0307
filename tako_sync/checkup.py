"""``doctor``: whether a storage does what leases need, and what it costs, in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Final

from tako_sync.abc import LeaseBackend
from tako_sync.errors import BackendDeniedError
from tako_sync.findings import NOTE, OK, Finding, Report
from tako_sync.policy import LeasePolicy
from tako_sync.probe import SCRATCH, Probe, fault
from tako_sync.record import MAX_TTL
from tako_sync.runtime import Runtime, current

_FAR_APART: Final = 10.0
"""Seconds between the clocks of host and storage that are worth a word more."""
_A_DAY_OF_TODAY: Final = 1e9
"""Seconds since 1970. A storage whose time is earlier does not tell the time of day."""
_REQUESTS_OF_ITS_OWN: Final = 4
"""What the examination of a backend may take, in requests that each take their whole time."""


def doctor(binding: Runtime | LeaseBackend | str | None = None) -> Report:
    """Examine a storage; return what was found, for people. Whatever fails there is a finding.

    No real lease is touched or waited for. It makes about a dozen requests, each bounded by the
    policy's ttl/6, and writes one scratch record, ``run-<app>-<env>-tako-doctor``, which stays
    there, released, for the next time. That takes a few seconds where a storage takes one write
    a second of one record, and up to a minute where it hangs.

    Args:
        binding: a ``Runtime``, a backend or its URL; by default what ``configure`` has bound.

    Raises:
        ConfigurationError: no backend can be made of ``binding``, or of what is configured.
    """
    if binding is None:
        runtime = current()
    elif isinstance(binding, Runtime):
        runtime = binding
    else:
        runtime = Runtime(binding)
    return Report(_described(runtime.backend), tuple(_findings(runtime)))


def _described(backend: LeaseBackend) -> str:
    try:
        return backend.describe()
    except Exception:  # noqa: BLE001 - a backend of anybody's, and the report goes on
        return repr(backend)


def _findings(runtime: Runtime) -> Iterator[Finding]:
    probe = Probe(runtime)
    yield from probe.run()
    if probe.seen is not None:
        yield _listing(runtime)
    if probe.reads or probe.writes:
        yield _round_trips(probe, runtime.policy)
    if probe.seen is not None:
        yield _clock(probe)
    yield from _own(runtime)
    yield from _promises(runtime)


def _listing(runtime: Runtime) -> Finding:
    """List the leases of this application: what tools for people do, and leases never."""
    mine = runtime.identity("").key
    within = runtime.policy.request_timeout
    try:
        keys = runtime.requests.list(mine, within=within)
    except BackendDeniedError as error:
        return Finding("listing", NOTE, f"refused: {error}")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was found
        return fault("listing", error, within, NOTE)
    leases = len(set(keys) - {runtime.identity(SCRATCH).key})
    count = "1 lease is" if leases == 1 else f"{leases:,} leases are"
    return Finding("listing", OK, f"{count} recorded there for {mine}*, held or free")


def _round_trips(probe: Probe, policy: LeasePolicy) -> Finding:
    taken = [
        f"a {what} takes {statistics.median(times) * 1000:.1f} ms"
        for what, times in (("read", probe.reads), ("write", probe.writes))
        if times
    ]
    slowest, allowed = max(probe.reads + probe.writes), policy.request_timeout
    text = (
        f"{' and '.join(taken)} (medians; the slowest took {slowest * 1000:.1f} ms); a request "
        f"may take {allowed:g} s (ttl/6), and a waiter looks each {policy.poll:g} s"
    )
    if slowest <= allowed / 4:
        return Finding("round trips", OK, text)
    ttl = math.ceil(24 * slowest)  # so that the slowest is a quarter of ttl/6
    return Finding(
        "round trips",
        NOTE,
        f"{text}: too little is left for a bad day, on which holders would lose their leases",
        f"give leases a longer ttl, LeasePolicy(ttl={ttl}), or use a storage nearer by"
        if ttl <= MAX_TTL
        else "use a storage nearer by",
    )


def _clock(probe: Probe) -> Finding:
    now = probe.seen.now if probe.seen is not None else None
    if now is None:
        return Finding(
            "clock",
            NOTE,
            "the storage has none: each process goes by its own observation, so that a single "
            "attempt of a new process cannot take over from a dead holder; waiting for it can",
        )
    text = "the storage has one, by which a single look tells whether a holder is dead"
    if now.latest < _A_DAY_OF_TODAY:
        return Finding("clock", OK, text)
    before, after = probe.host
    # Somewhere between them the storage read its clock, which it tells as an interval, too.
    least, most = before - now.latest, after - now.earliest
    if least <= 0 <= most:
        seen = f"to {max(most, -least, 0.1):.1f} s"
        return Finding(
            "clock", OK, f"{text}; this host's agrees with it as far as can be seen, {seen}"
        )
    ahead = (least + most) / 2
    apart = f"this host's is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} it"
    return Finding(
        "clock",
        OK if abs(ahead) < _FAR_APART else NOTE,
        f"{text}; {apart}, which does leases no harm: no decision compares the two",
    )


def _own(runtime: Runtime) -> list[Finding]:
    """Return what the backend itself has found, as far as it came."""
    policy, found = runtime.policy, list[Finding]()
    timeout = policy.request_timeout
    within = _REQUESTS_OF_ITS_OWN * timeout
    try:
        runtime.requests.examine(policy, found.append, timeout=timeout, within=within)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was found
        return [*found, fault("the storage's own", error, within, NOTE)]
    return found


def _promises(runtime: Runtime) -> Iterator[Finding]:
    """Say what the policy's numbers mean. No part of it can be wrong: the policy was checked."""
    policy = runtime.policy
    margin = policy.margin(runtime.backend.clock_skew)
    yield Finding(
        "a crash",
        OK,
        f"frees a name {policy.ttl:g} s (the ttl) after the holder's last renewal; whoever waits "
        f"has it about a look ({policy.poll * (1 + policy.jitter):g} s) later",
    )
    yield Finding(
        "a loss",
        OK,
        f"is known to a holder that is cut off after {policy.ttl - margin:g} s at most, "
        f"{margin:g} s (the margin) before anybody else may begin",
    )
    yield Finding(
        "renewals",
        OK,
        f"are sent each {policy.heartbeat:g} s (ttl/3), and sooner again after one that failed",
    )
