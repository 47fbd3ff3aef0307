"""What ``doctor`` looks at in a lease file: where it lies, who may write it, and its clock."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tako_sync.findings import NOTE, OK, PROBLEM, Finding

_NETWORK: Final = frozenset(
    (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "ceph",
        "glusterfs",
        "lustre",
        "afs",
        "fuse.sshfs",
        "fuse.gcsfuse",
        "fuse.s3fs",
        "virtiofs",
        "vboxsf",
        "prl_fs",
    )
)
_LITTLE: Final = 50 * 1024 * 1024
"""Bytes."""


def examine(path: Path, has_clock: bool) -> Iterator[Finding]:
    """Look at the file and the folder it is in."""
    kind = _file_system(path)
    if kind in _NETWORK:
        yield Finding(
            PROBLEM,
            f"{path} is on a file system of a network or a host ({kind}), whose locks are not to "
            "be relied on: two processes may hold one lease",
            "put the file on the machine's own disk, or use gs://bucket",
        )
    try:
        free = shutil.disk_usage(path.parent).free
        mode = path.stat().st_mode
    except OSError as error:
        yield Finding(NOTE, f"the file cannot be looked at: {error}")
        return
    if free < _LITTLE:
        yield Finding(NOTE, f"{free // 2**20} MiB are left on its disk", "make room")
    if mode & 0o002:
        yield Finding(
            NOTE,
            f"everybody on this machine may write {path}, and so free, hold or block every lease",
            f"chmod o-w {path}",
        )
    elif not mode & 0o020:
        yield Finding(OK, f"only user {path.stat().st_uid} may write {path}")
    else:
        yield Finding(OK, f"user and group of {path} may write it; so must they its folder")
    if not os.access(path.parent, os.W_OK):
        yield Finding(
            PROBLEM,
            f"the folder {path.parent} cannot be written by this process: SQLite makes its journal "
            "there",
            "let all who use the leases write both",
        )
    yield Finding(
        OK if has_clock else NOTE,
        "its clock is the machine's since boot: setting the time of day changes nothing"
        if has_clock
        else "this system has no clock since boot with the boot's identity: each process goes by "
        "its own observation",
    )


def _file_system(path: Path) -> str:
    """Return the kind of the file system that ``path`` is on, where the system tells (Linux)."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
        real = os.path.realpath(path)
    except OSError:
        return ""
    found, longest = "", -1
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            found, longest = kind, len(point)
    return found
