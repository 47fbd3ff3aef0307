"""``python -m benchmarks [name ...]``: run all benchmarks, or those named."""

from __future__ import annotations

import os
import platform
import sys

from benchmarks import acquire, handover, heartbeat, herd, imports, waiters

BENCHMARKS = {
    "acquire": acquire.run,
    "handover": handover.run,
    "heartbeat": heartbeat.run,
    "waiters": waiters.run,
    "herd": herd.run,
    "import": imports.run,
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
        return 2
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"Python {platform.python_version()}, {platform.system()}, {os.cpu_count()} cores{load}")
    for name in names or list(BENCHMARKS):
        print(f"\n== {name}")
        BENCHMARKS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
