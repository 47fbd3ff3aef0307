"""The names of leases, applications and environments. Refused where they are written."""

from __future__ import annotations

import re
from typing import Final

from tako_sync.errors import ConfigurationError

MAX_LENGTH: Final = 100
RESERVED: Final = ("singleton-", "cron-", "deploy-", "tako-")
"""Prefixes of the framework's own leases."""

_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9._-]*\Z")


def part(what: str, value: object) -> str:
    """Return ``value`` if it can be a part of a lease's key.

    Args:
        what: what the value names, for the message.

    Raises:
        ConfigurationError: it is not a string of 1 to 100 characters from ``[a-z0-9._-]``
            that begins with a letter or a digit.
    """
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} is a string, not {value!r}")
    if len(value) > MAX_LENGTH:
        raise ConfigurationError(
            f"{what} has {len(value)} characters, {MAX_LENGTH} at most: {value[:20]!r}…"
        )
    if not _PATTERN.match(value):
        raise ConfigurationError(
            f"{what} {value!r} is not made of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or a digit"
        )
    return value


def lease(value: object) -> str:
    """Return ``value`` if an application may name a lease so.

    Raises:
        ConfigurationError: as for :func:`part`, or it begins with a reserved prefix.
    """
    name = part("a lease's name", value)
    for prefix in RESERVED:
        if name.startswith(prefix):
            raise ConfigurationError(
                f"the name {name!r} begins with {prefix!r}, which is kept for the framework's "
                "own leases"
            )
    return name
