"""The log of what a server was asked: requests as values, and exact counts of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

Predicate = Callable[["Request"], bool]
SHOWN: Final = 200
"""The last requests that the log shows to people: a storm has tens of thousands."""


@dataclass
class Request:
    """One request, and what became of it.

    Attributes:
        number: its place in the life of the server, from 1.
        method: of HTTP.
        target: the path and query exactly as they came over the wire.
        kind: ``write``, ``read``, ``metadata``, ``patch``, ``delete``, ``list``, ``bucket``,
            ``permissions``, or ``unknown`` for what the server does not speak.
        bucket: the bucket that was named.
        name: the object's name, decoded; the prefix of a list.
        query: its parameters, decoded, the first of each name.
        headers: with names in lower case.
        body: what a write stores.
        port: of the client's end of the connection.
        at: when it came, on the server's monotonic clock.
        status: what it was answered; None if it was not, or not yet.
        outcome: ``pending``, ``answered``, ``reset``, ``dropped``, ``cut``, ``abandoned`` (the
            server was closed meanwhile) or ``unheard`` (the client had gone).
        committed: whether it has changed what is stored.
        generation: of the object after a write that was committed.
        fault: the fault that met it.
    """

    number: int
    method: str
    target: str
    kind: str
    bucket: str
    name: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    port: int = 0
    at: float = 0.0
    status: int | None = None
    outcome: str = "pending"
    committed: bool = False
    generation: int | None = None
    fault: str = ""

    @property
    def generation_match(self) -> int | None:
        """The generation that it asks for with ``ifGenerationMatch``."""
        text = self.query.get("ifGenerationMatch")
        return None if text is None else int(text)

    @property
    def document(self) -> Mapping[str, Any]:
        """The JSON object that a write stores; empty if it is none."""
        try:
            document = json.loads(self.body)
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    def matches(self, kind: str, name: str) -> bool:
        """Whether it is of a kind (``*`` is any) and its name fits a pattern."""
        return kind in ("*", self.kind) and fnmatchcase(self.name, name)

    def __repr__(self) -> str:
        asked = " ".join(
            f"{key}={value}"
            for key, value in self.query.items()
            if key.startswith("if") or key == "generation"
        )
        came = self.outcome if self.outcome != "answered" else str(self.status)
        parts = [f"#{self.number} {self.kind} {self.name!r}", asked, f"-> {came}"]
        parts += ["committed" if self.committed else "", self.fault and f"by {self.fault}"]
        return "<" + " ".join(filter(None, [*parts, f"from :{self.port}"])) + ">"


class Log:
    """The requests of a server, in the order in which they came. Safe to read at any time."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._number = 0
        self._changed = threading.Condition()

    def opened(self, request: Request) -> None:
        """Add a request that has come, and give it its number."""
        with self._changed:
            self._number += 1
            request.number = self._number
            self._requests.append(request)
            self._changed.notify_all()

    def closed(self, request: Request, outcome: str, status: int | None = None) -> None:
        """Note what became of it; the first word stands."""
        with self._changed:
            if request.outcome == "pending":
                request.outcome, request.status = outcome, status
            self._changed.notify_all()

    def requests(self, kind: str = "*", name: str = "*") -> Sequence[Request]:
        """Return the requests so far, of a kind and with names that fit a pattern."""
        with self._changed:
            return [request for request in self._requests if request.matches(kind, name)]

    def count(self, kind: str = "*", name: str = "*", when: Predicate = lambda _: True) -> int:
        """Return how many of them there are; a request counts from its arrival on."""
        return sum(map(when, self.requests(kind, name)))

    def clear(self) -> None:
        """Forget all requests."""
        with self._changed:
            self._requests.clear()

    def wait(self, until: Callable[[Log], bool], timeout: float) -> None:
        """Wait until something is true of the log.

        Raises:
            AssertionError: it has not become so in time; with the whole log.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: until(self), timeout):
                raise AssertionError(f"not within {timeout:g} s:\n{self}")

    def __str__(self) -> str:
        requests = self.requests()
        lines = [repr(request) for request in requests[-SHOWN:]]
        if len(requests) > SHOWN:
            lines.insert(0, f"... {len(requests) - SHOWN} before")
        return "\n".join(lines) or "no requests"
