"""Workers and beats as processes of their own, for ``with`` blocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from celery import Celery
from celery.result import AsyncResult

from contrib.celery.broker import application
from contrib.journal import Journal
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

PATIENCE: Final = 40.0
TTL: Final = 3.0
_TESTS: Final = Path(__file__).parents[2]


class Program:
    """``celery -A contrib.celery.shop`` with further arguments, in its own session."""

    def __init__(self, folder: Path, *arguments: str, **environ: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        paths = os.pathsep.join([str(_TESTS), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "contrib.celery.shop", *arguments],
            env={**os.environ, "PYTHONPATH": paths, "SHOP_FOLDER": str(folder), **environ},
            cwd=folder,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def says(self, what: str) -> None:
        """Wait until its log has ``what``."""
        until = time.monotonic() + PATIENCE
        while what not in self.log:
            assert self.process.poll() is None and time.monotonic() < until, self.log
            time.sleep(0.05)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        return self.process.wait(PATIENCE)

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            sys.stderr.write(self.log)  # pytest shows it beside the failure
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(PATIENCE)
        self._log.close()


class Shop:
    """What a test sees of the shop: it sends tasks, and looks at leases and the journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.app: Celery = application("client", folder)
        self.journal = Journal(folder / "journal")
        self.leases = SqliteLease(folder / "leases.sqlite3")
        policy = LeasePolicy(ttl=TTL, poll=0.1)
        self.runtime = Runtime(self.leases, app="shop", env="test", policy=policy)
        self.relock = Lock("reindex").bound_to(self.runtime)

    def worker(self, pool: str, count: int = 4, *more: str, **environ: str) -> Program:
        arguments = [*more]
        arguments += ["-P", pool, "-c", str(count), "-l", "INFO"]
        arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        return Program(self.folder, "worker", *arguments, **environ)

    def beat(self, number: int) -> Program:
        return Program(
            self.folder, "beat", "-S", "tako_sync.contrib.celery.beat:LeasedScheduler",
            "-l", "INFO", f"--pidfile={self.folder}/beat-{number}.pid",
        )  # fmt: skip

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        return self.app.send_task(f"contrib.celery.shop.{task}", args, **options)

    def close(self) -> None:
        self.app.close()
        self.leases.close()
