"""A server of one bucket in this process: strict, threaded, and able to fail on demand.

    with GCSServer(bucket="b") as server:
        server.faults.add(Fault("write", Drop(), name="leases/*"))
        ...  # clients go to server.url
        assert server.count("write", "leases/x") == 2

Do not fork while it runs in the parent if connections are to be reset or closed: the child
holds copies of them for a moment. Run it as a process for that (``gcs.process``).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from email.utils import formatdate
from types import TracebackType
from typing import Any

from . import control, uploads
from .actions import Ending, Reply, Torn
from .answers import Answer, Refusal
from .api import Api, new_bucket
from .faults import Faults
from .log import Log, Predicate, Request
from .objects import Objects, Stored
from .options import Options
from .routes import Route, route
from .wire import BadRequestError, Connection, Incoming

_servers: weakref.WeakSet[GCSServer] = weakref.WeakSet()


class _Abandoned(BaseException):
    """The server is being closed: the request ends here, unapplied if it was not applied."""


class GCSServer:
    """Serves from its making until :meth:`close`, after which none of its threads is left.

    Args:
        bucket: the name of the one bucket.
        port: 0 is any that is free.
        wall: seconds since 1970.
        monotonic: for the interval between writes and the log.
        seed: of random generations.
        options: fields of :class:`~gcs.options.Options`, to start with.

    Attributes:
        url: where it is: what clients take as their endpoint.
        bucket: the name of the bucket.
        metadata: of the bucket, as it answers them.
        options: how it behaves; change them.
        faults: what fails.
        log: what was asked.
        connections: how many connections have been accepted.
    """

    def __init__(
        self,
        bucket: str = "bucket",
        *,
        port: int = 0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.bucket = bucket
        self.options = Options()
        self.set(**options)
        self.faults = Faults()
        self.log = Log()
        self.connections = 0
        self._wall = wall
        self._monotonic = monotonic
        self._objects = Objects(bucket, self.options, wall, monotonic, seed)
        self.metadata = new_bucket(bucket, wall())
        self._api = Api(self._objects, self.options, self.metadata)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._open: dict[threading.Thread, Connection] = {}
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self._wake, self._woken = socket.socketpair()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name=f"gcs {self.url}", daemon=True)
        _servers.add(self)
        self._acceptor.start()

    # --- For tests -----------------------------------------------------------------------

    def set(self, **options: Any) -> None:
        """Change options: ``server.set(date_shift=-60, send_last_modified=False)``."""
        self.options.set(options)

    def describe(self, **metadata: Any) -> None:
        """Change the bucket's metadata: ``server.describe(versioning={"enabled": True})``."""
        self.metadata.update(metadata)

    def forget(self) -> None:
        """Empty the log."""
        self.log.clear()

    def put(self, name: str, body: bytes, **properties: Any) -> Stored:
        """Store an object as someone else would: no request, no log, no rate."""
        return self._objects.put(name, body, properties)

    def object(self, name: str) -> Stored | None:
        """Return what is stored under a name, or None."""
        return self._objects.peek(name)

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        self._objects.delete(name)

    def requests(self, kind: str = "*", name: str = "*") -> Sequence[Request]:
        """Return the requests so far, of a kind and with names that fit a pattern."""
        return self.log.requests(kind, name)

    def count(self, kind: str = "*", name: str = "*", when: Predicate = lambda _: True) -> int:
        """Return how many there are; a request counts from its arrival on."""
        return self.log.count(kind, name, when)

    def wait(self, until: Callable[[], bool], timeout: float = 10) -> None:
        """Wait until something is true, looked at whenever a request comes or ends.

        Raises:
            AssertionError: it has not become so in time; with the whole log.
        """
        self.log.wait(lambda log: until(), timeout)

    def __enter__(self) -> GCSServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GCSServer {self.url} {self.bucket}\n{self.log}>"

    # --- Its life ------------------------------------------------------------------------

    def close(self) -> None:
        """End all that it does. Requests that stand in a fault are abandoned, unapplied."""
        self._closing.set()
        self.faults.close()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._acceptor.join()
        with self._lock:
            left = dict(self._open)
        for connection in left.values():
            connection.shut()
        for thread in left:
            thread.join()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                selector.select()
                if self._closing.is_set():
                    return
                try:
                    sock, address = self._listener.accept()
                except OSError:  # it has gone again
                    continue
                connection = Connection(sock, address[1])
                name = f"gcs {self.url} from {connection.port}"
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name=name, daemon=True
                )
                with self._lock:
                    self.connections += 1
                    self._open[thread] = connection
                thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            while not self._closing.is_set() and self._next(connection):
                pass
        except (OSError, _Abandoned):
            pass
        finally:
            connection.close()
            with self._lock:
                del self._open[threading.current_thread()]

    def _next(self, connection: Connection) -> bool:
        """Answer one request; return whether there may be another one."""
        try:
            incoming = connection.receive()
        except BadRequestError as error:
            answer = Refusal(400, "badRequest", str(error)).answer(plain=True)
            connection.send(answer.encoded(self._date()))
            return False
        if incoming is None:
            return False
        if incoming.target.startswith("/_"):
            answer = control.answer(self, incoming)
            connection.send(answer.encoded(self._date()))
            return incoming.keep
        return _Exchange(self, connection, incoming).run()

    def _date(self) -> str | None:
        options = self.options
        if not options.send_date:
            return None
        return formatdate(self._wall() + options.clock_shift + options.date_shift, usegmt=True)

    def _forget(self) -> None:
        """In a forked child: close the copies of the descriptors. The parent serves on."""
        for connection in [*self._open.values()]:
            connection.forget()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()


