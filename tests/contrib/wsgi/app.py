"""A Flask application for servers: a view under a lease, loops, and what a test wants to know."""

from __future__ import annotations

import os
import time
from typing import Any

import flask

import tako_sync
from contrib.journal import Journal
from tako_sync.contrib.flask import Tako

TTL = float(os.environ.get("SHOP_TTL", "3"))
journal = Journal(os.environ["SHOP_JOURNAL"])
app = flask.Flask(__name__)
app.config["TAKO_POLICY"] = tako_sync.LeasePolicy(ttl=TTL, poll=0.1, restart=0.2)
tako = Tako(app)
relock = tako_sync.Lock("reindex")


def work(seconds: float) -> dict[str, object]:
    with journal.body():
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))
    return {"pid": os.getpid()}


@app.get("/alive")
def alive() -> dict[str, object]:
    return {"pid": os.getpid()}


@app.post("/reindex")
@tako.guard(relock)
def reindex() -> flask.typing.ResponseReturnValue:
    return work(float(flask.request.form.get("seconds", "0.05")))


@app.post("/patient")
@tako.guard(relock, timeout=30)
def patient() -> flask.typing.ResponseReturnValue:
    return work(0.01)


@app.post("/plain")
def plain() -> dict[str, object]:
    ran, value = relock.try_do(lambda ctx: work(0.05))
    return {"started": ran, "value": value}


def use_it_before_the_fork() -> None:
    """As an application does that reads its state at import."""
    with app.app_context():
        relock.try_do(lambda ctx: None)


@app.post("/inherited")
def inherited() -> dict[str, object]:
    """Leave, in a worker, a block that the master has entered."""
    hold, ctx = masters[0]
    try:
        hold.__exit__(None, None, None)
    except (tako_sync.LeaseLostError, tako_sync.UsageError):
        pass  # the latter: this worker has left it before
    ran, _ = relock.try_do(lambda ctx: None)
    return {"cancelled": ctx.cancelled, "ran": ran}


masters: list[tuple[Any, tako_sync.Ctx]] = []
if os.environ.get("SHOP_HOLDS_IT_AT_IMPORT"):
    with app.app_context():
        kept = relock.hold()
        masters.append((kept, kept.__enter__()))
if os.environ.get("SHOP_USES_IT_AT_IMPORT"):
    use_it_before_the_fork()
