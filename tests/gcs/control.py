"""The server's own API, under ``/_``, for tests in other processes; and its values as JSON.

``POST /_faults`` (a list), ``GET``, ``DELETE``; ``POST /_release``; ``GET`` and ``POST
/_options``; ``GET`` and ``DELETE /_log``; ``POST /_bucket``; ``GET``, ``PUT`` and ``DELETE
/_objects/NAME``; ``GET /_state``. Nothing here is logged or meets a fault.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from . import actions
from .actions import Action, Both
from .answers import Answer, Refusal, of_json
from .faults import Fault
from .log import Request
from .objects import Stored
from .wire import Incoming

if TYPE_CHECKING:
    from .server import GCSServer

_ACTIONS: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        actions.Pass,
        actions.Status,
        actions.Reset,
        actions.Drop,
        actions.Stall,
        actions.Drip,
        actions.Cut,
        actions.Substitute,
    )
}
_EVENTS: Final = ("arrived", "until")


def answer(server: GCSServer, incoming: Incoming) -> Answer:
    """Answer a request to the server itself."""
    try:
        return _answer(server, incoming)
    except (ValueError, TypeError, KeyError) as error:
        return Refusal(400, "invalid", f"{type(error).__name__}: {error}").answer(plain=False)


def _answer(server: GCSServer, incoming: Incoming) -> Answer:
    what, _, name = incoming.target.partition("?")[0][2:].partition("/")
    name = unquote(name)
    order = f"{incoming.method} {what}"
    if order == "PUT objects":
        return of_json(of_stored(server.put(name, incoming.body)))
    if order == "GET objects":
        stored = server.object(name)
        return of_json(None if stored is None else of_stored(stored))
    if order == "DELETE objects":
        server.delete(name)
        return of_json({})

    sent = json.loads(incoming.body or b"null")
    if order == "POST faults":
        server.faults.add(*map(to_fault, sent))
    elif order == "DELETE faults":
        server.faults.clear()
    elif order == "POST release":
        server.faults.release()
    elif order == "POST options":
        server.set(**sent)
    elif order == "POST bucket":
        server.describe(**sent)
    elif order == "DELETE log":
        server.forget()
    elif order == "GET log":
        return of_json([of_request(request) for request in server.requests()])
    elif order == "GET state":
        state = {"url": server.url, "bucket": server.bucket, "connections": server.connections}
        return of_json(state)
    elif order not in ("GET faults", "GET options"):
        raise ValueError(f"no such order: {order}")
    if what == "options":
        return of_json(asdict(server.options))
    return of_json([of_fault(fault) for fault in server.faults.left])


# --- Values as JSON ----------------------------------------------------------------------


def of_fault(fault: Fault) -> dict[str, Any]:
    """Return a fault as JSON. A ``when`` that is Python code cannot travel, and is left out."""
    action = of_action(fault.action)
    return {"on": fault.on, "action": action, "name": fault.name, "times": fault.times}


def to_fault(document: Mapping[str, Any]) -> Fault:
    given = {key: value for key, value in document.items() if key in ("on", "name", "times")}
    return Fault(action=to_action(document["action"]), **given)


def of_action(action: Action) -> dict[str, Any]:
    """Return an action as JSON: its class's name as ``kind``, and its fields but for events."""
    if isinstance(action, Both):
        both = {"outer": of_action(action.outer), "inner": of_action(action.inner)}
        return {"kind": "Both", **both}
    kind = type(action).__name__
    names = [item.name for item in fields(_ACTIONS[kind]) if item.name not in _EVENTS]
    return {"kind": kind, **{name: getattr(action, name) for name in names}}


def to_action(document: Mapping[str, Any]) -> Action:
    given = dict(document)
    kind = given.pop("kind")
    if kind == "Both":
        return Both(to_action(given["outer"]), to_action(given["inner"]))
    if kind not in _ACTIONS:
        raise ValueError(f"no action {kind!r}: there are {sorted(_ACTIONS)} and Both")
    action: Action = _ACTIONS[kind](**given)
    return action


def of_request(request: Request) -> dict[str, Any]:
    return {**asdict(request), "body": base64.b64encode(request.body).decode()}


def to_request(document: Mapping[str, Any]) -> Request:
    return Request(**{**document, "body": base64.b64decode(document["body"])})


def of_stored(stored: Stored) -> dict[str, Any]:
    return {**asdict(stored), "body": base64.b64encode(stored.body).decode()}


def to_stored(document: Mapping[str, Any]) -> Stored:
    return Stored(**{**document, "body": base64.b64decode(document["body"])})
