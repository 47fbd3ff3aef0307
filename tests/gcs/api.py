"""The operations of the JSON API: from a request to its answer, on the objects of one bucket."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import Any, Final

from .answers import Answer, Refusal, denied, no_bucket, no_object, of_json, unsupported
from .log import Request
from .objects import Conditions, Objects, Stored, crc32c, md5, rfc3339
from .options import Options
from .routes import Route
from .uploads import Upload

CHANGING: Final = ("write", "patch", "delete")
_NEEDS: Final = {
    "read": "storage.objects.get",
    "metadata": "storage.objects.get",
    "list": "storage.objects.list",
    "delete": "storage.objects.delete",
    "patch": "storage.objects.update",
    "bucket": "storage.buckets.get",
}
_LIST_LIMIT: Final = 1000
_NOT_SPOKEN: Final = ("delimiter", "versions", "softDeleted", "matchGlob", "endOffset")


class Api:
    """Carries requests out.

    Args:
        objects: of the bucket.
        options: of the server.
        bucket: the bucket's own metadata, as its owner changes them.
    """

    def __init__(self, objects: Objects, options: Options, bucket: dict[str, Any]) -> None:
        self._objects = objects
        self._options = options
        self.bucket = bucket

    def carry_out(self, request: Request, route: Route, upload: Upload | None) -> Answer:
        """Return the answer; ``request`` is told what was committed.

        Raises:
            Refusal: nothing was applied.
        """
        if route.kind == "unknown":
            raise unsupported(f"{request.method} {request.target}")
        if self._options.bucket_missing or route.bucket != self._objects.bucket:
            raise no_bucket()
        self._permit(_NEEDS.get(route.kind))
        if route.kind == "write":
            return self._write(request, upload or Upload("", b"", {}))
        handlers: dict[str, Callable[[Request, Route], Answer]] = {
            "read": self._read,
            "metadata": self._metadata,
            "patch": self._patch,
            "delete": self._delete,
            "list": self._list,
            "bucket": self._bucket,
            "permissions": self._permissions,
        }
        return handlers[route.kind](request, route)

    # --- Changes -------------------------------------------------------------------------

    def _write(self, request: Request, upload: Upload) -> Answer:
        if not request.name:
            raise Refusal(400, "required", "Required")
        for key, true in (("md5Hash", md5(upload.body)), ("crc32c", crc32c(upload.body))):
            said = upload.properties.get(key)
            if said not in (None, true):
                message = f"Provided {key} '{said}' doesn't match the calculated '{true}'."
                raise Refusal(400, message=message)

        def allow(current: Stored | None) -> None:
            self._permit("storage.objects.create")
            if current is not None:  # to replace is to delete
                self._permit("storage.objects.delete")

        conditions = Conditions.of(request.query)
        stored = self._objects.put(request.name, upload.body, upload.properties, conditions, allow)
        request.committed, request.generation = True, stored.generation
        return of_json(self._resource(stored))

    def _patch(self, request: Request, route: Route) -> Answer:
        changes = json.loads(request.body or b"{}")
        conditions = Conditions.of(request.query)
        stored = self._objects.patch(request.name, changes, conditions, _pinned(request))
        request.committed, request.generation = True, stored.generation
        return of_json(self._resource(stored))

    def _delete(self, request: Request, route: Route) -> Answer:
        self._objects.delete(request.name, Conditions.of(request.query), _pinned(request))
        request.committed = True
        return Answer(204, headers={"Content-Type": "application/json"})

    # --- Looks ---------------------------------------------------------------------------

    def _look(self, request: Request) -> Stored:
        conditions = Conditions.of(request.query)
        try:
            return self._objects.get(request.name, conditions, _pinned(request))
        except Refusal as refusal:
            if refusal.status == 404:  # who may not list is not told what there is not
                self._permit("storage.objects.list")
            raise

    def _read(self, request: Request, route: Route) -> Answer:
        stored = self._look(request)
        headers = {
            "Content-Type": str(stored.properties.get("contentType", "application/octet-stream")),
            "Cache-Control": stored.cache_control or "private, max-age=0",
            "ETag": stored.etag,
            "X-Goog-Generation": str(stored.generation),
            "X-Goog-Metageneration": str(stored.metageneration),
            "X-Goog-Hash": f"crc32c={stored.crc32c},md5={md5(stored.body)}",
            "X-Goog-Storage-Class": str(self.bucket["storageClass"]),
            "X-Goog-Stored-Content-Encoding": "identity",
            "X-Goog-Stored-Content-Length": str(len(stored.body)),
            "Accept-Ranges": "bytes",
        }
        if self._options.send_last_modified:
            headers["Last-Modified"] = formatdate(stored.updated, usegmt=True)
        span = _span(request.headers.get("range"), len(stored.body))
        if span is None:
            return Answer(200, stored.body, headers)
        start, end = span
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(stored.body)}"
        return Answer(206, stored.body[start:end], headers)

    def _metadata(self, request: Request, route: Route) -> Answer:
        stored = self._look(request)
        return of_json(self._resource(stored), ETag=stored.etag)

    def _list(self, request: Request, route: Route) -> Answer:
        query = request.query
        if spoken := [key for key in _NOT_SPOKEN if query.get(key, "false") != "false"]:
            raise unsupported(f"the list parameters {spoken}")
        try:
            limit = min(int(query.get("maxResults", _LIST_LIMIT)), _LIST_LIMIT)
            after = base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
        except ValueError:
            raise Refusal(400, "invalidArgument", "Invalid argument.") from None
        start = query.get("startOffset", "")
        page, last = self._objects.page(query.get("prefix", ""), after, start, limit)
        document: dict[str, Any] = {"kind": "storage#objects"}
        if last:
            document["nextPageToken"] = base64.urlsafe_b64encode(last.encode()).decode()
        if page:
            document["items"] = [self._resource(stored) for stored in page]
        return of_json(document)

    def _bucket(self, request: Request, route: Route) -> Answer:
        return of_json(self.bucket)

    def _permissions(self, request: Request, route: Route) -> Answer:
        asked = [value for key, value in route.pairs if key == "permissions"]
        granted = [name for name in asked if name not in self._options.denied]
        document: dict[str, Any] = {"kind": "storage#testIamPermissionsResponse"}
        if granted:
            document["permissions"] = granted
        return of_json(document)

    # --- Details -------------------------------------------------------------------------

    def _permit(self, permission: str | None) -> None:
        if permission in self._options.denied:
            raise denied(str(permission))

    def _resource(self, stored: Stored) -> Mapping[str, Any]:
        bucket, generation = self._objects.bucket, str(stored.generation)
        return {
            "contentType": "application/octet-stream",
            **stored.properties,
            "kind": "storage#object",
            "id": f"{bucket}/{stored.name}/{generation}",
            "name": stored.name,
            "bucket": bucket,
            "generation": generation,
            "metageneration": str(stored.metageneration),
            "storageClass": self.bucket["storageClass"],
            "size": str(len(stored.body)),
            "md5Hash": md5(stored.body),
            "crc32c": stored.crc32c,
            "etag": stored.etag,
            "timeCreated": rfc3339(stored.created),
            "updated": rfc3339(stored.updated),
        }


def new_bucket(name: str, created: float) -> dict[str, Any]:
    """Return the metadata of a bucket as one has it that was made for leases, and not quite:
    soft delete is on, as it is by default."""
    return {
        "kind": "storage#bucket",
        "id": name,
        "name": name,
        "projectNumber": "123456789012",
        "metageneration": "1",
        "location": "EUROPE-WEST1",
        "locationType": "region",
        "storageClass": "STANDARD",
        "timeCreated": rfc3339(created),
        "updated": rfc3339(created),
        "softDeletePolicy": {
            "retentionDurationSeconds": "604800",
            "effectiveTime": rfc3339(created),
        },
        "iamConfiguration": {
            "uniformBucketLevelAccess": {"enabled": True},
            "publicAccessPrevention": "enforced",
        },
    }


def _pinned(request: Request) -> int | None:
    text = request.query.get("generation")
    if text is None:
        return None
    if not text.isdigit():
        raise no_object(request.bucket, f"{request.name}#{text}")
    return int(text)


def _span(header: str | None, size: int) -> tuple[int, int] | None:
    """Return what a Range header asks of ``size`` bytes; None is all."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if found is None or found[0] == "bytes=-":
        return None
    first, last = found[1], found[2]
    if not first:
        start, end = max(size - int(last), 0), size
    else:
        start, end = int(first), min(int(last) + 1, size) if last else size
    if start >= end:
        headers = {"Content-Range": f"bytes */{size}"}
        message = "The requested range cannot be satisfied."
        raise Refusal(416, "requestedRangeNotSatisfiable", message, headers=headers)
    return start, end