class _Exchange:
    """One request and its answer."""

    def __init__(self, server: GCSServer, connection: Connection, incoming: Incoming) -> None:
        self._server = server
        self._connection = connection
        self._incoming = incoming
        self._route: Route = route(incoming.method, incoming.target)
        self._upload: uploads.Upload | None = None
        self._damaged: Refusal | None = None
        self.plain = self._route.plain
        name, body = self._route.name, incoming.body
        if self._route.kind == "write":
            try:
                self._upload = uploads.read(self._route.query, incoming.headers, body)
                name, body = self._upload.name, self._upload.body
            except Refusal as refusal:
                self._damaged = refusal
        self.request = Request(
            number=0,
            method=incoming.method,
            target=incoming.target,
            kind=self._route.kind,
            bucket=self._route.bucket,
            name=name,
            query=self._route.query,
            headers=incoming.headers,
            body=body,
            port=connection.port,
            at=server._monotonic(),
        )

    def hold(self, until: threading.Event, seconds: float | None = None) -> None:
        if not self._server.faults.hold(self.request, until, seconds):
            raise _Abandoned

    def run(self) -> bool:
        """Carry it out and answer; return whether the connection may be used again."""
        server, request = self._server, self.request
        server.log.opened(request)
        try:
            if server.options.delay:
                self.hold(threading.Event(), server.options.delay)
            fault = server.faults.take(request)
            if fault is None:
                ending = self._proceed()
            else:
                request.fault = repr(fault.action)
                ending = fault.action.act(self, self._proceed)
            return self._end(ending)
        finally:
            server.faults.done(request)
            server.log.closed(request, "abandoned" if server._closing.is_set() else "unheard")

    def _proceed(self) -> Ending:
        try:
            if self._damaged is not None:
                raise self._damaged
            answer = self._server._api.carry_out(self.request, self._route, self._upload)
        except Refusal as refusal:
            answer = refusal.answer(plain=self.plain)
        return Reply(answer)

    def _end(self, ending: Ending) -> bool:
        # The log is closed before the client can know: whoever has the answer finds it there.
        log, connection = self._server.log, self._connection
        if isinstance(ending, Torn):
            log.closed(self.request, ending.value)
            if ending is Torn.RESET:
                connection.reset()
            return False
        answer: Answer = ending.answer
        data = answer.encoded(self._server._date())
        if ending.cut is not None:
            log.closed(self.request, "cut", answer.status)
            connection.send(data[: ending.cut], ending.pace, self.hold)
            return False
        if ending.pace is None:
            log.closed(self.request, "answered", answer.status)
        connection.send(data, ending.pace, self.hold)
        log.closed(self.request, "answered", answer.status)
        return self._incoming.keep


def _after_fork_in_child() -> None:
    for server in list(_servers):
        server._forget()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
