"""The machine's clock since its boot, and which boot that is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol


class BootClock(Protocol):
    """What :class:`~tako_sync.backends.sqlite.SqliteLease` needs of a machine's clocks."""

    def identity(self) -> str | None:
        """Return what two processes have in common exactly if their clock is one; or None."""
        ...

    def since_boot(self) -> float:
        """Return seconds; they go on while the machine is suspended."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970."""
        ...


class SystemBootClock:
    """``CLOCK_BOOTTIME`` under the kernel's boot id and the process's time namespace.

    Linux has them. Elsewhere there is no identity, so that no two moments are compared.
    """

    def __init__(self) -> None:
        self._identity = _identity()

    def identity(self) -> str | None:
        return self._identity

    def since_boot(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.clock_gettime(time.CLOCK_REALTIME)


def _identity() -> str | None:
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        namespace = "one"  # a kernel without time namespaces
    return f"{boot} {namespace}"
