"""What the server answers: HTTP answers as values, and errors in the words of the real service."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

JSON: Final = "application/json; charset=UTF-8"

_USUAL: Final[Mapping[int, tuple[str, str]]] = {
    400: ("invalid", "Bad Request"),
    401: ("authError", "Invalid Credentials"),
    403: ("forbidden", "Forbidden"),
    404: ("notFound", "Not Found"),
    408: ("requestTimeout", "Request Timeout"),
    409: ("conflict", "Conflict"),
    412: ("conditionNotMet", "At least one of the pre-conditions you specified did not hold."),
    429: ("rateLimitExceeded", "The rate limit was exceeded. Please reduce your request rate."),
    500: ("backendError", "We encountered an internal error. Please try again."),
    502: ("badGateway", "Bad Gateway"),
    503: ("backendError", "Service Unavailable"),
    504: ("gatewayTimeout", "Gateway Timeout"),
}


@dataclass(frozen=True)
class Answer:
    """An HTTP answer without its ``Date``, which is taken when it is sent.

    Attributes:
        status: the status code.
        body: the bytes; a 304 and a 204 send none.
        headers: in the order of sending, without Content-Length.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def encoded(self, date: str | None) -> bytes:
        """Return the bytes for the wire, with the given ``Date``, or none."""
        try:
            phrase = HTTPStatus(self.status).phrase
        except ValueError:
            phrase = "Unknown"
        lines = [f"HTTP/1.1 {self.status} {phrase}"]
        if date is not None:
            lines.append(f"Date: {date}")
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        bodiless = self.status in (204, 304)
        if not bodiless:
            lines.append(f"Content-Length: {len(self.body)}")
        head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        return head if bodiless else head + self.body


def of_json(document: Any, status: int = 200, **headers: str) -> Answer:
    """Answer with a JSON document, uncacheable as metadata is."""
    body = json.dumps(document, indent=2).encode() + b"\n"
    cache = {"Cache-Control": "no-cache, no-store, max-age=0, must-revalidate"}
    return Answer(status, body, {"Content-Type": JSON, **cache, **headers})


class Refusal(Exception):
    """An error answer on its way to the client; nothing has been applied.

    Args:
        status: the status code.
        reason: ``error.errors[0].reason``; the usual one of the status if empty.
        message: ``error.message``, likewise.
        domain: ``error.errors[0].domain``.
        headers: further ones, such as ``Retry-After``.
        extra: further fields of ``error.errors[0]``.
    """

    def __init__(
        self,
        status: int,
        reason: str = "",
        message: str = "",
        *,
        domain: str = "global",
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        usual_reason, usual_message = _USUAL.get(status, ("unknown", f"Status {status}"))
        self.status = status
        self.reason = reason or usual_reason
        self.message = message or usual_message
        self.domain = domain
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})
        super().__init__(f"{status} {self.reason}: {self.message}")

    def answer(self, *, plain: bool) -> Answer:
        """Return it as an answer.

        Args:
            plain: as the download endpoint does: the bare message as text, without the reason.
        """
        if self.status == 304:
            return Answer(304, headers=self.headers)
        if plain:
            kind = {"Content-Type": "text/html; charset=UTF-8"}
            return Answer(self.status, self.message.encode(), {**kind, **self.headers})
        entry = {"message": self.message, "domain": self.domain, "reason": self.reason}
        error = {"code": self.status, "message": self.message, "errors": [{**entry, **self.extra}]}
        return of_json({"error": error}, self.status, **self.headers)


def not_met() -> Refusal:
    return Refusal(412, extra={"locationType": "header", "location": "If-Match"})


def no_object(bucket: str, name: str) -> Refusal:
    return Refusal(404, message=f"No such object: {bucket}/{name}")


def no_bucket() -> Refusal:
    return Refusal(404, message="The specified bucket does not exist.")


def too_fast(bucket: str, name: str) -> Refusal:
    message = (
        f"The object {bucket}/{name} exceeded the rate limit for object mutation operations "
        "(create, update, and delete). Please reduce your request rate. "
        "See https://cloud.google.com/storage/docs/gcs429."
    )
    return Refusal(429, message=message, domain="usageLimits")


def denied(permission: str) -> Refusal:
    what = "bucket" if permission.startswith("storage.buckets") else "object"
    return Refusal(
        403,
        message=(
            f"Anonymous caller does not have {permission} access to the Google Cloud Storage "
            f"{what}. Permission '{permission}' denied on resource (or it may not exist)."
        ),
    )


def unsupported(what: str) -> Refusal:
    return Refusal(501, "notImplemented", f"This test server does not speak {what}.")
