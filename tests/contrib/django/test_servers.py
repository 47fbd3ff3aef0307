"""Django in real servers: views under leases in preloaded workers, and manage.py's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from contrib.journal import Journal
from contrib.program import PATIENCE
from contrib.servers import Server
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.lock import Lock
from tako_sync.record import Record, State, read
from tako_sync.runtime import Runtime

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no such servers here")

GUNICORN = [
    str(Path(sys.executable).parent / "gunicorn"), "contrib.django.shop.wsgi:application", "-b",
    "127.0.0.1:{port}", "-w", "4", "--preload", "--log-level", "warning",
]  # fmt: skip
RUNSERVER = [sys.executable, "-m", "django", "runserver", "127.0.0.1:{port}", "--noreload"]
TTL = 3.0


class Shop:
    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / "journal")
        self.leases = folder / "leases.sqlite3"
        self.environ = {
            "DJANGO_SETTINGS_MODULE": "contrib.django.shop.settings",
            "SHOP_JOURNAL": str(self.journal.path),
            "SHOP_LEASES": f"sqlite:///{self.leases}",
            "SHOP_DATABASE": str(folder / "shop.sqlite3"),
            "SHOP_TTL": str(TTL),
        }
        paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        self.everywhere = {**os.environ, "PYTHONPATH": paths, **self.environ}
        self.manage("migrate", "--run-syncdb", "-v0")
        runtime = Runtime(SqliteLease(self.leases), app="shop", env="test")
        self.relock = Lock("reindex").bound_to(runtime)

    def manage(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "django", *arguments],
            env=self.everywhere,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.mark.parametrize("command", [GUNICORN, RUNSERVER], ids=["gunicorn", "runserver"])
def test_of_presses_at_once_one_runs_at_a_time(shop: Shop, command: list[str]) -> None:
    answers = []
    with Server(command, shop.environ) as server:
        for _ in range(4):
            answers += server.post_at_once("/reindex", 8, seconds=0.2)
    assert {answer.status for answer in answers} == {200, 409}
    ran = [answer for answer in answers if answer.status == 200]
    assert len(shop.journal.all("begin")) == len(ran) >= 4
    shop.journal.never_two_at_once()


@pytest.mark.parametrize("path", ["/count", "/count-until-commit"])
def test_what_is_committed_under_a_lease_is_seen_by_the_next_holder(shop: Shop, path: str) -> None:
    """With ATOMIC_REQUESTS, or in a transaction of its own: numbers without gap or double."""
    atomic = {"SHOP_ATOMIC": "1"} if path == "/count" else {}
    with Server(GUNICORN, {**shop.environ, **atomic}) as server:
        answers = [a for _ in range(3) for a in server.post_at_once(path, 8)]
        entries = server.get("/entries").json["entries"]
    ran = [answer for answer in answers if answer.status == 200]
    assert {answer.status for answer in answers} <= {200, 409}
    assert entries == [str(number + 1) for number in range(len(ran))]
    if path == "/count":
        assert {answer.json["atomic"] for answer in ran} == {True}


def test_a_worker_that_is_killed_frees_the_name_within_the_ttl(shop: Shop) -> None:
    def quietly() -> None:
        try:
            server.post("/reindex", seconds=30)
        except OSError:
            pass  # its worker is gone

    with Server(GUNICORN, shop.environ) as server:
        holding = threading.Thread(target=quietly)
        holding.start()
        begun = shop.journal.expect("begin")
        os.kill(begun["pid"], signal.SIGKILL)
        shop.journal.write("killed")
        assert server.post("/patient").status == 200
        holding.join(PATIENCE)
        server.send(signal.SIGTERM)
        assert server.ends() == 0
    shop.journal.never_two_at_once()
    assert shop.relock.holder() is None


def test_manage_py_runs_a_singleton_until_it_is_told_to_end(shop: Shop) -> None:
    place = "contrib.django.shop.loops:django_invoicer"
    with subprocess.Popen(
        [sys.executable, "-m", "django", "tako", "singleton", place],
        env=shop.everywhere,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
            assert "singleton-django_invoicer: " in shop.manage("tako", "list").stdout
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "drained\n"
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    key = "run-shop-test-singleton-django_invoicer"
    record = read(SqliteLease(shop.leases).read(key, timeout=5))
    assert isinstance(record, Record) and record.state is not State.HELD


def test_manage_py_check_tells_what_will_go_wrong(shop: Shop) -> None:
    shop.everywhere["SHOP_LEASES"] = "memory:"
    shop.everywhere["SHOP_ATOMIC"] = "1"
    told = shop.manage("check").stderr
    assert "tako_sync.W001" in told and "tako_sync.W003" in told
