"""Real servers for tests: started on a free port, asked over HTTP, gone at the end of the test.

Import it as ``from contrib.servers import Server`` (the folder above is on the path).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from attrs import frozen

PATIENCE: Final = 40.0
"""Real seconds after which an answer that has not come will not come."""
_TESTS: Final = Path(__file__).parents[1]


@frozen
class Answer:
    """What a server has answered."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, method: str = "GET", **fields: object) -> Answer:
    """Send a request; fields make it a form."""
    data = urllib.parse.urlencode(fields).encode() if fields or method == "POST" else None
    request = urllib.request.Request(url, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return Answer(answer.status, dict(answer.headers), answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read().decode())


class Server:
    """A server's process, and its children, for a ``with`` block.

    Args:
        command: of which ``{port}`` is replaced.
        environ: added to this process's.
        alive: the path that answers once it is up.
        folder: where it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: dict[str, str],
        *,
        alive: str = "/alive",
        folder: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._alive = alive
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        paths = [str(_TESTS), str(_TESTS.parent / "docs" / "examples"), *sys.path]
        self.process = subprocess.Popen(
            [part.replace("{port}", str(self.port)) for part in command],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ},
            cwd=folder,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def get(self, path: str) -> Answer:
        return ask(self.url + path)

    def post(self, path: str, **fields: object) -> Answer:
        return ask(self.url + path, "POST", **fields)

    def post_at_once(self, path: str, times: int, **fields: object) -> list[Answer]:
        """Send that many requests from as many threads, which start together."""
        gate = threading.Barrier(times)

        def go(_number: int) -> Answer:
            gate.wait(PATIENCE)
            return self.post(path, **fields)

        with ThreadPoolExecutor(times) as pool:
            return list(pool.map(go, range(times)))

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        return self.process.wait(PATIENCE)

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def __enter__(self) -> Server:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                if self.get(self._alive).status == 200:
                    return self
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > until:
                log = self.log
                self._clean_up()
                raise AssertionError(f"the server does not answer; it said:\n{log}")
            time.sleep(0.05)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            sys.stderr.write(self.log)  # pytest shows it beside the failure
        self._clean_up()

    def _clean_up(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(PATIENCE)
        self._log.close()
