"""The schemas that Google publishes of its interfaces, as JSON Schema: strict on unknown fields.

They come with google-api-python-client, as the discovery documents of each interface.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import googleapiclient  # type: ignore[import-untyped]
import jsonschema

_DOCUMENTS = Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"


def check(manifest: object, interface: str, schema: str) -> None:
    """Raise ``jsonschema.ValidationError`` unless ``manifest`` is a ``schema`` of ``interface``."""
    jsonschema.Draft7Validator(
        {"$ref": f"#/definitions/{schema}", "definitions": _schemas(interface)}
    ).validate(manifest)


def described(interface: str, schema: str, field: str) -> str:
    """Return what is said of a field."""
    return str(_document(interface)["schemas"][schema]["properties"][field]["description"])


@functools.cache
def _document(interface: str) -> dict[str, Any]:
    return dict(json.loads((_DOCUMENTS / f"{interface}.json").read_text()))


@functools.cache
def _schemas(interface: str) -> dict[str, Any]:
    schemas = _document(interface)["schemas"]
    return {name: _strict(schema) for name, schema in schemas.items()}


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return {"$ref": f"#/definitions/{schema['$ref']}"}
    made: dict[str, Any] = {
        key: schema[key] for key in ("type", "enum") if key in schema and schema[key] != "any"
    }
    if schema.get("readOnly"):
        return {"not": {}}
    if "items" in schema:
        made["items"] = _strict(schema["items"])
    if "properties" in schema:
        made["properties"] = {name: _strict(inner) for name, inner in schema["properties"].items()}
        made["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = _strict(schema["additionalProperties"])
    return made
