"""What a bucket's settings mean for the leases in it, from its metadata alone.

A held lease is replaced every few seconds: what keeps replaced objects multiplies it, what forbids
to replace them ends it, and what charges for replacing them costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tako_sync.backends.gcs import lifecycle
from tako_sync.findings import NOTE, OK, PROBLEM, Finding
from tako_sync.policy import LeasePolicy

_DAY: Final = 24 * 3600.0
_COLD: Final = {"NEARLINE": 30, "COLDLINE": 90, "ARCHIVE": 365}
"""Days for which each object is charged at least."""


def examine(
    bucket: Mapping[str, Any], name: str, folder: str, policy: LeasePolicy
) -> Iterator[Finding]:
    """Look at the bucket's metadata, as the JSON API has them.

    Args:
        name: the bucket's.
        folder: what the names of the leases' objects begin with.
        policy: the timings of the leases.
    """
    update = f"gcloud storage buckets update gs://{name}"
    yield from _place(bucket)
    yield from _protections(bucket, update)
    yield from lifecycle.examine(bucket.get("lifecycle"), folder)
    yield from _copies(bucket, update, policy)
    yield from _charges(bucket, update)
    yield _public_access(bucket, update)


def _place(bucket: Mapping[str, Any]) -> Iterator[Finding]:
    location, kind = str(bucket.get("location", "?")), str(bucket.get("locationType", "?"))
    if kind in ("region", "?"):
        yield Finding("location", OK, f"{location} ({kind})")
    else:
        yield Finding(
            "location",
            NOTE,
            f"{location} ({kind}): writes cost more, and may take longer, than in one region",
            "where leases need not outlive a region, keep them in a bucket of the nearest one",
        )


def _protections(bucket: Mapping[str, Any], update: str) -> Iterator[Finding]:
    if retention := bucket.get("retentionPolicy"):
        locked = bool(retention.get("isLocked"))
        yield Finding(
            "retention",
            PROBLEM,
            f"a retention policy of {retention.get('retentionPeriod', '?')} s keeps records from "
            "being replaced: no lease can be renewed or released",
            "it is locked, for good: use another bucket"
            if locked
            else f"use a bucket without one, or: {update} --clear-retention-period",
        )
    if (bucket.get("objectRetention") or {}).get("mode"):
        yield Finding(
            "object retention", NOTE, "objects may be retained one by one: see that no lease's is"
        )
    if bucket.get("defaultEventBasedHold"):
        yield Finding(
            "holds",
            PROBLEM,
            "each new object is put under an event-based hold: no lease can be renewed or released",
            f"{update} --no-default-event-based-hold; and release those of the leases' objects",
        )


def _copies(bucket: Mapping[str, Any], update: str, policy: LeasePolicy) -> Iterator[Finding]:
    kept = _seconds((bucket.get("softDeletePolicy") or {}).get("retentionDurationSeconds"))
    if kept:
        yield Finding(
            "soft delete",
            NOTE,
            f"keeps what was replaced for {kept / _DAY:g} days: about "
            f"{kept / policy.heartbeat:,.0f} dead copies of each held lease (a renewal each "
            f"{policy.heartbeat:g} s), little money, much clutter",
            f"{update} --clear-soft-delete",
        )
    else:
        yield Finding("soft delete", OK, "is off")
    if (bucket.get("versioning") or {}).get("enabled"):
        yield Finding(
            "versioning",
            NOTE,
            f"keeps {_DAY / policy.heartbeat:,.0f} old versions a day of each held lease, for ever",
            f"{update} --no-versioning; or have a lifecycle rule delete noncurrent versions",
        )
    else:
        yield Finding("versioning", OK, "is off")


def _seconds(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        return 0


def _charges(bucket: Mapping[str, Any], update: str) -> Iterator[Finding]:
    storage_class = str(bucket.get("storageClass", "?"))
    if storage_class in _COLD:
        yield Finding(
            "storage class",
            NOTE,
            f"{storage_class} charges more for each write, and {_COLD[storage_class]} days of "
            "storage for each object, also for one that is replaced by the next renewal",
            "keep leases in a bucket of class Standard: new objects get the class of the bucket",
        )
    else:
        yield Finding("storage class", OK, storage_class)
    if (bucket.get("autoclass") or {}).get("enabled"):
        yield Finding(
            "Autoclass",
            NOTE,
            "is on: it charges a fee for each object, and gains nothing here",
            f"{update} --no-enable-autoclass",
        )
    if (bucket.get("billing") or {}).get("requesterPays"):
        yield Finding(
            "requester pays",
            NOTE,
            "is on: each request is charged to the project that it names, and must name one",
            f"GCSLease(bucket, user_project=...), or: {update} --no-requester-pays",
        )


def _public_access(bucket: Mapping[str, Any], update: str) -> Finding:
    access = bucket.get("iamConfiguration") or {}
    if access.get("publicAccessPrevention") == "enforced":
        return Finding("public access", OK, "is prevented")
    return Finding(
        "public access",
        NOTE,
        "is not prevented by the bucket itself; records name hosts and processes",
        f"{update} --public-access-prevention",
    )
