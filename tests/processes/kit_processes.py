"""Worker processes for tests: orders go in as lines, reports come out as JSON lines.

Import it as ``from processes.kit_processes import Crew`` (pytest's ``pythonpath`` names the
folder above). A worker runs one function of a test module, ``work(post, *arguments)``.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from attrs import define

from tako_sync.backends.sqlite import SqliteLease
from tako_sync.clock import SystemClock
from tako_sync.ctx import Ctx
from tako_sync.events import Event
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime
from tako_sync.testing.faults import Call, FaultyBackend, Proceed

Report = dict[str, Any]

PATIENCE: Final = 40.0
"""Real seconds after which a report that has not come will not come."""
clock: Final = SystemClock()  # one for all processes of a machine


# --- In a worker -------------------------------------------------------------------------


class Post:
    """A worker's way to the test that started it; its forked children share it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def report(self, what: str, ctx: Ctx | None = None, **facts: Any) -> None:
        """Tell the test. With ``ctx``, also its fence and until when it is assured."""
        at = clock.monotonic()
        if ctx is not None:
            facts.update(fence=ctx.fence, deadline=at + ctx.remaining())
        report = {"at": at, "who": self.name, "pid": os.getpid(), "what": what, **facts}
        os.write(1, json.dumps(report).encode() + b"\n")  # one write: lines never mix

    def order(self) -> str:
        """Wait for the next order; ends the process if the test is gone."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(0, 1)
            if not byte:
                os._exit(0)
            line += byte
        return line.decode().strip()

    def tell(self, event: Event) -> None:
        """Report an event of a binding: to be given as a listener."""
        facts = {name: getattr(event, name) for name in ("fence", "how") if hasattr(event, name)}
        self.report(type(event).__name__, lease=event.lease, **facts)

    @contextmanager
    def running(self, ctx: Ctx) -> Iterator[Ctx]:
        """Report the beginning and the end of a body, for :func:`overlap`."""
        self.report("begin", ctx)
        try:
            yield ctx
        finally:
            self.report("end", fence=ctx.fence, cancelled=ctx.cancelled)

    def runtime(self, path: str, ttl: float, poll: float) -> Runtime:
        """Return a binding on a file, all of whose requests and events are reported."""
        storage = FaultyBackend(SqliteLease(path), clock)
        storage.always("*", self._note)
        policy = LeasePolicy(ttl=ttl, poll=poll)
        return Runtime(
            storage, app="shop", env="test", policy=policy, clock=clock, listeners=[self.tell]
        )

    def lock(self, path: str, ttl: float, poll: float = 0.1, name: str = "reindex") -> Lock:
        return Lock(name).bound_to(self.runtime(path, ttl, poll))

    def _note(self, call: Call, proceed: Proceed) -> Any:
        state, owner = call.document.get("state"), call.document.get("owner")
        self.report("request", op=call.op, key=call.key, state=state, owner=owner)
        return proceed()


# --- In the test -------------------------------------------------------------------------


class Worker:
    """A process that runs a function of a test module, with all that it has reported."""

    def __init__(self, function: Callable[..., object], name: str, arguments: list[Any]) -> None:
        self.name = name
        code = function.__code__
        command = [sys.executable, "-m", "processes.kit_processes"]
        command += [code.co_filename, code.co_name, name, json.dumps(arguments)]
        paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *sys.path])},
            start_new_session=True,  # a group of its own, to be ended with its forked children
        )
        self.pid = self.process.pid
        self.errors = ""
        self._reports: list[Report] = []
        self._read = 0  # those that expect() has gone over
        self._news = threading.Condition()
        self._ended = False
        self._ears = [
            threading.Thread(target=listen, name=f"{name}'s ear", daemon=True)
            for listen in (self._listen, self._listen_to_errors)
        ]
        for ear in self._ears:
            ear.start()

    @property
    def reports(self) -> list[Report]:
        with self._news:
            return list(self._reports)

    def all(self, what: str) -> list[Report]:
        return [report for report in self.reports if report["what"] == what]

    def expect(self, what: str) -> Report:
        """Wait for the next report of this kind, after the one expected before."""
        until = time.monotonic() + PATIENCE
        with self._news:
            while True:
                while self._read < len(self._reports):
                    report = self._reports[self._read]
                    self._read += 1
                    if report["what"] == what:
                        return report
                left = until - time.monotonic()
                if self._ended or left <= 0:
                    break
                self._news.wait(left)
        raise AssertionError(self._complaint(f"did not report {what!r}"))

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order.encode() + b"\n")
        self.process.stdin.flush()

    def send(self, number: int) -> float:
        """Send a signal; return when."""
        self.process.send_signal(number)
        return clock.monotonic()

    def ends(self) -> int:
        """Wait for the process, and its last report; return its exit status."""
        status = self.process.wait(PATIENCE)
        for ear in self._ears:
            ear.join(PATIENCE)
            assert not ear.is_alive(), "somebody else keeps the worker's pipes open"
        return status

    def ends_well(self) -> None:
        status = self.ends()
        assert status == 0, self._complaint(f"ended with status {status}")

    def clean_up(self) -> None:
        if self.process.poll() is None or any(ear.is_alive() for ear in self._ears):
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(PATIENCE)
        for ear in self._ears:
            ear.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._reports.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _listen_to_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read().decode()

    def _complaint(self, what: str) -> str:
        told = "\n".join(str(report) for report in self.reports[-30:])
        if self._ended:
            self._ears[1].join(1)
        return f"{self.name} {what}; it said:\n{told}\n{self.errors}"


class Crew:
    """The workers of one test; none outlives its ``with`` block."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    def start(
        self, function: Callable[..., object], *arguments: Any, name: str | None = None
    ) -> Worker:
        """Start a process that runs ``function(post, *arguments)``."""
        worker = Worker(function, name or f"worker {len(self.workers)}", list(arguments))
        self.workers.append(worker)
        return worker

    @property
    def reports(self) -> list[Report]:
        """All reports of all workers, in the order of their stamps."""
        found = itertools.chain.from_iterable(worker.reports for worker in self.workers)
        return sorted(found, key=lambda report: float(report["at"]))

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self.workers:
            worker.clean_up()


