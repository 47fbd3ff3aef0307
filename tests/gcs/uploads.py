"""What an upload carries: the bytes, and what its sender says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .answers import Refusal, unsupported


@dataclass(frozen=True)
class Upload:
    """An upload, read.

    Attributes:
        name: of the object.
        body: its bytes.
        properties: the metadata that its sender sets, without the name.
    """

    name: str
    body: bytes
    properties: Mapping[str, Any]


def read(query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> Upload:
    """Read an upload of type ``multipart`` or ``media``.

    Raises:
        Refusal: it is of another type, or is damaged.
    """
    kind = query.get("uploadType", "")
    content_type = headers.get("content-type", "application/octet-stream")
    if kind == "media":
        return Upload(query.get("name", ""), body, {"contentType": content_type})
    if kind != "multipart":
        raise unsupported(f"uploadType={kind or 'nothing'}: send multipart or media")

    boundary = re.search(r'boundary="?([^";]+)"?', content_type)
    if boundary is None:
        raise Refusal(400, "badContent", "Missing multipart boundary.")
    # The delimiter is a line of its own: what looks like it inside a line is content.
    mark = b"\r\n--" + boundary[1].encode("latin-1")
    pieces = (b"\r\n" + body).split(mark)
    if len(pieces) != 4 or not pieces[3].startswith(b"--"):
        raise Refusal(400, "badContent", "A multipart upload has two parts.")
    try:
        _, text = _part(pieces[1])
        part_type, content = _part(pieces[2])
        metadata = json.loads(text)
    except ValueError:
        raise Refusal(400, "parseError", "Parse Error") from None
    if not isinstance(metadata, dict):
        raise Refusal(400, "parseError", "Parse Error")
    name = str(metadata.pop("name", query.get("name", "")))
    return Upload(name, content, {"contentType": part_type, **metadata})


def _part(piece: bytes) -> tuple[str, bytes]:
    """Return a part's content type and its bytes."""
    head, blank, content = piece.partition(b"\r\n\r\n")
    if not blank:
        raise ValueError("a part without an empty line")
    kind = re.search(rb"(?im)^content-type:[ \t]*(.*?)\r?$", head)
    return (kind[1].decode("latin-1") if kind else "application/octet-stream"), content
