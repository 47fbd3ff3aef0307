"""What an import costs over bare Python's start."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

PROGRAMS = {
    "bare Python": "pass",
    "import tako_sync": "import tako_sync",
    "... and a Lock": "import tako_sync; tako_sync.Lock('a')",
    "... and a try_do on memory": (
        "import tako_sync; tako_sync.configure(backend='memory:');"
        "tako_sync.Lock('a').try_do(lambda ctx: None)"
    ),
}


def run() -> None:
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(11):
        for name, program in PROGRAMS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            times[name].append((time.perf_counter() - began) * 1e3)
    bare = statistics.median(times["bare Python"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:32} median {median:6.0f} ms   over bare {median - bare:6.0f} ms")
