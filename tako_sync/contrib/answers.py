"""What a view answers where its body has not run, or not under the lease to its end."""

from __future__ import annotations

import math
from typing import Any

from attrs import frozen

from tako_sync.contrib.attempt import Ended, Outcome
from tako_sync.errors import LeaseBusyError
from tako_sync.policy import LeasePolicy
from tako_sync.record import Holder, stamp


@frozen
class Answer:
    """An answer of HTTP.

    Attributes:
        status: 409 if someone else holds the lease, 503 if it was lost or nobody can say.
        facts: the body, as JSON.
        headers: ``Retry-After``: when a further attempt may do better.
    """

    status: int
    facts: dict[str, Any]
    headers: dict[str, str]


def answer(outcome: Outcome[Any], lease: str, policy: LeasePolicy) -> Answer:
    """Return the answer to an attempt that did not run to its end."""
    status, again = {
        Ended.BUSY: (409, policy.poll),
        Ended.UNSETTLED: (503, policy.poll),
        Ended.LOST: (503, policy.ttl),
    }[outcome.ended]
    facts: dict[str, Any] = {"error": outcome.ended.value, "lease": lease}
    if outcome.ended is Ended.BUSY:
        facts["holder"] = described(holder_of(outcome))
    return Answer(
        status, facts, {"Retry-After": str(math.ceil(again)), "Cache-Control": "no-store"}
    )


def holder_of(outcome: Outcome[Any]) -> Holder | None:
    """Return who holds the lease that an attempt found busy, if that is known."""
    return outcome.error.holder if isinstance(outcome.error, LeaseBusyError) else None


def described(holder: Holder | None) -> dict[str, Any] | None:
    if holder is None:
        return None
    since = stamp(holder.since) if holder.since is not None else None
    return {"owner": holder.owner, "since": since, "fence": holder.fence}
