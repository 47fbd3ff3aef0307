"""The gallery behind Flask: ``python -m gallery.with_flask [PORT]``."""

from __future__ import annotations

import sys
from typing import Any

import flask

from gallery.reindex import PAGE, rebuilds, reindex
from tako_sync.contrib.flask import Tako

app = flask.Flask("gallery")
app.config["TAKO_APP"] = "gallery"
tako = Tako(app)


@app.get("/")
def page() -> str:
    return PAGE


@app.get("/ledger")
def ledger() -> dict[str, Any]:
    return {"rebuilds": rebuilds()}


@app.post("/reindex")
def press() -> dict[str, Any]:
    return reindex()


if __name__ == "__main__":
    app.run(port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
