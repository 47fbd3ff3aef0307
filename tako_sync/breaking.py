"""What an operator does to a lease: see who holds it, ask for a hand-over, break it by force.

Each change is a compare-and-swap on exactly what the operator was shown.
"""

from __future__ import annotations

from collections.abc import Callable

from tako_sync import rules
from tako_sync.errors import (
    BackendUnavailableError,
    ConfigurationError,
    LeaseBusyError,
    NameCollisionError,
    UsageError,
    VersionConflictError,
)
from tako_sync.look import look_to_judge
from tako_sync.record import Holder, Identity, Record, State, printable
from tako_sync.rules import Free, Held, Sighting
from tako_sync.runtime import Runtime, nonce
from tako_sync.snapshot import Version


def who(runtime: Runtime, identity: Identity) -> Holder | None:
    """Return who holds the lease; None if it is free. One storage request.

    Raises:
        NameCollisionError: the record belongs to another identity.
        BackendError: the storage did not answer, or refused.
    """
    found = rules.judge(_look(runtime, identity))
    return found.holder if isinstance(found, Held) else None


def break_lease(
    runtime: Runtime, identity: Identity, *, version: Version, owner: str | None, now: bool, by: str
) -> None:
    """Break the lease that was shown with ``version`` and ``owner``.

    The holder learns of it at its next heartbeat, so the name stays held until the broken
    record has aged a ttl, or until the holder's body has returned. With ``now`` it is free at
    once, and the holder's body may overlap the next one's.

    Raises:
        LeaseBusyError: it is not what was shown any more; the error names the holder.
        BackendError: the storage did not answer, or refused.
    """
    sighting = _shown(runtime, identity, version, owner)
    content = sighting.content
    if content is None or isinstance(rules.judge(sighting), Free):
        raise UsageError(f'lease "{identity.name}" is free: there is nothing to break')
    if isinstance(content, Record) and content.state is State.BROKEN and not now:
        raise UsageError(
            f'lease "{identity.name}" is broken already, by {printable(content.broken_by)}: it is '
            "free when its holder has ended, or has aged; to break it again would put that off"
        )
    at = runtime.clock.wall()
    broken = rules.broken(content, identity, nonce(), at, by or runtime.owner(), now=now)
    _replace(runtime, identity, broken, version, lambda found: found.write == broken.write)


def request_handover(
    runtime: Runtime, identity: Identity, *, version: Version, owner: str | None, by: str
) -> None:
    """Ask the holder that was shown to hand over: its ctx is cancelled at its next heartbeat.

    At most once a hold, and only of a record that has not aged: the request keeps it unchanged
    for all but the storage's clock, and can put off a takeover from a dead holder by a ttl.

    Raises:
        LeaseBusyError: it is not what was shown any more.
        UsageError: nobody holds it, or it was asked for already.
        BackendError: the storage did not answer, or refused.
    """
    sighting = _shown(runtime, identity, version, owner)
    content = sighting.content
    held = isinstance(content, Record) and content.state is State.HELD
    if not held or not isinstance(rules.judge(sighting), Held):
        raise UsageError(f'lease "{identity.name}" has no holder that could hand it over')
    assert isinstance(content, Record)
    if content.handover:
        raise UsageError(
            f'the holder of lease "{identity.name}" was asked already, '
            f"by {printable(content.handover)}"
        )
    asked = content.but(handover=by or runtime.owner())
    _replace(runtime, identity, asked, version, lambda found: found.handover == asked.handover)


def _look(runtime: Runtime, identity: Identity) -> Sighting:
    sighting = look_to_judge(runtime, identity, within=runtime.policy.request_timeout)
    content = sighting.content
    if isinstance(content, Record) and content.identity != identity:
        raise NameCollisionError(identity.key, str(identity), str(content.identity))
    return sighting


def _shown(runtime: Runtime, identity: Identity, version: Version, owner: str | None) -> Sighting:
    if not isinstance(version, str):
        raise ConfigurationError(f"version is the text that holder() shows, not {version!r}")
    sighting = _look(runtime, identity)
    found = rules.judge(sighting)
    holder = found.holder if isinstance(found, Held) else None
    same_owner = owner is None or holder is None or holder.owner == owner
    if sighting.version != version or not same_owner:
        raise LeaseBusyError(
            identity.name,
            holder,
            f'the record of lease "{identity.name}" has changed since it was shown: '
            + (f"now held by {holder}" if holder else "it is free"),
        )
    return sighting


def _replace(
    runtime: Runtime,
    identity: Identity,
    record: Record,
    version: Version,
    is_ours: Callable[[Record], bool],
) -> None:
    """Write ``record`` over ``version``; settle a doubt by one look."""
    try:
        runtime.requests.write(
            identity.key,
            record.encode(),
            expect=version,
            within=runtime.policy.request_timeout,
        )
    except (VersionConflictError, BackendUnavailableError):
        content = _look(runtime, identity).content
        if not isinstance(content, Record) or not is_ours(content):
            raise
