"""An application with a Singleton and a Cron, which each worker of a server starts."""

from __future__ import annotations

import os

import flask

import tako_sync
from contrib.journal import Journal
from every import Every
from tako_sync.contrib.flask import Tako
from tako_sync.runner import Runner

journal = Journal(os.environ["SHOP_JOURNAL"])
ticks = Journal(os.environ["SHOP_TICKS"])
app = flask.Flask(__name__)
app.config["TAKO_POLICY"] = tako_sync.LeasePolicy(ttl=3, poll=0.1, restart=0.2)
tako = Tako(app)


@tako_sync.Singleton
def invoicer(ctx: tako_sync.Ctx) -> None:
    with journal.body():
        while not ctx.wait(0.05):
            pass


def _swept(ctx: tako_sync.Ctx) -> None:
    ticks.write("tick", slot=str(sweep.last()))
    with ticks.body():
        ctx.wait(0.005)


sweep = tako_sync.Cron("* * * * *", _swept, tako_sync.CronConfig(singleflight=True))
sweep.schedule = Every(1)
app.register_blueprint(tako.health([invoicer]))


@app.get("/alive")
def alive() -> dict[str, object]:
    return {"pid": os.getpid()}


def start() -> list[Runner]:
    with app.app_context():
        return [invoicer.start(), sweep.start()]


def stop(runners: list[Runner]) -> None:
    for runner in runners:
        runner.stop(timeout=0)
    for runner in runners:
        runner.wait(20)
