"""The errors that users of the real service have met, in its words as far as they are known.

Each is an action. Where the reason that is documented and the one in reports of users differ,
there are both: a client must understand either.
"""

from __future__ import annotations

from typing import Final

from .actions import Status
from .answers import denied

UNAVAILABLE: Final = Status(503)
INTERNAL: Final = Status(500)
TOO_MANY: Final = Status(
    429,
    message=(
        "The object {object} exceeded the rate limit for object mutation operations (create, "
        "update, and delete). Please reduce your request rate. "
        "See https://cloud.google.com/storage/docs/gcs429."
    ),
)
UNAUTHORIZED: Final = Status(401)
BUCKET_MISSING: Final = Status(404, message="The specified bucket does not exist.")

_RETAINED: Final = (
    "Object '{object}' is subject to bucket's retention policy and cannot be deleted, "
    "overwritten or archived until 2031-09-20T12:18:15.93713-07:00"
)
RETENTION: Final = Status(403, "retentionPolicyNotMet", _RETAINED)
RETENTION_AS_REPORTED: Final = Status(403, "forbidden", _RETAINED)

_HELD: Final = (
    "Object '{object}' is under active Event-Based hold and cannot be deleted, overwritten or "
    "archived until hold is removed."
)
HOLD: Final = Status(403, "objectUnderActiveHold", _HELD)
HOLD_AS_REPORTED: Final = Status(403, "forbidden", _HELD)

_NO_PROJECT: Final = "Bucket is a requester pays bucket but no user project provided."
REQUESTER_PAYS: Final = Status(400, "userProjectMissing", _NO_PROJECT)
REQUESTER_PAYS_AS_REPORTED: Final = Status(400, "required", _NO_PROJECT)

_KEY_OFF: Final = "Cloud KMS key is disabled, destroyed, or scheduled to be destroyed."
KMS_DISABLED: Final = Status(403, "cloudKmsDisabledKey", _KEY_OFF)
KMS_DISABLED_AS_DOCUMENTED: Final = Status(400, "cloudKmsDisabledKey", _KEY_OFF)
KMS_DENIED: Final = Status(
    403,
    message=(
        "Permission denied on Cloud KMS key. Please ensure that your Cloud Storage service "
        "account has been authorized to use this key."
    ),
)


def forbidden(permission: str = "storage.objects.create") -> Status:
    """What one without a permission gets; ``options.denied`` does so for all that needs it."""
    return Status(403, message=denied(permission).message)
