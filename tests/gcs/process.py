"""The server as a process of its own, with what a test has of the one in its own process.

with GCSProcess(bucket="b") as server:
    server.faults.add(Fault("write", Status(503), times=None))
    ...  # forked clients go to server.url
    server.faults.release()
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import quote, urlsplit

from . import control
from .faults import Fault
from .log import Predicate, Request
from .objects import Stored

_TESTS: Final = Path(__file__).parents[1]
PATIENCE: Final = 30.0
"""Real seconds for an answer of a server that is there."""


class Remote:
    """A server in another process, reached by its URL. Each call is a connection of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.faults = RemoteFaults(self)

    @property
    def bucket(self) -> str:
        return str(self.call("GET", "state")["bucket"])

    @property
    def connections(self) -> int:
        """How many have been accepted, those of these calls included."""
        return int(self.call("GET", "state")["connections"])

    def set(self, **options: Any) -> None:
        """Change options, as of :class:`~gcs.options.Options`."""
        self.call("POST", "options", options)

    def describe(self, **metadata: Any) -> None:
        """Change the bucket's metadata."""
        self.call("POST", "bucket", metadata)

    def put(self, name: str, body: bytes) -> Stored:
        return control.to_stored(self.call("PUT", f"objects/{quote(name, safe='')}", body))

    def object(self, name: str) -> Stored | None:
        document = self.call("GET", f"objects/{quote(name, safe='')}")
        return None if document is None else control.to_stored(document)

    def delete(self, name: str) -> None:
        self.call("DELETE", f"objects/{quote(name, safe='')}")

    def requests(self, kind: str = "*", name: str = "*") -> Sequence[Request]:
        requests = map(control.to_request, self.call("GET", "log"))
        return [request for request in requests if request.matches(kind, name)]

    def count(self, kind: str = "*", name: str = "*", when: Predicate = lambda _: True) -> int:
        return sum(map(when, self.requests(kind, name)))

    def forget(self) -> None:
        """Empty the log."""
        self.call("DELETE", "log")

    def call(self, method: str, order: str, sent: Any = None) -> Any:
        """Give an order of :mod:`gcs.control`; return what comes back.

        Raises:
            ValueError: it was refused.
        """
        body = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE)
        try:
            connection.request(method, f"/_{order}", body)
            response = connection.getresponse()
            document = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(document["error"]["message"])
        return document


class RemoteFaults:
    """The faults of a server in another process. A fault's ``when`` cannot travel there, and
    its events are not shared: :meth:`release` lets go whatever stands."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def add(self, *faults: Fault) -> None:
        self._remote.call("POST", "faults", [control.of_fault(fault) for fault in faults])

    def clear(self) -> None:
        self._remote.call("DELETE", "faults")

    def release(self) -> None:
        self._remote.call("POST", "release")

    @property
    def left(self) -> Sequence[Fault]:
        return [control.to_fault(document) for document in self._remote.call("GET", "faults")]


class GCSProcess(Remote):
    """A server started for as long as the block runs. It ends with its starter in any case.

    Args:
        bucket: the name of the one bucket.
        options: fields of :class:`~gcs.options.Options`, to start with.
    """

    def __init__(self, bucket: str = "bucket", **options: Any) -> None:
        command = [sys.executable, "-m", "gcs", "--bucket", bucket]
        path = os.pathsep.join(filter(None, [str(_TESTS), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [*command, "--options", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdout is not None
        url = self._process.stdout.readline().decode().strip()
        if not url:
            self.close()
            raise RuntimeError(f"the server did not start: {self._process.returncode}")
        super().__init__(url)

    def close(self) -> None:
        """End the process."""
        # It may be gone, and a forked child may hold its standard input open: so not by that.
        self._process.terminate()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(PATIENCE)

    def __enter__(self) -> GCSProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
