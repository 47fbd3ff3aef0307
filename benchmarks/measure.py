"""Timing competitors side by side."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping


def side_by_side(
    competitors: Mapping[str, Callable[[], object]], *, rounds: int = 40, batch: int = 50
) -> None:
    """Time the competitors in turn, batch by batch, and print microseconds for one call."""
    for call in competitors.values():
        for _ in range(batch):
            call()
    times: dict[str, list[float]] = {name: [] for name in competitors}
    gc.collect()
    for _ in range(rounds):
        for name, call in competitors.items():
            began = time.perf_counter()
            for _ in range(batch):
                call()
            times[name].append((time.perf_counter() - began) / batch * 1e6)
    for name, values in times.items():
        print(f"{name:32} median {statistics.median(values):8.0f} us   best {min(values):8.0f} us")


def percentile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of ``values`` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
