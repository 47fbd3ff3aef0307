"""All leases of an application, for people: what stands in the storage, one after another."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from tako_sync import rules
from tako_sync.look import look_to_judge
from tako_sync.record import Holder, Identity, Last, Record
from tako_sync.rules import Held
from tako_sync.runtime import Runtime


@frozen
class Listed:
    """One lease.

    Attributes:
        name: its name; of a record that is not ours, or cannot be read, what its key tells.
        holder: who holds it; None if it is free.
        last: who had it before, and how that ended; None if the record does not say.
    """

    name: str
    holder: Holder | None
    last: Last | None = None


def leases(runtime: Runtime) -> Iterator[Listed]:
    """Yield the leases of an application and environment that are recorded, held or free, by name.

    A request for the list and one for each lease: the answers are of different moments. A record
    of another application whose key begins likewise is left out.

    Raises:
        BackendError: the storage did not answer, or refused.
    """
    mine = Identity(runtime.app, runtime.env, "").key
    within = runtime.policy.request_timeout
    for key in sorted(runtime.requests.list(mine, within=within)):
        identity = runtime.identity(key.removeprefix(mine))
        sighting = look_to_judge(runtime, identity, within=within)
        content = sighting.content
        if content is None:
            continue  # it has been deleted meanwhile
        if isinstance(content, Record) and content.identity != identity:
            continue
        found = rules.judge(sighting)
        last = content.last if isinstance(content, Record) else None
        yield Listed(identity.name, found.holder if isinstance(found, Held) else None, last)
