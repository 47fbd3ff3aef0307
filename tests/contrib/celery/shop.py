"""The tasks of a shop, for workers and beats: each under a lease, each told of in a journal."""

from __future__ import annotations

import os
import time
from pathlib import Path

from billiard.exceptions import SoftTimeLimitExceeded

import tako_sync
from contrib.celery.broker import application
from contrib.celery.programs import TTL
from contrib.journal import Journal
from tako_sync.contrib.celery import leased

folder = Path(os.environ["SHOP_FOLDER"])
app = application("shop", folder)
journal = Journal(folder / "journal")
tako_sync.configure(
    app="shop",
    env="test",
    backend=f"sqlite:///{folder}/leases.sqlite3",
    policy=tako_sync.LeasePolicy(ttl=TTL, poll=0.1, restart=0.2),
)
if os.environ.get("SHOP_USES_IT_AT_IMPORT"):
    kept = tako_sync.Lock("at-import").hold()
    kept.__enter__()  # and never gives it back


def work(seconds: float) -> int:
    with journal.body():
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))
    return os.getpid()


@app.task
@leased("reindex")
def reindex(seconds: float = 0.05) -> int:
    return work(seconds)


@app.task
@leased("reindex", busy="skip")
def skipping(seconds: float = 0.05) -> int:
    return work(seconds)


@app.task
@leased("reindex", busy="retry", countdown=0.2, max_retries=200)
def coming_again(seconds: float = 0.05) -> int:
    return work(seconds)


@app.task
@leased("reindex", busy="wait", timeout=30)
def patient(seconds: float = 0.05) -> int:
    return work(seconds)


@app.task
@leased("reindex", on_shutdown="cancel")
def draining() -> str:
    with journal.body():
        ctx = tako_sync.current_ctx()
        while not ctx.wait(0.05):
            pass
    return type(ctx.cause).__name__


@app.task(acks_late=True, reject_on_worker_lost=True)
@leased("reindex")
def late(seconds: float) -> int:
    return work(seconds if not journal.all("killed") else 0.01)


@app.task
@leased("reindex")
def cut_short(seconds: float) -> str:
    """Unwind where the soft limit strikes, and answer as if nothing had been."""
    try:
        work(seconds)
    except SoftTimeLimitExceeded:
        return "cut short"
    return "done"


@app.task
def ticked(entry: str) -> None:
    journal.write("tick", entry=entry)


app.conf.worker_lost_wait = 0.1  # less than a ttl: a message comes again before its lease is free
app.conf.beat_max_loop_interval = 0.2
app.conf.beat_schedule = {
    "often": {"task": ticked.name, "schedule": 0.5, "args": ("often",)},
}
