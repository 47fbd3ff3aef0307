"""What Google's client raises, as one of the three kinds that a lease knows.

The client reports refusals in several shapes, and the reason of one only in the text of the
answer. What is transient is told from what a person has to mend; of the latter, each says how.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import requests
import urllib3
from attrs import frozen
from google.api_core import exceptions
from google.auth import exceptions as auth

from tako_sync.backends.gcs import answer
from tako_sync.errors import (
    BackendDeniedError,
    BackendError,
    BackendUnavailableError,
    VersionConflictError,
)

try:
    from google.cloud.storage import exceptions as media  # type: ignore[import-untyped]
except ImportError:  # before google-cloud-storage 3.0 they were there
    from google import resumable_media as media

_AFTER_429: Final = 1.0
"""Seconds. GCS takes one write per second of one object: https://cloud.google.com/storage/quotas"""
_LONGEST_WAIT: Final = 60.0
_LONGEST_TEXT: Final = 300

_TRANSIENT: Final = (
    auth.RefreshError,  # the token server's trouble: a later refresh may succeed
    auth.TransportError,
    auth.TimeoutError,
    auth.ResponseError,
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    media.DataCorruption,
    media.InvalidResponse,
    OSError,
)
_HOPELESS: Final = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
)


@frozen
class _Refusal:
    """A permanent refusal, recognised by words in its answer; the first that fits counts."""

    statuses: tuple[int, ...]
    words: re.Pattern[str]
    advice: str


def _refusal(statuses: tuple[int, ...], words: str, advice: str) -> _Refusal:
    return _Refusal(statuses, re.compile(words, re.IGNORECASE), advice)


_REFUSALS: Final = (
    _refusal(
        (403, 400),
        r"retentionPolicyNotMet|retention",
        "a retention policy protects the record from being replaced, so no lease can be renewed "
        "or released there: remove the policy, or use a bucket without one",
    ),
    _refusal(
        (403, 400),
        r"event-based hold|temporary hold|under active|object hold|objectUnderActiveHold",
        "an object hold protects the record from being replaced: release the hold, and switch "
        "off the bucket's default event-based hold",
    ),
    _refusal(
        (400, 403),
        r"requester.pays|userProjectMissing|no user project",
        "requesters pay in this bucket: name the project that pays, "
        "GCSLease(bucket, user_project=...), or switch that off",
    ),
    _refusal(
        (400, 403),
        r"kms|encryption key|customer.managed",
        "the bucket's encryption key cannot be used: see that it is enabled, and that the Cloud "
        "Storage service agent may encrypt and decrypt with it",
    ),
    _refusal(
        (403,),
        r"billing",
        "the project's billing is disabled: have it enabled",
    ),
    _refusal(
        (403,),
        r"vpcServiceControls|organization's policy|service perimeter",
        "a service perimeter forbids it: have this caller or network admitted",
    ),
    _refusal(
        (401,),
        r"",
        "the credentials are not accepted: see that they are valid, and of this service",
    ),
)
_LIMITED: Final = re.compile(r"rateLimitExceeded|rate limit|quota ?exceeded", re.IGNORECASE)
_PERMISSION: Final = re.compile(r"\bstorage\.(?:objects|buckets)\.[A-Za-z]+")
_NEEDED: Final = {
    "read": "storage.objects.get",
    "write": "storage.objects.create and storage.objects.delete (to replace an object)",
    "list": "storage.objects.list",
    "bucket": "storage.buckets.get",
}


def translate(error: Exception, what: str, where: str) -> BackendError | None:
    """Return what ``error`` means for a lease; None if it is not one of the storage's.

    Args:
        what: ``read``, ``write`` or ``list``.
        where: the object.
    """
    if isinstance(error, BackendError):
        return error
    if isinstance(error, exceptions.GoogleAPICallError):
        return _of_answer(error, what, where)
    if isinstance(error, _HOPELESS):
        return BackendDeniedError(f"{where}: the endpoint is no URL: {_short(error)}")
    if isinstance(error, _TRANSIENT) and not isinstance(error, auth.DefaultCredentialsError):
        return BackendUnavailableError(f"{where}: {_short(error)}")
    if isinstance(error, auth.InvalidOperation):
        return BackendDeniedError(
            f"{where}: the storage wants credentials, and there are none: {_short(error)}"
        )
    if isinstance(error, auth.GoogleAuthError):
        return BackendDeniedError(
            f"{where}: no usable credentials: {_short(error)}. On Google Cloud, give the service "
            "an account; elsewhere: gcloud auth application-default login, or set "
            "GOOGLE_APPLICATION_CREDENTIALS"
        )
    return None


def _of_answer(error: exceptions.GoogleAPICallError, what: str, where: str) -> BackendError:
    status, text = int(error.code or 0), _text(error)
    if status == 412:
        return VersionConflictError(f"{where} has another generation")
    if status == 429 or (status == 403 and _LIMITED.search(text)):
        return BackendUnavailableError(
            f"{where}: too many requests: {_said(error)}", max(_AFTER_429, _retry_after(error))
        )
    if status in (0, 408, 409, 425) or status >= 500 or status < 400:
        return BackendUnavailableError(f"{where}: {_said(error)}", _retry_after(error))
    if status == 404 and answer.is_of_a_proxy(error):
        return BackendUnavailableError(f"{where}: not an answer of GCS: {_said(error)}")
    if status == 404:
        return BackendDeniedError(
            f"{where}: {_missing(error)}: create it, or name another: gs://bucket[/prefix]"
        )
    for refusal in _REFUSALS:
        if status in refusal.statuses and refusal.words.search(text):
            return BackendDeniedError(f"{where}: {refusal.advice} ({_said(error)})")
    if status == 403:
        named = _PERMISSION.search(text)
        advice = f"permission is missing: {named.group() if named else _NEEDED[what]}"
        if what == "read":
            advice += (
                ". GCS answers so of a missing object, too, to who has no storage.objects.list"
            )
        return BackendDeniedError(f"{where}: {advice} ({_said(error)})")
    return BackendDeniedError(f"{where}: refused: {_said(error)}")


def _missing(error: Any) -> str:
    return "the bucket does not exist" if answer.tells_of_the_bucket(error) else "not found"


def _text(error: Any) -> str:
    """Return all that the answer says: the client leaves the reason out of its message."""
    return f"{error} {getattr(error.response, 'text', '')}"


def _said(error: Any) -> str:
    """Return what the service said: of an answer in JSON, the message alone."""
    try:
        return f"{int(error.code)} {_cut(error.response.json()['error']['message'])}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return _short(error)


def _short(error: BaseException) -> str:
    return _cut(str(error) or repr(error))


def _cut(said: str) -> str:
    text = " ".join(said.split())
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"


def _retry_after(error: Any) -> float:
    """Return the seconds that the answer asks to wait for, within reason; 0 if none."""
    header: Callable[[str], str | None] = getattr(error.response, "headers", {}).get
    try:
        seconds = float(header("Retry-After") or 0)
    except ValueError:  # a date: not worth a clock
        return 0.0
    return min(max(0.0, seconds), _LONGEST_WAIT)  # nan: 0
