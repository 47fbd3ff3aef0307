"""The health endpoint of a process that serves nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from tako_sync.abc import Clock
from tako_sync.vigil import Health

HEALTH: Final = "/health"
"""Is the loop up anywhere? For people and monitors."""
LIVE: Final = "/live"
"""Does this process do its part? For whoever restarts it: another one's failure, or the storage's,
is no reason."""
_PATIENCE: Final = 5.0
"""Seconds for one request."""

log: Final = logging.getLogger("tako_sync")


@contextmanager
def endpoint(port: int, health: Callable[[], Health], clock: Clock) -> Iterator[int]:
    """Answer ``GET /health`` and ``GET /live``, 200 or 503 with a JSON body, for a ``with`` block.

    Neither sends a request to the storage. All else is 404.

    Args:
        port: on all interfaces, as Cloud Run wants it; 0: any free one.
        health: what is told.
        clock: whose thread serves.

    Yields:
        the port.

    Raises:
        OSError: the port cannot be had.
    """

    class Handler(_Handler):
        told = staticmethod(health)

    server = _Server(("", port), Handler)
    serving = clock.spawn(server.serve_forever, "tako-health")
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Called where the error is handled.
        log.debug("a request for this process's health failed", exc_info=True)  # noqa: LOG014


class _Handler(BaseHTTPRequestHandler):
    told: Callable[[], Health]
    timeout = _PATIENCE
    server_version = "tako-sync"
    sys_version = ""

    def do_GET(self) -> None:
        health = self.told()
        path = self.path.partition("?")[0]
        if path == HEALTH:
            self._answer(bool(health), health)
        elif path == LIVE:
            self._answer(health.alive, health)
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815 - as http.server calls it

    def _answer(self, well: bool, health: Health) -> None:
        body = json.dumps({"state": health.state, "reason": health.reason}).encode() + b"\n"
        self.send_response(200 if well else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as it is named there
        log.debug("health: " + format, *args)  # noqa: G003 - the format is the server's
