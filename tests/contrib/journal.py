"""A file in which the bodies of several processes tell when they began and ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tako_sync.clock import SystemClock
from tako_sync.ctx import current_ctx

clock: Final = SystemClock()  # one for all processes of a machine
PATIENCE: Final = 40.0


class Journal:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, what: str, **facts: Any) -> None:
        line = json.dumps({"what": what, "pid": os.getpid(), "at": clock.monotonic(), **facts})
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(file, line.encode() + b"\n")  # one write: lines never mix
        finally:
            os.close(file)

    @contextmanager
    def body(self) -> Iterator[None]:
        """Tell the beginning and the end of what runs under a lease."""
        ctx = current_ctx()
        fence = ctx.fence
        self.write("begin", fence=fence, deadline=clock.monotonic() + ctx.remaining())
        try:
            yield
        finally:
            self.write("end", fence=fence, cancelled=ctx.cancelled)

    @property
    def lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def all(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["what"] == what]

    def expect(self, what: str, count: int = 1) -> dict[str, Any]:
        """Wait until there are so many lines of a kind; return the last of them."""
        until = time.monotonic() + PATIENCE
        while len(found := self.all(what)) < count:
            assert time.monotonic() < until, f"no {what!r} in {self.lines}"
            time.sleep(0.02)
        return found[count - 1]

    def never_two_at_once(self) -> None:
        """Bodies began in the order of their fences, each after the one before had ended.

        Of one that was killed there is no end, and whoever comes next has waited for its ttl.
        """
        running: dict[int, dict[str, Any]] = {}
        last = 0
        for line in self.lines:
            if line["what"] == "begin":
                assert not running, f"{line} began while {running} ran"
                assert line["fence"] > last
                last = line["fence"]
                running[last] = line
            elif line["what"] == "end":
                running.pop(line["fence"], None)
            elif line["what"] == "killed":
                running.clear()
