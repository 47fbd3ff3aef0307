"""What ``doctor`` looks at in a bucket: who asks, what they may, its settings, what leases cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from attrs import frozen

from tako_sync.backends.gcs import settings
from tako_sync.errors import BackendDeniedError, BackendError
from tako_sync.findings import NOTE, OK, PROBLEM, Finding
from tako_sync.policy import LeasePolicy

NEEDED: Final = (
    "storage.objects.get",
    "storage.objects.create",
    "storage.objects.delete",
    "storage.objects.list",
)
_FOR_SETTINGS: Final = "storage.buckets.get"
_GOOGLE: Final = "storage.googleapis.com"

# https://cloud.google.com/storage/pricing: a region, Standard class, dollars for one request.
_WRITE: Final = 0.005 / 1000
_READ: Final = 0.0004 / 1000
_MONTH: Final = 730 * 3600.0

_KINDS: Final = {
    "google.oauth2.service_account": "a service account's key",
    "google.oauth2.credentials": "a person's login (gcloud auth application-default login)",
    "google.auth.compute_engine": "the service account of the machine",
    "google.auth.impersonated_credentials": "an impersonated service account",
    "google.auth.external_account_authorized_user": "a person's login by workforce identity",
    "google.auth.external_account": "workload identity federation",
    "google.auth.identity_pool": "workload identity federation",
    "google.auth.aws": "workload identity federation of AWS",
    "google.auth.pluggable": "workload identity federation by a program",
}


@frozen
class Place:
    """Where the leases are.

    Attributes:
        bucket: its name.
        folder: what the names of their objects begin with: ``leases/``, behind the prefix.
    """

    bucket: str
    folder: str


def examine(
    ask: Callable[[Callable[[Any], Any]], Any],
    client: Callable[[], Any],
    place: Place,
    policy: LeasePolicy,
    timeout: float,
) -> Iterator[Finding]:
    """Look at credentials and bucket.

    Args:
        ask: makes a request of the bucket, and raises a ``BackendError`` where it fails.
        client: gives the client.
        place: where the leases are.
        policy: the timings of the leases.
        timeout: seconds for each request.
    """
    try:
        made = client()
    except Exception as error:  # noqa: BLE001 - told by the requests before, too
        yield Finding(
            "credentials",
            PROBLEM,
            f"no client can be made: {error}",
            "give this process credentials: a service account of its platform; elsewhere, "
            "gcloud auth application-default login",
        )
    else:
        yield _credentials(made)
        yield _endpoint(made)
        yield from _permissions(ask, timeout)
        yield from _settings(ask, place, policy, timeout)
    yield from _cost(policy)


def _credentials(client: Any) -> Finding:
    credentials = client._credentials
    kind = type(credentials)
    if kind.__name__ == "AnonymousCredentials":
        return Finding("credentials", OK, "none are sent: this is for emulators (anonymous)")
    named = [name for module, name in _KINDS.items() if kind.__module__.startswith(module)]
    text = named[0] if named else f"{kind.__module__}.{kind.__name__}"
    who = getattr(credentials, "service_account_email", None)
    if isinstance(who, str) and who and who != "default":
        text += f", {who}"
    return Finding("credentials", OK, text)


def _endpoint(client: Any) -> Finding:
    url = str(getattr(getattr(client, "_connection", None), "API_BASE_URL", ""))
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    except ValueError:
        host = "not a URL"
    if host == _GOOGLE:
        return Finding("endpoint", OK, f"{host}, Google's")
    return Finding("endpoint", OK, f"{host}, which is not Google's usual one: {_GOOGLE}")


def _permissions(ask: Callable[[Callable[[Any], Any]], Any], timeout: float) -> Iterator[Finding]:
    """Ask what the bucket grants: the scratch lease stops at the first thing that is refused.

    The scratch lease has the last word: this does not see what is granted under a condition.
    """
    wanted = [*NEEDED, _FOR_SETTINGS]
    try:
        granted = set(
            ask(lambda bucket: bucket.test_iam_permissions(wanted, timeout=timeout, retry=None))
        )
    except BackendDeniedError:  # an emulator, that has no such answer
        yield Finding("permissions", NOTE, "this endpoint does not tell them")
        return
    except BackendError as error:
        yield Finding("permissions", NOTE, f"could not be asked for: {error}")
        return
    missing = [name for name in NEEDED if name not in granted]
    if not missing:
        yield Finding("permissions", OK, f"all that leases need: {', '.join(NEEDED)}")
        return
    yield Finding(
        "permissions",
        NOTE,
        f"the bucket does not grant {' and '.join(missing)}, unless under a condition",
        "make a custom role of these, and no more, and grant it on the bucket: "
        f"{', '.join(NEEDED)}",
    )


def _settings(
    ask: Callable[[Callable[[Any], Any]], Any],
    place: Place,
    policy: LeasePolicy,
    timeout: float,
) -> Iterator[Finding]:
    def get(bucket: Any) -> Any:
        bucket.reload(timeout=timeout, retry=None)
        return bucket._properties

    try:
        metadata: Mapping[str, Any] = ask(get)
    except BackendDeniedError as error:
        yield Finding(
            "settings",
            NOTE,
            f"the bucket's cannot be seen: {error}",
            f"leases do without; for this examination, grant {_FOR_SETTINGS} as well",
        )
    except BackendError as error:
        yield Finding("settings", NOTE, f"the bucket's could not be read: {error}")
    else:
        try:
            yield from settings.examine(metadata, place.bucket, place.folder, policy)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            yield Finding("settings", NOTE, f"the bucket's are not what GCS sends: {error!r}")


def _cost(policy: LeasePolicy) -> Iterator[Finding]:
    writes, reads = _MONTH / policy.heartbeat, _MONTH / policy.poll
    yield Finding(
        "cost of a held lease",
        OK,
        f"${writes * _WRITE:.2f} a month: 730 h of a renewal each {policy.heartbeat:g} s are "
        f"{writes:,.0f} writes (class A) at $0.005 per 1,000",
    )
    yield Finding(
        "cost of a standby",
        OK,
        f"${reads * _READ:.2f} a month for each process that waits: 730 h of a look each "
        f"{policy.poll:g} s are {reads:,.0f} reads (class B) at $0.0004 per 1,000. Prices of "
        "Standard class in a region: https://cloud.google.com/storage/pricing",
    )
