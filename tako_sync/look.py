"""One look at a lease: read, decode, and know since when this version stands."""

from __future__ import annotations

from attrs import evolve

from tako_sync import record, rules
from tako_sync.errors import BackendError
from tako_sync.flag import Flag
from tako_sync.record import Identity
from tako_sync.rules import Sighting
from tako_sync.runtime import Runtime, log


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


def look_to_judge(
    runtime: Runtime, identity: Identity, *, within: float, give_up: Flag | None = None
) -> Sighting:
    """As :func:`look`, for who may take the lease over if it is old enough.

    One storage request; a second one where the storage can tell the record's age, has not done
    so in its answer, and what this process has seen itself leaves it open.
    """
    started = runtime.clock.monotonic()
    sighting = look(runtime, identity, within=within, give_up=give_up)
    known, version = runtime.known(identity.key), sighting.version
    if not isinstance(version, str) or not rules.age_is_open(sighting, known.seen[2]):
        return sighting
    if known.dated is None or known.dated[0] != version:
        left = within - (runtime.clock.monotonic() - started)
        try:
            written = runtime.requests.written(identity.key, version, within=left, give_up=give_up)
        except BackendError as error:
            log.debug("lease %s: its age stays unknown: %r", identity.name, error)
            return sighting
        known.dated = version, written
    return evolve(sighting, snapshot=evolve(sighting.snapshot, written=known.dated[1]))
