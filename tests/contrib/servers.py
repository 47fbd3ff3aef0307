"""Real servers for tests: started on a free port, asked over HTTP, gone at the end of the test.

Import it as ``from contrib.servers import Server`` (the folder above is on the path).
"""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attrs import frozen

from contrib.program import PATIENCE, Program


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


class Server(Program):
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
        super().__init__(
            [part.replace("{port}", str(self.port)) for part in command], environ, folder
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

    def __enter__(self) -> Server:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                if self.get(self._alive).status == 200:
                    return self
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > until:
                error = AssertionError(f"the server does not answer; it said:\n{self.log}")
                self.__exit__(None, None, None)
                raise error
            time.sleep(0.05)
