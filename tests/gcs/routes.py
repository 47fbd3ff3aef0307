"""What a URL asks for: the kind of operation, the bucket and the object, decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

_ON_OBJECTS = {"GET": "metadata", "PATCH": "patch", "PUT": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class Route:
    """An operation of the JSON API.

    Attributes:
        kind: as the log has it.
        bucket: the bucket.
        name: the object; of a list the prefix; of a write what the query says, if it does.
        plain: whether errors are bare text there.
        pairs: the query's parameters, decoded, in order.
    """

    kind: str
    bucket: str = ""
    name: str = ""
    plain: bool = False
    pairs: Sequence[tuple[str, str]] = field(default=())

    @property
    def query(self) -> Mapping[str, str]:
        return dict(reversed(self.pairs))  # of a repeated parameter the first


def route(method: str, target: str) -> Route:
    """Read a request line. A slash that stands bare in a name makes it ``unknown``: no client
    of the service sends one, and what was meant cannot be told."""
    path, _, query = target.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    parts = path.split("/")[1:]
    service = parts[0] if parts and parts[0] in ("upload", "download") else ""
    if service:
        parts = parts[1:]
    if parts[:3] != ["storage", "v1", "b"] or len(parts) < 4 or not parts[3]:
        return Route("unknown", pairs=pairs)
    bucket, rest = unquote(parts[3]), parts[4:]
    name = unquote(rest[1]) if rest[:1] == ["o"] and len(rest) == 2 else ""
    given = dict(reversed(pairs))

    kind = "unknown"
    if service == "upload":
        if method == "POST" and rest == ["o"]:
            kind, name = "write", given.get("name", "")
    elif name:
        media = method == "GET" and given.get("alt") == "media"
        kind = "read" if media else _ON_OBJECTS.get(method, "unknown")
    elif method == "GET" and not service:
        if rest == ["o"]:
            kind, name = "list", given.get("prefix", "")
        elif not rest:
            kind = "bucket"
        elif rest == ["iam", "testPermissions"]:
            kind = "permissions"
    return Route(kind, bucket, name, plain=kind == "read", pairs=pairs)
