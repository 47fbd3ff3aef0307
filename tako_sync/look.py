"""One look at a lease: read, decode, and remember since when this version stands."""

from __future__ import annotations

from tako_sync import record
from tako_sync.flag import Flag
from tako_sync.record import Identity
from tako_sync.rules import Sighting
from tako_sync.runtime import Runtime


def look(
    runtime: Runtime, identity: Identity, *, within: float, give_up: Flag | None = None
) -> Sighting:
    """Read the record of ``identity``: one storage request.

    Args:
        within: seconds.
        give_up: when raised, the wait for the answer ends at once.

    Raises:
        BackendError: the storage did not answer, or refused.
    """
    snapshot = runtime.requests.read(identity.key, within=within, give_up=give_up)
    arrived = runtime.clock.monotonic()
    since = runtime.known(identity.key).first_seen(snapshot.version, arrived)
    return Sighting(record.read(snapshot), snapshot, arrived, since)
