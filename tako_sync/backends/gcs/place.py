"""Where leases may be: names of buckets and folders that mean the same to everyone they pass."""

from __future__ import annotations

import re
from typing import Final

from tako_sync.errors import ConfigurationError

# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{1,220}[a-z0-9])")
_LONGEST_PART: Final = 63
_SEGMENT: Final = re.compile(r"[A-Za-z0-9._=+@-]{1,200}")
_LONGEST_PREFIX: Final = 500
"""Characters. With the longest key it stays below the 1024 bytes of an object's name."""
_KEY: Final = re.compile(r"[a-z0-9._-]{1,400}")


def bucket(name: object) -> str:
    """Return the name of a bucket as it is.

    Raises:
        ConfigurationError: no bucket can have it.
    """
    if not isinstance(name, str) or not _is_bucket(name):
        raise ConfigurationError(
            f"bucket {name!r} cannot be the name of a bucket: 3 to 63 of a-z, 0-9, dash, dot and "
            "underscore, with a letter or digit first and last"
        )
    return name


def _is_bucket(name: str) -> bool:
    if not _BUCKET.fullmatch(name) or ".." in name:
        return False
    # With dots it may be longer: a domain, of which each part keeps the limit.
    return all(0 < len(part) <= _LONGEST_PART for part in name.split("."))


def prefix(folder: object) -> str:
    """Return a folder of a bucket as the beginning of the names in it: empty, or with a slash.

    Raises:
        ConfigurationError: it has a part that a URL, a file system or a person would misread.
    """
    if folder == "":
        return ""
    if not isinstance(folder, str):
        raise ConfigurationError(f"prefix is a text, not {folder!r}")
    parts = folder.removesuffix("/").split("/")
    good = len(folder) <= _LONGEST_PREFIX and all(map(_SEGMENT.fullmatch, parts))
    if not good or any(not part.strip(".") for part in parts):
        raise ConfigurationError(
            f"prefix {folder!r} cannot be a folder of leases: write folder/folder, each of "
            "letters, digits and . _ = + @ -, none of dots alone"
        )
    return "/".join(parts) + "/"


def is_key(text: str) -> bool:
    """Whether a name below the folder can be that of a lease: others may put objects there."""
    return _KEY.fullmatch(text) is not None
