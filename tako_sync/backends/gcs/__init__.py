"""``GCSLease``: one object per lease in a Google Cloud Storage bucket, for any number of machines.

An object's generation is the version: each write names the one that it replaces, and GCS refuses
it where another stands. Everything else is above: no request is repeated here, and no body read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.api_core import exceptions

from tako_sync.abc import ABSENT, BODY_LIMIT, Absent, Interval, LeaseBackend, Snapshot, Version
from tako_sync.backends.gcs import answer, place
from tako_sync.backends.gcs.clients import Clients, Heard
from tako_sync.backends.gcs.faults import translate
from tako_sync.clock import SystemClock
from tako_sync.errors import BackendUnavailableError, ConfigurationError, VersionConflictError
from tako_sync.findings import Finding
from tako_sync.policy import LeasePolicy

if TYPE_CHECKING:
    from google.cloud import storage  # type: ignore[import-untyped]

T = TypeVar("T")

_CLOCK: Final = SystemClock()
_GENERATION: Final = re.compile(r"[1-9][0-9]{0,18}")
_LARGEST: Final = 2**63 - 1
_MISREAD: Final = (AttributeError, LookupError, TypeError, ValueError)
"""What comes of an answer in which something else stands than is looked for there."""


class GCSLease(LeaseBackend):
    """Leases in a bucket: excludes all processes, on any machine, that use this bucket and prefix.

    The storage's own clock judges their age; no host's clock matters. A request is sent once, at
    its timeout it is given up. Nothing is sent before the first one: credentials and the bucket
    are looked for then.

    Limits: GCS takes about one write per second of one object, and answers others with 429, which
    costs a second and nothing else. The bucket must not have a retention policy or default holds,
    nor a rule that deletes leases. :func:`tako_sync.doctor` looks at all that.

    Args:
        bucket: its name.
        prefix: a folder in it; leases are ``<prefix>/leases/run-<app>-<env>-<name>``.
        client: a ``google.cloud.storage.Client``, whose credentials, project and endpoint are
            used; it is not used itself, nor changed. By default those that Google's client finds:
            application default credentials, ``STORAGE_EMULATOR_HOST``.
        user_project: the project that pays, where the bucket's requesters pay.

    Raises:
        ConfigurationError: the bucket's name or the prefix cannot be one.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        client: storage.Client | None = None,
        user_project: str | None = None,
    ) -> None:
        self._bucket = place.bucket(bucket)
        self._prefix = place.prefix(prefix)
        if user_project is not None and not isinstance(user_project, str):
            raise ConfigurationError(f"user_project is a project's id, not {user_project!r}")
        self._user_project = user_project
        self._clients = Clients(client)

    def read(self, key: str, *, timeout: float) -> Snapshot:
        def get(bucket: Any) -> Snapshot:
            blob = bucket.blob(self._name(key))  # afresh: a used one pins its generation
            try:
                body = _download(blob, timeout)
            except exceptions.NotFound as error:
                if answer.tells_of_the_bucket(error) or answer.is_of_a_proxy(error):
                    raise
                return Snapshot(b"", ABSENT, None, answer.now(self._heard.headers))
            version = answer.generation(blob.generation)
            answer.check_body(body, self._heard.headers)
            now = answer.now(self._heard.headers)
            return Snapshot(body, version, answer.written(self._heard.headers, now), now)

        return self._ask("read", key, get)

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        condition = 0 if expect is ABSENT else _as_generation(key, expect)

        def put(bucket: Any) -> Version:
            blob = bucket.blob(self._name(key))
            blob.cache_control = "no-store"  # in a public bucket, caches would serve old records
            blob.upload_from_string(
                body,
                content_type="application/json",
                if_generation_match=condition,
                timeout=timeout,
                retry=None,
            )
            return answer.generation(blob.generation)

        return self._ask("write", key, put)

    def written(self, key: str, version: Version, *, timeout: float) -> Interval | None:
        def get_metadata(bucket: Any) -> Interval | None:
            blob = bucket.blob(self._name(key))
            try:
                blob.reload(timeout=timeout, retry=None)
            except exceptions.NotFound as error:
                if answer.tells_of_the_bucket(error) or answer.is_of_a_proxy(error):
                    raise
                return None
            if answer.generation(blob.generation) != version:
                return None
            return answer.updated(blob.updated, answer.now(self._heard.headers))

        return self._ask("read", key, get_metadata)

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        until = _CLOCK.monotonic() + timeout
        start = self._name("")

        def list_all(bucket: Any) -> list[str]:
            keys: list[str] = []
            token = None
            while True:
                left = until - _CLOCK.monotonic()
                if left <= 0:
                    raise BackendUnavailableError(
                        f"{self.describe()} could not be listed within {timeout:.3g} s"
                    )
                page = bucket.list_blobs(
                    prefix=start + prefix,
                    page_token=token,
                    max_results=1000,
                    fields="items(name),nextPageToken",
                    timeout=left,
                    retry=None,
                )
                names = [blob.name for blob in next(page.pages, ())]
                keys += [name[len(start) :] for name in names if place.is_key(name[len(start) :])]
                token = page.next_page_token
                if not token:
                    return keys

        return self._ask("list", prefix, list_all)

    def examine(self, policy: LeasePolicy, *, timeout: float) -> Iterable[Finding]:
        from tako_sync.backends.gcs.examination import Place, examine

        def ask(request: Callable[[Any], Any]) -> Any:
            return self._ask("bucket", "", request)

        where = Place(self._bucket, self._name(""))
        return examine(ask, self._clients.get, where, policy, timeout)

    def describe(self) -> str:
        return f"gs://{self._bucket}/{self._prefix}".rstrip("/")

    def close(self) -> None:
        self._clients.close()

    @property
    def _heard(self) -> Heard:
        return self._clients.heard

    def _name(self, key: str) -> str:
        return f"{self._prefix}leases/{key}"

    def _ask(self, what: str, key: str, request: Callable[[Any], T]) -> T:
        where = f"gs://{self._bucket}/{self._name(key)}"
        self._heard.forget()
        try:
            client = self._clients.get()
            return request(client.bucket(self._bucket, user_project=self._user_project))
        except Exception as error:
            self._heard.close()
            fault = translate(error, what, where)
            if fault is None and isinstance(error, _MISREAD) and self._heard.headers:
                # Google's client takes any answer of 200 for one of GCS.
                fault = BackendUnavailableError(f"{where}: not an answer of GCS: {error!r}")
            if fault is None:
                raise
            raise fault from error
        finally:
            self._heard.forget()


def _download(blob: Any, timeout: float) -> bytes:
    """Read the object, or as much of it as shows that it is too long."""
    body: bytes
    try:
        # Raw: never unpacked, so that a small body does not become a large one here.
        body = blob.download_as_bytes(
            end=BODY_LIMIT, raw_download=True, timeout=timeout, retry=None
        )
    except exceptions.RequestRangeNotSatisfiable:  # of nothing at all, no range can be had
        body = blob.download_as_bytes(raw_download=True, timeout=timeout, retry=None)
    return body


def _as_generation(key: str, version: Version) -> int:
    """Return the number; one that GCS never gives is refused without a request: 0 would create."""
    if not _GENERATION.fullmatch(version) or int(version) > _LARGEST:
        raise VersionConflictError(f"{key} was never at version {version!r}")
    return int(version)
