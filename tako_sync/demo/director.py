"""The director of the demo: starts the workers, gives orders, kills, stops, and judges."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict, deque
from pathlib import Path
from queue import Empty, SimpleQueue

from tako_sync.abc import ABSENT, Absent, Version
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.clock import SystemClock
from tako_sync.demo.index import Index, sources
from tako_sync.demo.timeline import Report, Timeline
from tako_sync.errors import BackendUnavailableError
from tako_sync.policy import LeasePolicy

_PATIENCE = 60.0
"""Seconds without the awaited report after which the demo has failed."""

_LINES = {
    "ready": "is there",
    "begin": "holds the lease (fence {fence}) and begins to rebuild",
    "collapsed": "finds it held: nothing to do",
    "midway": "is in mid-rebuild",
    "killed": "is killed (SIGKILL)",
    "stopped": "is stopped (SIGSTOP), as a suspended or starved process is",
    "resumed": "is resumed (SIGCONT)",
    "refused": "writes late: the index refuses fence {fence}",
    "lost": "finds itself cancelled: its lease was lost ({reason})",
    "end": "has rebuilt {pages} pages and gives the lease back",
}


class Director:
    """Plays the three acts and returns the exit status: 0 if all was as promised."""

    def __init__(self, folder: Path, scratch: Path, policy: LeasePolicy) -> None:
        self._folder = folder
        self._scratch = scratch
        self._policy = policy
        self._clock = SystemClock()
        self._index = Index(scratch / "index.sqlite3")
        self._timeline = Timeline()
        self._reports: SimpleQueue[Report] = SimpleQueue()
        self._unread: defaultdict[str, deque[Report]] = defaultdict(deque)
        self._killed: set[str] = set()
        self._workers: dict[str, subprocess.Popen[str]] = {}
        self._began = self._clock.monotonic()

    def play(self) -> int:
        pages = len(sources(self._folder))
        print(f"Four processes, one lease, one full-text index of {self._folder} ({pages} pages).")
        print(
            f"The ttl is {self._policy.ttl:g} s here, so that you need not wait; in real life it is"
        )
        print("30 s. Times are in seconds since the start.\n")
        self._index.create()
        try:
            for number in range(1, 5):
                self._hire(f"worker {number}")
            self._await("ready", 4)
            self._act_one()
            self._act_two()
            self._act_three()
        except Empty:
            print(f"\nNo worker reported what was awaited, for {_PATIENCE:g} s.")
            return 1
        except ChildProcessError as error:
            print(f"\n{error}")
            return 1
        finally:
            self._dismiss()
        return self._verdict(pages)

    # --- The acts

    def _act_one(self) -> None:
        print("\nAll four are asked at once to rebuild. One runs; three collapse into it.")
        for name in self._workers:
            self._order(name, "try")
        holder = self._await("midway")["who"]
        self._await("collapsed", 3)
        self._order(holder, "go on")
        self._await("end")

    def _act_two(self) -> None:
        print("\nAll wait for their turn, and the first is killed in mid-rebuild.")
        for name in self._workers:
            self._order(name, "do")
        holder = self._await("midway")["who"]
        self._note("killed", holder)
        self._killed.add(holder)
        self._workers[holder].kill()
        self._workers[holder].wait()
        self._await_turns(3)

    def _act_three(self) -> None:
        others = [name for name, worker in self._workers.items() if worker.poll() is None]
        print("\nAnother is stopped past its ttl while the next takes over, and resumed.")
        for name in others[:2]:
            self._order(name, "do")
        holder = self._await("midway")["who"]
        self._stop(holder)
        try:
            self._await_turns(1)
        finally:
            self._note("resumed", holder)
            self._workers[holder].send_signal(signal.SIGCONT)
        self._await("lost")

    def _stop(self, holder: str) -> None:
        """Stop a worker, but not in the midst of a write to the lease file.

        It would keep the file locked, and the others out, until it goes on: true, and stated in
        the limits of SQLite storage, but not what this act shows.
        """
        storage = SqliteLease(self._scratch / "leases.sqlite3")
        version: Version | Absent = ABSENT
        while True:
            self._workers[holder].send_signal(signal.SIGSTOP)
            try:
                storage.write("probe", b"", expect=version, timeout=self._policy.ttl / 8)
            except BackendUnavailableError:
                self._workers[holder].send_signal(signal.SIGCONT)
            else:
                break
        storage.close()
        self._note("stopped", holder)

    def _await_turns(self, turns: int) -> None:
        for _ in range(turns):
            self._order(self._await("midway")["who"], "go on")
            self._await("end")

    # --- The verdict

    def _verdict(self, pages: int) -> int:
        line = self._timeline
        runs, overlap = line.runs(), line.overlap()
        takeover = line.between("killed", "begin")
        bound = self._policy.ttl + self._policy.jittered(self._policy.poll, 1.0)
        print("\nVerdict")
        verdicts: list[tuple[bool, str]] = [
            (len(runs) == 7, f"{len(runs)} bodies ran, each a rebuild of its own (7 expected)"),
            (
                line.count("collapsed") == 3,
                (
                    f"{line.count('collapsed')} of 4 asked at once "
                    "collapsed into the one that ran (3 expected)"
                ),
            ),
            (overlap == 0, f"{overlap:.3f} s in which two bodies ran with a live context"),
            (line.fences_rise(), f"fences, in order: {', '.join(str(run.fence) for run in runs)}"),
            (
                line.count("lost") == 1,
                f"{line.count('lost')} stopped holder found itself cancelled",
            ),
            (
                line.count("refused") == 1,
                f"{line.count('refused')} late write refused by its fence",
            ),
            (self._index.count() == pages, f"{self._index.count()} of {pages} pages in the index"),
        ]
        for good, text in verdicts:
            print(f"  {'ok ' if good else 'BAD'} {text}")
        if takeover is not None:
            print(f"      takeover {takeover:.2f} s after the kill (ttl + one poll: {bound:.2f} s)")
        good = all(good for good, _ in verdicts)
        print("\nAll as promised." if good else "\nNot as promised.")
        return 0 if good else 1

    # --- The workers

    def _hire(self, name: str) -> None:
        command = [sys.executable, "-m", "tako_sync.demo.worker", name]
        command += [str(self._scratch / "leases.sqlite3"), str(self._scratch / "index.sqlite3")]
        command += [str(self._folder), str(self._policy.ttl), str(self._policy.poll)]
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
        )
        self._workers[name] = worker
        threading.Thread(target=self._listen, args=(name, worker), daemon=True).start()

    def _listen(self, name: str, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            self._reports.put(json.loads(line))
        self._reports.put({"at": self._clock.monotonic(), "who": name, "what": "gone"})

    def _order(self, name: str, order: str) -> None:
        stdin = self._workers[name].stdin
        assert stdin is not None
        stdin.write(f"{order}\n")
        stdin.flush()

    def _await(self, what: str, times: int = 1) -> Report:
        """Wait until ``what`` has been reported so often anew; return the last of these."""
        while len(self._unread[what]) < times:
            report = self._reports.get(timeout=_PATIENCE)
            self._tell(report)
            self._unread[report["what"]].append(report)
            if report["what"] == "gone" and report["who"] not in self._killed:
                raise ChildProcessError(f"{report['who']} ended, and was not told to.")
        for _ in range(times - 1):
            self._unread[what].popleft()
        return self._unread[what].popleft()

    def _note(self, what: str, who: str) -> None:
        self._tell({"at": self._clock.monotonic(), "who": who, "what": what})

    def _tell(self, report: Report) -> None:
        self._timeline.add(report)
        if report["what"] in _LINES:
            text = _LINES[report["what"]].format(**report)
            print(f"{report['at'] - self._began:7.2f}  {report['who']}  {text}", flush=True)

    def _dismiss(self) -> None:
        for worker in self._workers.values():
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.kill()
            worker.wait()
            worker.stdin.close()


def _environment() -> dict[str, str]:
    """Let the workers import what this process imports, also from a checkout."""
    paths = [path for path in sys.path if path] or [os.getcwd()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
