"""What ``doctor`` looks at in a lease file: where it lies, who may write it, and its clock."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tako_sync.backends.sqlite.file import LeaseFile
from tako_sync.errors import BackendError
from tako_sync.findings import NOTE, OK, PROBLEM, Finding

_SHARED: Final = frozenset(
    (
        "9p",
        "afs",
        "ceph",
        "cifs",
        "glusterfs",
        "lustre",
        "nfs",
        "nfs4",
        "prl_fs",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
    )
)
"""File systems of a network, or of the host of a virtual machine."""
_ON_DISK: Final = ("fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.exfat")
_GONE_AT_REBOOT: Final = ("tmpfs", "ramfs")
_MOUNTS: Final = Path("/proc/self/mounts")
_LITTLE: Final = 50 * 2**20
"""Bytes."""
_BY_GROUP: Final = 0o020
_BY_ALL: Final = 0o002


def examine(file: LeaseFile, has_clock: bool, timeout: float) -> Iterator[Finding]:
    """Look at the file and the folder it is in.

    Args:
        file: made if it is not there yet.
        has_clock: whether the clock since boot can be told from that of another boot.
        timeout: seconds that may be waited for the file's locks.
    """
    yield from _journal(file, timeout)
    yield from _place(file.path)
    yield from _access(file.path)
    yield _boot_clock(has_clock)


def _journal(file: LeaseFile, timeout: float) -> Iterator[Finding]:
    try:
        with file.session(timeout) as session:
            (mode,) = session.one("PRAGMA journal_mode") or ("unknown",)
    except BackendError as error:
        yield Finding("journal", NOTE, f"not looked at: {error}")
    else:
        yield Finding(
            "journal", OK, f"mode {mode}: a write counts once it and its journal are on the disk"
        )


def _place(path: Path) -> Iterator[Finding]:
    kind = file_system(path)
    if kind in _SHARED or (kind.startswith("fuse.") and kind not in _ON_DISK):
        yield Finding(
            "file system",
            PROBLEM,
            f"{path} seems to be on one of a network or of a host ({kind}), whose locks are not "
            "to be relied on: two processes may hold one lease",
            "put the file on the machine's own disk, or use gs://bucket",
        )
    elif kind in _GONE_AT_REBOOT:
        yield Finding(
            "file system",
            NOTE,
            f"{path} is in memory ({kind}) and gone after a reboot, and with it all fences",
            "put the file on a disk, if a fence is compared with those from before a reboot",
        )
    elif kind:
        yield Finding("file system", OK, f"{kind}, of this machine")
    else:
        yield Finding(
            "file system", NOTE, "this system does not tell its kind: a network's will not do"
        )
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        yield Finding("free space", NOTE, f"cannot be told: {error}")
    else:
        left = f"{free // 2**20:,} MiB are left on its disk"
        if free < _LITTLE:
            yield Finding("free space", NOTE, left, "make room: a full disk ends all holds")
        else:
            yield Finding("free space", OK, left)


def _access(path: Path) -> Iterator[Finding]:
    try:
        status = path.stat()
    except OSError as error:
        yield Finding("who may write", NOTE, f"cannot be told: {error}")
        return
    if os.name != "posix":
        yield Finding(
            "who may write",
            NOTE,
            "not looked at on this system",
        )
    elif status.st_mode & _BY_ALL:
        yield Finding(
            "who may write",
            NOTE,
            f"everybody on this machine may write {path}, and so free, hold or block every lease",
            f"chmod o-w {path}",
        )
    elif status.st_mode & _BY_GROUP:
        yield Finding(
            "who may write", OK, f"user {status.st_uid} and group {status.st_gid}: {path}"
        )
    else:
        yield Finding("who may write", OK, f"user {status.st_uid} alone: {path}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        yield Finding(
            "folder",
            PROBLEM,
            f"{path.parent} cannot be written by this process: SQLite makes its journal there",
            "let all who use the leases write both, file and folder",
        )


def _boot_clock(has_clock: bool) -> Finding:
    if has_clock:
        text = "in use: setting the time of day changes nothing"
        return Finding("clock since boot", OK, text)
    return Finding(
        "clock since boot",
        NOTE,
        "this system has none that tells one boot from another: each process goes by its own "
        "observation",
    )


def file_system(path: Path) -> str:
    """Return the kind of the file system that ``path`` is on, where the system tells (Linux)."""
    try:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace")
        real = os.path.realpath(path)
    except OSError:
        return ""
    found, longest = "", -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # What is mounted later hides what was mounted there before, hence "at least as long".
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            found, longest = fields[2], len(point)
    return found
