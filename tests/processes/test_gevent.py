"""gevent: patched before the import it works, patched after it as well; a spinning greenlet."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gevent") is None, reason="gevent is not installed"
)

PATCH: Final = """
import gevent
from gevent import monkey
monkey.patch_all()
"""
IMPORT: Final = """
import sys, threading, time
import tako_sync as tako
from tako_sync.backends.memory import MemoryLease
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.runtime import Runtime
from tako_sync.testing.overlap import OverlapMeter
"""
SETTING: Final = """
store = MemoryLease() if sys.argv[1] == "memory" else SqliteLease(sys.argv[1])
runtime = Runtime(
    store, app="shop", env="test", policy=tako.LeasePolicy(ttl=float(sys.argv[2]), poll=0.05)
)
relock = tako.Lock("reindex").bound_to(runtime)
"""
CONTEND: Final = """
meter, ran = OverlapMeter(), []

def body(ctx):
    with meter.running(ctx):
        time.sleep(0.002)
        ran.append(ctx.fence)

def work(number):
    for _ in range(2):
        relock.do(body)

ticks = []

def tick():
    while len(ran) < 100:
        ticks.append(1)
        time.sleep(0.001)

gevent.spawn(tick)
gevent.joinall([gevent.spawn(work, number) for number in range(50)], raise_error=True)
meter.check()
assert len(ran) == 100, len(ran)
assert ran == sorted(set(ran))
assert len(ticks) > 20, "nothing stood in the way of the other greenlets"
print("well")
"""
HOLD: Final = """
def hold(ctx):
    deadline = time.monotonic() + ctx.remaining()
    while time.monotonic() < deadline + 0.1:
        assert not ctx.wait(0.02), ctx.cause
    return ctx.remaining() > 0

assert gevent.spawn(relock.do, hold).get(), "it was renewed by a greenlet"
print("well")
"""
SPIN: Final = """
def spin(ctx):
    until = time.monotonic() + 1.5 * float(sys.argv[2])
    while time.monotonic() < until:
        pass  # no greenlet but this one runs: nobody renews
    return ctx.cancelled

try:
    gevent.spawn(relock.do, spin).get()
except tako.LeaseLostError as loss:
    assert loss.value is True, "at its first question it was told"
    assert str(loss.reason) in ("expired", "unreachable"), loss.reason
    print("well")
"""
TIMEOUT: Final = """
class TooLong(BaseException):
    pass

def wait_in_vain():
    with gevent.Timeout(0.1, TooLong):
        relock.do(lambda ctx: None)

with tako.Lock("reindex").bound_to(Runtime(store, app="shop", env="test")).hold():
    try:
        gevent.spawn(wait_in_vain).get()
    except TooLong:
        pass
assert relock.do(lambda ctx: "in", timeout=10) == "in", "its place in the line is free"
try:
    with gevent.Timeout(0.1, TooLong):
        relock.do(lambda ctx: ctx.wait(60))
except TooLong:
    pass
assert relock.holder() is None
print("well")
"""


def run(script: str, store: str, ttl: float) -> None:
    """Run the script in a process of its own, with the folder that tako_sync is in."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, store, str(ttl)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=50, cwd=root
    )
    assert done.returncode == 0 and done.stdout.strip() == "well", done.stdout + done.stderr


BEFORE: Final = PATCH + IMPORT + SETTING
AFTER: Final = IMPORT + PATCH + SETTING
MUCH_LATER: Final = "import gevent" + IMPORT + SETTING + "relock.do(lambda ctx: None)" + PATCH


starts = pytest.mark.parametrize("start", [BEFORE, AFTER], ids=["before", "after"])


@pytest.mark.parametrize("start", [BEFORE, AFTER, MUCH_LATER], ids=["before", "after", "later"])
def test_fifty_greenlets_contend_and_take_turns(start: str) -> None:
    run(start + CONTEND, "memory", 30)


def test_fifty_greenlets_contend_for_a_file(tmp_path: Path) -> None:
    run(BEFORE + CONTEND, str(tmp_path / "leases"), 60)


@starts
def test_a_hold_longer_than_its_ttl_is_renewed_while_the_body_gives_way(start: str) -> None:
    run(start + HOLD, "memory", 1.5)


@starts
def test_a_greenlet_that_spins_past_its_ttl_is_told_at_its_first_question(start: str) -> None:
    run(start + SPIN, "memory", 0.6)


@starts
def test_a_timeout_of_gevents_ends_a_campaign_and_a_body_and_leaves_the_lease_free(
    start: str,
) -> None:
    run(start + TIMEOUT, "memory", 30)
