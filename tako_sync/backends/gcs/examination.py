"""What ``doctor`` looks at in a bucket: credentials, settings that do harm, what leases cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tako_sync.errors import BackendDeniedError, BackendError
from tako_sync.findings import NOTE, OK, PROBLEM, Finding
from tako_sync.policy import LeasePolicy

# https://cloud.google.com/storage/pricing: a region, Standard class, dollars for one request.
_WRITE: Final = 0.005 / 1000
_READ: Final = 0.0004 / 1000
_MONTH: Final = 730 * 3600.0
_DAY: Final = 24 * 3600.0

_ROLE: Final = (
    "grant a role with storage.objects.get, storage.objects.create, storage.objects.delete and "
    "storage.objects.list on the bucket"
)


def examine(
    ask: Callable[[Callable[[Any], Any]], Any],
    client: Callable[[], Any],
    policy: LeasePolicy,
    timeout: float,
) -> Iterator[Finding]:
    """Look at credentials and bucket.

    Args:
        ask: makes a request of the bucket, and raises a ``BackendError`` where it fails.
        client: gives the client.
        policy: the timings of the leases.
        timeout: seconds for each request.
    """
    try:
        yield _credentials(client())
    except Exception as error:  # noqa: BLE001 - told by the requests before, too
        yield Finding(PROBLEM, f"no client can be made: {error}", _ROLE)
        return

    def get(bucket: Any) -> Any:
        bucket.reload(timeout=timeout, retry=None)
        return bucket._properties

    try:
        metadata: Mapping[str, Any] = ask(get)
    except BackendDeniedError as error:
        yield Finding(
            NOTE,
            f"the bucket's settings cannot be seen: {error}",
            "leases do without; for this examination, grant storage.buckets.get as well",
        )
    except BackendError as error:
        yield Finding(NOTE, f"the bucket's settings could not be read: {error}")
    else:
        yield from _settings(metadata, policy)
    yield _cost(policy)


def _credentials(client: Any) -> Finding:
    credentials = client._credentials
    who = getattr(credentials, "service_account_email", None) or ""
    kind = type(credentials).__name__
    return Finding(OK, f"credentials: {kind}{f' of {who}' if who else ''}")


def _settings(bucket: Mapping[str, Any], policy: LeasePolicy) -> Iterator[Finding]:
    yield Finding(
        OK,
        f"the bucket is in {bucket.get('location', '?')} ({bucket.get('locationType', '?')}), "
        f"class {bucket.get('storageClass', '?')}",
    )
    yield from _protections(bucket)
    yield from _copies(bucket, policy)
    if bucket.get("storageClass", "STANDARD") != "STANDARD":
        yield Finding(
            NOTE,
            f"class {bucket['storageClass']} charges for early deletion, at each renewal",
            "keep leases in a bucket of class Standard",
        )
    if (bucket.get("autoclass") or {}).get("enabled"):
        yield Finding(NOTE, "Autoclass charges a fee for each object, and gains nothing here")
    if (bucket.get("billing") or {}).get("requesterPays"):
        yield Finding(
            NOTE, "requesters pay in this bucket", "name a project: GCSLease(..., user_project=...)"
        )
    access = bucket.get("iamConfiguration") or {}
    if access.get("publicAccessPrevention") != "enforced":
        yield Finding(
            NOTE,
            "public access to the bucket is not prevented; records name hosts and processes",
            "enforce public access prevention on it",
        )


def _protections(bucket: Mapping[str, Any]) -> Iterator[Finding]:
    if retention := bucket.get("retentionPolicy"):
        yield Finding(
            PROBLEM,
            f"a retention policy of {retention.get('retentionPeriod', '?')} s keeps records from "
            "being replaced: no lease can be renewed or released",
            "remove the policy, or use a bucket without one",
        )
    if (bucket.get("objectRetention") or {}).get("mode"):
        yield Finding(NOTE, "objects may be retained one by one: see that none of leases/ is")
    if bucket.get("defaultEventBasedHold"):
        yield Finding(
            PROBLEM,
            "each new object is put under an event-based hold: no lease can be renewed or released",
            "switch off the bucket's default event-based hold",
        )
    for rule in (bucket.get("lifecycle") or {}).get("rule", []):
        if _spares_leases(rule):
            continue
        action = (rule.get("action") or {}).get("type", "?")
        yield Finding(
            PROBLEM if action == "Delete" else NOTE,
            f"a lifecycle rule ({action}, {rule.get('condition') or {}}) may meet records of "
            "leases; a deleted one frees its lease under its holder",
            "have the rule match other prefixes, or noncurrent versions, only",
        )


def _spares_leases(rule: Mapping[str, Any]) -> bool:
    condition = rule.get("condition") or {}
    if condition.get("isLive") is False or "daysSinceNoncurrentTime" in condition:
        return True  # old versions are nobody's leases
    if "numNewerVersions" in condition or "noncurrentTimeBefore" in condition:
        return True
    prefixes = condition.get("matchesPrefix")
    if not prefixes:
        # Renewed every few seconds, a held record is never a day old; a free one is worth keeping
        # for its fence, which the storage's clock makes up for.
        return False
    return not any("leases/".startswith(p) or "leases/" in p for p in prefixes)


def _copies(bucket: Mapping[str, Any], policy: LeasePolicy) -> Iterator[Finding]:
    daily = _DAY / policy.heartbeat
    kept = int((bucket.get("softDeletePolicy") or {}).get("retentionDurationSeconds") or 0)
    if kept:
        copies = kept / policy.heartbeat
        yield Finding(
            NOTE,
            f"soft delete keeps what was replaced for {kept / _DAY:g} days: about {copies:,.0f} "
            "copies of each held lease, little money, much clutter",
            "gcloud storage buckets update gs://BUCKET --clear-soft-delete",
        )
    if (bucket.get("versioning") or {}).get("enabled"):
        yield Finding(
            NOTE,
            f"object versioning keeps {daily:,.0f} old versions a day of each held lease, for ever",
            "switch it off for this bucket, or have a lifecycle rule delete noncurrent versions",
        )


def _cost(policy: LeasePolicy) -> Finding:
    writes, reads = _MONTH / policy.heartbeat, _MONTH / policy.poll
    return Finding(
        OK,
        f"a month of 730 h costs about ${writes * _WRITE:.2f} for each lease that is held all the "
        f"time ({writes:,.0f} writes at $0.005 per 1,000) and ${reads * _READ:.2f} for each "
        f"process that waits all the time ({reads:,.0f} reads at $0.0004 per 1,000), in a region, "
        "Standard class",
    )
