"""HTTP/1.1 over one connection: requests in, answers out, and the ways to tear it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

HEAD_LIMIT: Final = 64 * 1024
Hold = Callable[[threading.Event, float], None]


class BadRequestError(Exception):
    """What came is not HTTP as clients of the service speak it."""


@dataclass(frozen=True)
class Pace:
    """How slowly to send: ``size`` bytes, then ``interval`` seconds, until ``until`` is set."""

    size: int
    interval: float
    until: threading.Event


@dataclass(frozen=True)
class Incoming:
    """A request as it came."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    keep: bool


class Connection:
    """One accepted connection. It is read and written by one thread; anyone may tear it."""

    def __init__(self, sock: socket.socket, port: int) -> None:
        self._socket = sock
        self.port = port
        self._pending = bytearray()
        with contextlib.suppress(OSError):  # where the client has gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> Incoming | None:
        """Return the next request; None if there is none.

        Raises:
            BadRequestError: it cannot be read; the connection is of no further use.
        """
        while (end := self._pending.find(b"\r\n\r\n")) < 0:
            if len(self._pending) > HEAD_LIMIT:
                raise BadRequestError("the head is too long")
            if not self._more():
                return None
        head = self._pending[:end].decode("latin-1")
        del self._pending[: end + 4]
        first, *lines = head.split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise BadRequestError(f"not a request line: {first!r}")
        headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise BadRequestError(f"not a header: {line!r}")
            headers[name.strip().lower()] = value.strip()
        if "transfer-encoding" in headers:
            raise BadRequestError("a body in chunks: the client that is tested sends none")
        length = headers.get("content-length", "0")
        if not length.isdigit():
            raise BadRequestError(f"not a length: {length!r}")
        if headers.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self._pending) < int(length):
            if not self._more():
                return None
        body = bytes(self._pending[: int(length)])
        del self._pending[: int(length)]
        keep = words[2] == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        return Incoming(words[0], words[1], headers, body, keep)

    def send(self, data: bytes, pace: Pace | None = None, hold: Hold | None = None) -> None:
        """Send ``data``, at a pace if there is one; ``hold`` waits between two drops."""
        while pace is not None and hold is not None and data and not pace.until.is_set():
            self._socket.sendall(data[: pace.size])
            data = data[pace.size :]
            hold(pace.until, pace.interval)
        self._socket.sendall(data)

    def reset(self) -> None:
        """End it with a reset rather than in good order; to be called by its own thread."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def shut(self) -> None:
        """End it in good order: whoever reads or writes it is woken. It is not yet closed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and give the descriptor back; to be called by its own thread."""
        self.shut()
        self._socket.close()

    def forget(self) -> None:
        """Close a forked child's copy of the descriptor, which ends nothing."""
        self._socket.close()

    def _more(self) -> bool:
        try:
            data = self._socket.recv(256 * 1024)
        except OSError:
            return False
        self._pending += data
        return bool(data)
