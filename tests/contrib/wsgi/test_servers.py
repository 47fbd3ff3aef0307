"""Views under a lease in real servers: one body at a time, whatever becomes of its worker."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from contrib.journal import Journal
from contrib.program import PATIENCE
from contrib.servers import Server
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no such servers here")

BIN = Path(sys.executable).parent
TTL = 3.0
GUNICORN = [str(BIN / "gunicorn"), "contrib.wsgi.app:app", "-b", "127.0.0.1:{port}"]
GUNICORN += ["--graceful-timeout", "20", "--log-level", "warning"]
SERVERS = {
    "gunicorn, sync": [*GUNICORN, "-w", "4"],
    "gunicorn, sync, preloaded": [*GUNICORN, "-w", "4", "--preload"],
    "gunicorn, threads": [*GUNICORN, "-w", "2", "-k", "gthread", "--threads", "4"],
    "gunicorn, threads, preloaded": [
        *GUNICORN, "-w", "2", "-k", "gthread", "--threads", "4", "--preload",
    ],
    "gunicorn, gevent": [*GUNICORN, "-w", "2", "-k", "gevent"],
    "gunicorn, gevent, preloaded": [*GUNICORN, "-w", "2", "-k", "gevent", "--preload"],
    "waitress": [
        str(BIN / "waitress-serve"), "--host=127.0.0.1", "--port={port}", "--threads=8",
        "contrib.wsgi.app:app",
    ],
    "uwsgi": [
        str(BIN / "pyuwsgi"), "--http-socket=127.0.0.1:{port}", "--master", "--processes=4",
        "--enable-threads", "--die-on-term", "--module=contrib.wsgi.app:app", "--need-app",
    ],
    "uwsgi, lazy": [
        str(BIN / "pyuwsgi"), "--http-socket=127.0.0.1:{port}", "--master", "--processes=4",
        "--enable-threads", "--die-on-term", "--module=contrib.wsgi.app:app", "--need-app",
        "--lazy-apps",
    ],
}  # fmt: skip
SINGLE_PROCESS = ("waitress",)


class Shop:
    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / "journal")
        self.leases = folder / "leases.sqlite3"
        policy = LeasePolicy(ttl=TTL, poll=0.1)
        runtime = Runtime(SqliteLease(self.leases), app="shop", env="test", policy=policy)
        self.relock = Lock("reindex").bound_to(runtime)

    def serve(self, command: list[str], **environ: str) -> Server:
        return Server(
            command,
            {
                "SHOP_JOURNAL": str(self.journal.path),
                "SHOP_TTL": str(TTL),
                "TAKO_APP": "shop",
                "TAKO_ENV": "test",
                "TAKO_BACKEND": f"sqlite:///{self.leases}",
                **environ,
            },
        )


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture(params=SERVERS)
def command(request: pytest.FixtureRequest) -> list[str]:
    found = SERVERS[request.param]
    if not Path(found[0]).exists():
        pytest.skip(f"{Path(found[0]).name} is not installed")
    return found


def test_of_presses_at_once_one_runs_at_a_time_and_the_others_hear_who_does(
    shop: Shop, command: list[str]
) -> None:
    answers = []
    with shop.serve(command, SHOP_USES_IT_AT_IMPORT="1") as server:
        for _ in range(4):
            answers += server.post_at_once("/reindex", 8, seconds=0.2)
    ran = [answer for answer in answers if answer.status == 200]
    busy = [answer for answer in answers if answer.status == 409]
    assert len(ran) + len(busy) == 32 and len(ran) >= 4 and busy
    assert len(shop.journal.all("begin")) == len(ran)
    shop.journal.never_two_at_once()
    for answer in busy:
        assert answer.json["lease"] == "reindex" and answer.headers["Retry-After"] == "1"
    owners = {answer.json["holder"]["owner"] for answer in busy if answer.json["holder"]}
    pids = {line["pid"] for line in shop.journal.all("begin")}
    assert owners and {int(owner.split(":")[1]) for owner in owners} <= pids


def test_a_worker_that_is_killed_frees_the_name_within_the_ttl(
    shop: Shop, command: list[str]
) -> None:
    if Path(command[0]).name.startswith(SINGLE_PROCESS):
        pytest.skip("there is one process, and nobody left to ask")
    with shop.serve(command) as server:
        try:
            holding = threading.Thread(target=lambda: _quietly(server, seconds=30))
            holding.start()
            begun = shop.journal.expect("begin")
            os.kill(begun["pid"], signal.SIGKILL)
            shop.journal.write("killed")
            assert server.post("/patient").status == 200
        finally:
            holding.join(PATIENCE)
    assert shop.journal.all("begin")[1]["pid"] != begun["pid"]
    shop.journal.never_two_at_once()


def test_a_server_that_is_told_to_end_lets_the_view_finish_and_frees_the_name_at_once(
    shop: Shop, command: list[str]
) -> None:
    answers: list[int] = []
    with shop.serve(command) as server:
        asking = threading.Thread(target=lambda: answers.append(_quietly(server, seconds=1.5)))
        asking.start()
        shop.journal.expect("begin")
        server.send(signal.SIGTERM)
        server.ends()
        asking.join(PATIENCE)
        holder = shop.relock.holder()
    if shop.journal.all("end"):  # it unwound: with an answer or without
        assert holder is None
    if not Path(command[0]).name.startswith(("waitress", "pyuwsgi")):
        assert answers == [200] and len(shop.journal.all("end")) == 1


@pytest.mark.parametrize("name", ["gunicorn, sync, preloaded", "uwsgi"])
def test_a_worker_never_touches_a_lease_of_the_master(shop: Shop, name: str) -> None:
    command = SERVERS[name]
    if not Path(command[0]).exists():
        pytest.skip(f"{Path(command[0]).name} is not installed")
    with shop.serve(command, SHOP_HOLDS_IT_AT_IMPORT="1") as server:
        holder = shop.relock.holder()
        assert holder is not None
        for _ in range(8):
            assert server.post("/inherited").json == {"cancelled": True, "ran": False}
        still = shop.relock.holder()
        assert still is not None and still.owner == holder.owner


def _quietly(server: Server, **fields: object) -> int:
    try:
        return server.post("/reindex", **fields).status
    except OSError:
        return 0  # its worker is gone


def test_a_worker_that_takes_too_long_for_gunicorn_frees_the_name(shop: Shop) -> None:
    command = [*GUNICORN, "-w", "2", "--timeout", "2"]
    with shop.serve(command) as server:
        holding = threading.Thread(target=lambda: _quietly(server, seconds=60))
        holding.start()
        begun = shop.journal.expect("begin")
        until = time.monotonic() + PATIENCE
        while os.path.exists(f"/proc/{begun['pid']}") and time.monotonic() < until:
            time.sleep(0.05)
        if not shop.journal.all("end"):
            shop.journal.write("killed")
        assert server.post("/patient").status == 200
        holding.join(PATIENCE)
    shop.journal.never_two_at_once()
