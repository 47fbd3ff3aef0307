"""What holds for every test: nothing of the user's is touched, and nothing is left running."""

from __future__ import annotations

import _thread
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tako_sync import runtime

settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "search",  # HYPOTHESIS_PROFILE=search: other examples each time, and many more
    deadline=None,
    max_examples=5_000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

PATIENCE = 5.0
"""Real seconds that a thread has to end after its test. Enough for a busy machine: a thread
that ends at all ends in a fraction of it."""


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """Fail a test after which a thread lives that was not there before."""
    known = set(threading.enumerate())
    count = _thread._count()  # counts those too that no Thread object stands for
    yield
    until = time.monotonic() + PATIENCE
    while (left := set(threading.enumerate()) - known) or _thread._count() > count:
        if time.monotonic() >= until:
            pytest.fail(f"left running after the test: {_described(left)}", pytrace=False)
        time.sleep(0.002)


def _described(threads: set[threading.Thread]) -> str:
    if not threads:
        return "a thread that was started without a Thread object"
    # Python 3.11 deadlocks where a collection strikes inside _current_frames and meets a
    # threading.local: no signal, and so no timeout, gets through to it then.
    gc.disable()
    frames = sys._current_frames()
    gc.enable()
    lines: list[str] = []
    for thread in sorted(threads, key=lambda thread: thread.name):
        frame = frames.get(thread.ident or 0)
        where = "".join(traceback.format_stack(frame)) if frame is not None else ""
        lines.append(f"\n{thread.name}\n{where}")
    return "".join(lines)


@pytest.fixture(autouse=True)
def nothing_of_the_user_is_touched(
    nothing_is_left_running: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Give each test an environment without settings, a state folder and a binding of its own."""
    for variable in list(os.environ):
        if variable.startswith("TAKO_") or variable in runtime._SEVERAL_MACHINES:
            monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    # --- The binding of this process: what is set once and kept is put back here ---
    with runtime.rebound(None):
        yield
