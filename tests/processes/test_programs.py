"""The programs of the package, started as a container starts them: serve, and dev."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tako_sync.backends.sqlite import SqliteLease
from tako_sync.record import Record, State, read

PATIENCE = 40.0
APP = """
import logging
import tako_sync as tako

log = logging.getLogger("shop")

@tako.Singleton
def invoicer(ctx):
    log.info("begins under %d", ctx.fence)
    while not ctx.wait(0.05):
        pass
    log.info("drained: %s", ctx.cause)

@tako.Singleton
def hung(ctx):
    log.info("begins under %d", ctx.fence)
    while True:
        import threading
        threading.Event().wait(1)

def carts(ctx):
    log.info("swept under %d", ctx.fence)

def falls(ctx):
    raise ValueError("no carts")

def stays(ctx):
    log.info("begins")
    ctx.wait(1000)

sweep = tako.Cron("* * * * *", carts, tako.CronConfig(singleflight=True, catch_up=3600))
failing = tako.Cron("* * * * *", falls, tako.CronConfig(singleflight=True))
staying = tako.Cron("* * * * *", stays, tako.CronConfig(singleflight=True))
"""


class Program:
    """A process, with what it writes to its log."""

    def __init__(self, folder: Path, *arguments: str, **environ: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=folder,
            env=inherited | {"TAKO_APP": "shop", "TAKO_ENV": "test"} | environ,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for a line of its log."""
        found: list[re.Match[str]] = []

        def there() -> bool:
            found.extend(m for line in self.lines if (m := re.search(pattern, line)))
            return bool(found) or not self._ear.is_alive()

        with self._news:
            self._news.wait_for(there, PATIENCE)
        assert found, f"no {pattern!r} in:\n" + "".join(self.lines)
        return found[0]

    def ends(self) -> int:
        status = self.process.wait(PATIENCE)
        self._ear.join(PATIENCE)
        return status

    def clean_up(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.ends()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


class Shop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "shop_app.py").write_text(APP)
        self.leases = folder / "leases.sqlite3"
        self.programs: list[Program] = []

    def start(self, *arguments: str, **environ: str) -> Program:
        backend = f"sqlite:///{self.leases}"
        program = Program(self.folder, *arguments, **{"TAKO_BACKEND": backend} | environ)
        self.programs.append(program)
        return program

    def serve(self, variable: str, **environ: str) -> Program:
        return self.start("tako_sync.serve", f"shop_app:{variable}", **{"PORT": "0"} | environ)

    def record(self, name: str) -> Record:
        content = read(SqliteLease(self.leases).read(f"run-shop-test-{name}", timeout=5.0))
        assert isinstance(content, Record)
        return content


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    yield shop
    for program in shop.programs:
        program.clean_up()


def port(program: Program) -> int:
    return int(program.expect(r"health is told on port (\d+)")[1])


