"""One uncontended hold, beside filelock and redis-py."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import redis

from benchmarks.measure import side_by_side
from tako_sync.backends import MemoryLease, SqliteLease
from tako_sync.lock import Lock
from tako_sync.runtime import Runtime


def run() -> None:
    with tempfile.TemporaryDirectory() as folder, _redis(Path(folder)) as client:
        memory = Lock("bench").bound_to(Runtime(MemoryLease()))
        sqlite = Lock("bench").bound_to(Runtime(SqliteLease(Path(folder) / "leases.sqlite3")))
        file_lock = filelock.FileLock(Path(folder) / "bench.lock")

        def hold_file_lock() -> None:
            with file_lock.acquire(blocking=False):
                pass

        competitors: dict[str, Callable[[], object]] = {
            "tako try_do, memory": lambda: memory.try_do(_body),
            "filelock": hold_file_lock,
        }
        if client is not None:
            redis_lock = client.lock("bench", timeout=30)

            def hold_redis_lock() -> None:
                redis_lock.acquire(blocking=False)
                redis_lock.release()

            competitors["redis-py Lock, loopback"] = hold_redis_lock
        side_by_side(competitors)
        side_by_side({"tako try_do, sqlite (durable)": lambda: sqlite.try_do(_body)}, rounds=10)


def _body(ctx: object) -> None:
    pass


@contextmanager
def _redis(folder: Path) -> Iterator[redis.Redis | None]:
    binary = shutil.which("redis-server")
    if binary is None:
        print("(redis-py is left out: there is no redis-server on the path)")
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(port=port)
        for _ in range(100):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        yield client
    finally:
        server.terminate()
        server.wait()
