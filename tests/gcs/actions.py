"""What may happen to a request, as values.

An action is called with the request's exchange and with ``proceed``, which has the request
carried out and returns how it would have ended: so it may act before that, after, or instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Protocol, cast

from .answers import Answer, Refusal
from .log import Request
from .objects import crc32c, md5
from .wire import Pace


class Torn(Enum):
    """How a connection may end instead of an answer."""

    RESET = "reset"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Reply:
    """An answer on its way.

    Attributes:
        answer: what is sent.
        pace: how slowly; None is at once.
        cut: close after so many bytes of head and body.
    """

    answer: Answer
    pace: Pace | None = None
    cut: int | None = None


Ending = Reply | Torn
Proceed = Callable[[], Ending]


class Exchange(Protocol):
    """What an action may know and use of the request that it meets."""

    request: Request
    plain: bool
    """Whether errors are bare text here, as at the download endpoint."""

    def hold(self, until: threading.Event, seconds: float | None = None) -> None:
        """Wait for ``until``, within reach of ``faults.release`` and of the server's end."""


class Action(Protocol):
    def act(self, exchange: Exchange, proceed: Proceed) -> Ending: ...


class _Short:
    """Shows the fields that are not what they are by default: the log is read by people."""

    def __repr__(self) -> str:
        shown = [
            f"{item.name}={getattr(self, item.name)!r}"
            for item in fields(cast(Any, self))
            if item.repr and getattr(self, item.name) != item.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Pass(_Short):
    """Let it pass: in front of a fault, to choose the request that the next one meets."""

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        return proceed()


@dataclass(frozen=True, repr=False)
class Status(_Short):
    """Answer with an error, before the request is carried out or after it.

    Attributes:
        code: the status.
        reason: ``errors[0].reason``; the usual one of the status if empty.
        message: ``{object}`` in it stands for bucket and name.
        retry_after: the header's text.
        after: carry the request out first: it is committed, and its client is told otherwise.
    """

    code: int
    reason: str = ""
    message: str = ""
    retry_after: str = ""
    after: bool = False

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        if self.after:
            proceed()
        request = exchange.request
        message = self.message.replace("{object}", f"{request.bucket}/{request.name}")
        headers = {"Retry-After": self.retry_after} if self.retry_after else {}
        refusal = Refusal(self.code, self.reason, message, headers=headers)
        return Reply(refusal.answer(plain=exchange.plain))


@dataclass(frozen=True, repr=False)
class Reset(_Short):
    """Reset the connection (RST), before the request is carried out or after it."""

    after: bool = False

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        if self.after:
            proceed()
        return Torn.RESET


@dataclass(frozen=True, repr=False)
class Drop(_Short):
    """Close the connection without an answer, after the request is carried out or before it."""

    after: bool = True

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        if self.after:
            proceed()
        return Torn.DROPPED


@dataclass(frozen=True, repr=False)
class Stall(_Short):
    """Stand still until released, before the request is carried out or after it.

    A client that has given up meanwhile changes nothing: what was to be applied is applied
    when the stall ends, unless the server is closed, which applies nothing any more.

    Attributes:
        seconds: how long at most.
        after: carry the request out first.
        arrived: set once a request stands here.
        until: set by :meth:`release`, ``faults.release()`` and the server's end.
    """

    seconds: float | None = None
    after: bool = False
    arrived: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)
    until: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    def release(self) -> None:
        """Let go those who stand here and all who come."""
        self.until.set()

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        if not self.after:
            self._stand(exchange)
            return proceed()
        ending = proceed()
        self._stand(exchange)
        return ending

    def _stand(self, exchange: Exchange) -> None:
        self.arrived.set()
        exchange.hold(self.until, self.seconds)


@dataclass(frozen=True, repr=False)
class Drip(_Short):
    """Carry it out, then send the answer drop by drop; once released, the rest at once.

    Attributes:
        size: bytes of a drop.
        interval: seconds between two.
        arrived: set once the first drop is about to be sent.
        until: as of :class:`Stall`.
    """

    size: int = 1
    interval: float = 0.1
    arrived: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)
    until: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    def release(self) -> None:
        self.until.set()

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        ending = proceed()
        if isinstance(ending, Torn):
            return ending
        self.arrived.set()
        return replace(ending, pace=Pace(self.size, self.interval, self.until))


@dataclass(frozen=True, repr=False)
class Cut(_Short):
    """Carry it out, send the first ``size`` bytes of the answer, head included, and close."""

    size: int

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        ending = proceed()
        return ending if isinstance(ending, Torn) else replace(ending, cut=self.size)


@dataclass(frozen=True, repr=False)
class Substitute(_Short):
    """Carry it out, then answer something else in its place.

    Attributes:
        body: what a client gets to see. Its checksums are right unless ``corrupt``.
        status: None keeps the one of the true answer.
        content_type: None keeps that of the true answer.
        corrupt: keep the checksums of the true body, as where bytes are damaged on the way.
    """

    body: str
    status: int | None = None
    content_type: str | None = None
    corrupt: bool = False

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        ending = proceed()
        if isinstance(ending, Torn):
            return ending
        body = self.body.encode()
        headers = dict(ending.answer.headers)
        if "X-Goog-Hash" in headers and not self.corrupt:
            headers["X-Goog-Hash"] = f"crc32c={crc32c(body)},md5={md5(body)}"
        if self.content_type is not None:
            headers["Content-Type"] = self.content_type
        status = self.status or ending.answer.status
        return replace(ending, answer=Answer(status, body, headers))


@dataclass(frozen=True, repr=False)
class Both(_Short):
    """Two actions on one request: the outer one sees the inner one's ending as the true one."""

    outer: Action
    inner: Action

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        return self.outer.act(exchange, lambda: self.inner.act(exchange, proceed))