# --- What follows from the reports -------------------------------------------------------


@define
class Run:
    """One body: the stretch in which its ctx was not cancelled."""

    who: str
    fence: int
    began: float
    ended: float


def runs(reports: list[Report]) -> list[Run]:
    """Return the bodies that were reported, in the order of their beginnings.

    A body that ended uncancelled believed in its lease until then. One that was stopped or
    killed, or found itself cancelled, may have done so until the deadline it told last.
    """
    found: dict[int, Run] = {}
    for report in reports:
        what, fence = report["what"], report.get("fence", 0)
        if what == "begin":
            assert fence not in found, f"fence {fence} was granted twice"
            found[fence] = Run(report["who"], fence, report["at"], report["deadline"])
        elif what == "step":
            found[fence].ended = report["deadline"]
        elif what == "end":
            run = found[fence]
            run.ended = min(run.ended, report["at"]) if report["cancelled"] else report["at"]
    return sorted(found.values(), key=lambda run: run.began)


def check_order(reports: list[Report]) -> list[Run]:
    """Fail if two bodies overlapped or a fence did not rise; return the runs."""
    found = runs(reports)
    for one, other in itertools.pairwise(found):
        assert one.ended <= other.began, f"{one} and {other} overlap"
        assert one.fence < other.fence, f"the fence fell from {one} to {other}"
    return found


def _main(file: str, function: str, name: str, arguments: str) -> None:
    # The test's module is loaded from its file: how pytest calls it does not matter.
    spec = importlib.util.spec_from_file_location("worker", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker"] = module
    spec.loader.exec_module(module)
    getattr(module, function)(Post(name), *json.loads(arguments))


if __name__ == "__main__":
    _main(*sys.argv[1:])
