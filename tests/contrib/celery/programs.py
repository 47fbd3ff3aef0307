"""Workers and beats as processes of their own, for ``with`` blocks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Final

from celery import Celery
from celery.result import AsyncResult

from contrib.celery.broker import application
from contrib.journal import Journal
from contrib.program import PATIENCE, Program
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

TTL: Final = 3.0


class Part(Program):
    """``celery -A contrib.celery.shop`` with further arguments."""

    def __init__(self, folder: Path, *arguments: str, **environ: str) -> None:
        command = [sys.executable, "-m", "celery", "-A", "contrib.celery.shop", *arguments]
        super().__init__(command, {"SHOP_FOLDER": str(folder), **environ}, folder)

    def says(self, what: str) -> None:
        """Wait until its log has ``what``."""
        until = time.monotonic() + PATIENCE
        while what not in self.log:
            assert self.process.poll() is None and time.monotonic() < until, self.log
            time.sleep(0.05)


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

    def worker(self, pool: str, count: int = 4, *more: str, **environ: str) -> Part:
        arguments = [*more]
        arguments += ["-P", pool, "-c", str(count), "-l", "INFO"]
        arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        return Part(self.folder, "worker", *arguments, **environ)

    def beat(self, number: int) -> Part:
        return Part(
            self.folder, "beat", "-S", "tako_sync.contrib.celery.beat:LeasedScheduler",
            "-l", "INFO", f"--pidfile={self.folder}/beat-{number}.pid",
        )  # fmt: skip

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        return self.app.send_task(f"contrib.celery.shop.{task}", args, **options)

    def close(self) -> None:
        self.app.close()
        self.leases.close()
