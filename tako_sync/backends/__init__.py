"""The storage backends, found by the scheme of a URL and imported only then.

Others register theirs as an entry point of the group ``tako_sync.backends``: the name is the
scheme, the object is called with the URL.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from tako_sync.abc import LeaseBackend
from tako_sync.errors import ConfigurationError

if TYPE_CHECKING:
    from tako_sync.backends.gcs import GCSLease as GCSLease
    from tako_sync.backends.memory import MemoryLease as MemoryLease
    from tako_sync.backends.sqlite import SqliteLease as SqliteLease

__all__ = ["GCSLease", "MemoryLease", "SqliteLease", "connect"]

_HOMES = {
    "GCSLease": "tako_sync.backends.gcs",
    "MemoryLease": "tako_sync.backends.memory",
    "SqliteLease": "tako_sync.backends.sqlite",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def connect(url: str) -> LeaseBackend:
    """Return the backend that ``url`` names; nothing is opened yet.

    Raises:
        ConfigurationError: the URL is malformed or nobody knows its scheme.
    """
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise ConfigurationError(
            f"backend {_shown(url)!r} is no URL: write memory:, sqlite:///absolute/path or "
            "gs://bucket"
        )
    if scheme == "memory":
        if rest:
            raise ConfigurationError(f"backend {_shown(url)!r}: nothing follows memory:")
        from tako_sync.backends.memory import MemoryLease

        return MemoryLease()
    if scheme == "sqlite":
        path = rest.lstrip("/")
        if not rest.startswith("///") or not path:
            raise ConfigurationError(f"backend {_shown(url)!r}: write sqlite:///absolute/path")
        if path.startswith("~") or "?" in path or "#" in path:
            raise ConfigurationError(
                f"backend {_shown(url)!r}: after sqlite:/// stands the absolute path alone; no ~ "
                "and no options (SqliteLease(path) takes any path)"
            )
        from tako_sync.backends.sqlite import SqliteLease

        # Absolute, always: two processes with different working directories that read one
        # relative path would not exclude each other.
        return SqliteLease(path if os.name == "nt" else f"/{path}")
    if scheme == "gs":
        bucket, _, prefix = rest.removeprefix("//").partition("/")
        if not rest.startswith("//") or not bucket:
            raise ConfigurationError(f"backend {_shown(url)!r}: write gs://bucket[/prefix]")
        from tako_sync.backends.gcs import GCSLease

        return GCSLease(bucket, prefix)
    return _registered(scheme, url)


def _shown(url: str) -> str:
    """Leave out what stands before the host: often a password."""
    return re.sub(r"//[^/@]*@", "//…@", url)


def _registered(scheme: str, url: str) -> LeaseBackend:
    from importlib.metadata import entry_points

    for entry in entry_points(group="tako_sync.backends", name=scheme):
        backend: LeaseBackend = entry.load()(url)
        return backend
    raise ConfigurationError(
        f"backend {_shown(url)!r}: nobody knows the scheme {scheme!r}; there are memory:, "
        "sqlite:///absolute/path and gs://bucket, and what installed packages register as "
        "tako_sync.backends"
    )