def asked(number: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{number}{path}", timeout=PATIENCE) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            body = error.read()
        return error.code, json.loads(body) if body.startswith(b"{") else {}


def test_a_singleton_is_served_behind_its_health_and_hands_over_on_sigterm(shop: Shop) -> None:
    old = shop.serve("invoicer")
    old.expect("begins under ")
    new = shop.serve("invoicer")
    new.expect("waiting")
    assert asked(port(old), "/health")[1]["state"] == "healthy"
    status, told = asked(port(new), "/health")
    assert (status, told["state"]) == (200, "standby")
    assert asked(port(new), "/live")[0] == 200
    assert asked(port(new), "/")[0] == 404, "nobody else is served"
    old.process.send_signal(signal.SIGTERM)
    old.expect("drained: the process was sent SIGTERM")
    assert old.ends() == 0
    new.expect("begins under ")
    with pytest.raises(OSError):
        asked(port(old), "/live")


def test_a_loop_that_will_not_stop_keeps_its_lease_until_its_process_is_killed(shop: Shop) -> None:
    """As Cloud Run does ten seconds after SIGTERM."""
    program = shop.serve("hung")
    program.expect("begins under ")
    program.process.send_signal(signal.SIGTERM)
    number = port(program)
    while asked(number, "/health")[1]["state"] == "healthy":
        pass
    assert shop.record("singleton-hung").state is State.HELD
    program.process.send_signal(signal.SIGKILL)
    assert program.ends() == -signal.SIGKILL
    assert shop.record("singleton-hung").state is State.HELD, "it frees itself by its ttl"


def test_slow_and_odd_clients_do_not_keep_others_from_its_health(shop: Shop) -> None:
    import socket

    program = shop.serve("invoicer")
    program.expect("begins")
    number = port(program)
    silent = [socket.create_connection(("127.0.0.1", number)) for _ in range(20)]
    for odd, connection in zip((b"\0\xff\r\n\r\n", b"GET " + b"/" * 70_000, b"POST / X"), silent):
        connection.sendall(odd)
    assert asked(number, "/live")[0] == 200
    for connection in silent:
        connection.close()
    assert asked(number, "/health")[0] == 200


def test_a_slot_is_run_once_however_often_it_is_started(shop: Shop) -> None:
    first = shop.serve("sweep")
    assert first.ends() == 0
    first.expect("swept under ")
    begun = shop.record("cron-sweep").memo
    second = shop.serve("sweep")
    assert second.ends() == 0
    slot = json.loads(begun)["slot"]
    if json.loads(shop.record("cron-sweep").memo)["slot"] == slot:  # no new minute has come
        assert not [line for line in second.lines if "swept" in line]


def test_a_slot_that_fails_ends_its_program_with_1(shop: Shop) -> None:
    program = shop.serve("failing")
    assert program.ends() == 1
    program.expect("ValueError: no carts")


def test_one_that_is_told_to_end_in_its_slot_ends_with_1_for_the_platform_to_retry(
    shop: Shop,
) -> None:
    program = shop.serve("staying")
    program.expect("begins")
    program.process.send_signal(signal.SIGTERM)
    assert program.ends() == 1
    assert json.loads(shop.record("cron-staying").memo)["state"] == "running"
    assert shop.record("cron-staying").state is not State.HELD


@pytest.mark.parametrize(
    ("place", "environ", "why"),
    [
        ("shop_app:nothing", {}, "no Singleton and no Cron named nothing"),
        ("shop_app", {}, "write module:variable"),
        ("no_app:x", {}, "no module 'no_app'"),
        ("shop_app:invoicer", {"PORT": "http"}, "PORT is the number of a port"),
        ("shop_app:invoicer", {"PORT": "70000"}, "PORT is the number of a port"),
    ],
)
def test_what_cannot_be_served_is_told_at_once(
    shop: Shop, place: str, environ: dict[str, str], why: str
) -> None:
    program = shop.start("tako_sync.serve", place, **environ)
    assert program.ends() == 2
    program.expect(re.escape(why))


def test_on_cloud_run_without_a_storage_it_ends_and_says_what_to_set(shop: Shop) -> None:
    program = shop.serve("invoicer", TAKO_BACKEND="", K_SERVICE="shop-invoicer")
    assert program.ends() == 1
    program.expect("set TAKO_BACKEND=gs://<bucket>")


def test_dev_runs_it_all_until_it_is_told_to_end(shop: Shop) -> None:
    (shop.folder / "small_app.py").write_text(APP[: APP.index("@tako.Singleton\ndef hung")])
    program = shop.start("tako_sync.dev", "small_app")
    program.expect("^begins under ")
    program.process.send_signal(signal.SIGTERM)
    program.expect("^drained: ")
    assert program.ends() == 0
    assert not shop.leases.exists(), "in memory, if nothing else is said"


def test_dev_ends_by_ctrl_c(shop: Shop) -> None:
    (shop.folder / "small_app.py").write_text(APP[: APP.index("@tako.Singleton\ndef hung")])
    program = shop.start("tako_sync.dev", "small_app", f"--backend=sqlite:///{shop.leases}")
    program.expect("^begins under ")
    program.process.send_signal(signal.SIGINT)
    program.expect("^drained: ")
    assert program.ends() == 128 + signal.SIGINT
    assert shop.record("singleton-invoicer").state is not State.HELD


def test_serve_ends_by_ctrl_c_and_gives_the_lease_back(shop: Shop) -> None:
    program = shop.serve("invoicer")
    program.expect("begins under ")
    program.process.send_signal(signal.SIGINT)
    assert program.ends() == 128 + signal.SIGINT
    assert shop.record("singleton-invoicer").state is not State.HELD
    assert not [line for line in program.lines if "Traceback" in line]
