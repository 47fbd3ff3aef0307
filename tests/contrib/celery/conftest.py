from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import tako_sync
from contrib.celery.programs import Shop
from contrib.program import PATIENCE
from contrib.servers import free_port


@pytest.fixture
def in_memory() -> None:
    """Keep the leases of tasks and schedulers in this process."""
    tako_sync.configure(app="shop", env="test", backend="memory:")


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    yield shop
    shop.close()


@pytest.fixture
def on_redis(tmp_path: Path) -> Iterator[None]:
    """Have the shop's messages go over a Redis of this test's own. Name it before ``shop``."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("redis-server is not installed")
    port = free_port()
    command = [server, "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as client:
            until = time.monotonic() + PATIENCE
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    assert process.poll() is None and time.monotonic() < until
                    time.sleep(0.02)
        (tmp_path / "broker").write_text(f"redis://127.0.0.1:{port}/0")
        yield
    finally:
        process.kill()
        process.wait(PATIENCE)
