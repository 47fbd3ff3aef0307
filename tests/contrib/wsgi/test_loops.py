"""A Singleton and a Cron that every worker of a server starts: one loop, one run for each tick."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from contrib.journal import Journal
from contrib.servers import Server
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.record import Record, State, read

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no such servers here")

BIN = Path(sys.executable).parent
CONF = Path(__file__).with_name("gunicorn_conf.py")
GUNICORN = [
    str(BIN / "gunicorn"), "contrib.wsgi.loops:app", "-b", "127.0.0.1:{port}", "-w", "4", "-c",
    str(CONF), "--log-level", "warning",
]  # fmt: skip
UWSGI = [
    str(BIN / "pyuwsgi"), "--http-socket=127.0.0.1:{port}", "--master", "--processes=4",
    "--enable-threads", "--die-on-term", "--module=contrib.wsgi.uwsgi_loops:app", "--need-app",
]  # fmt: skip
SERVERS = {
    "gunicorn": GUNICORN,
    "gunicorn, preloaded": [*GUNICORN, "--preload"],
    "gunicorn, gevent, preloaded": [*GUNICORN, "--preload", "-k", "gevent"],
    "uwsgi": UWSGI,
    "uwsgi, lazy": [*UWSGI, "--lazy-apps"],
}
TICKS = 4


@pytest.mark.parametrize("command", SERVERS.values(), ids=SERVERS)
def test_four_workers_are_one_loop_and_one_run_for_each_tick_and_hand_over(
    tmp_path: Path, command: list[str]
) -> None:
    if not Path(command[0]).exists():
        pytest.skip(f"{Path(command[0]).name} is not installed")
    loop, ticks = Journal(tmp_path / "loop"), Journal(tmp_path / "ticks")
    leases = tmp_path / "leases.sqlite3"
    environ = {
        "SHOP_JOURNAL": str(loop.path),
        "SHOP_TICKS": str(ticks.path),
        "TAKO_APP": "shop",
        "TAKO_ENV": "test",
        "TAKO_BACKEND": f"sqlite:///{leases}",
    }
    with Server(command, environ) as server:
        victim = loop.expect("begin")["pid"]
        assert server.get("/tako/live").status == 200
        states = {server.get("/tako/health").json["invoicer"]["state"] for _ in range(20)}
        assert states <= {"healthy", "standby"}
        ticks.expect("end", TICKS)
        os.kill(victim, signal.SIGKILL)
        loop.write("killed")
        ticks.write("killed")
        assert loop.expect("begin", 2)["pid"] != victim
        ticks.expect("end", 2 * TICKS)
        server.send(signal.SIGTERM)
        assert server.ends() == 0
        last = loop.all("end")[-1]
        record = read(SqliteLease(leases).read("run-shop-test-singleton-invoicer", timeout=5))
    assert last["cancelled"] and last["fence"] == loop.all("begin")[-1]["fence"]
    assert isinstance(record, Record) and record.state is not State.HELD, "handed over at once"
    loop.never_two_at_once()
    ticks.never_two_at_once()
    slots = Counter(line["slot"].partition("state=")[0] for line in ticks.all("tick"))
    again = [slot for slot, times in slots.items() if times > 1]
    assert len(again) <= 1, "but for the one that may have been cut short by the kill"
