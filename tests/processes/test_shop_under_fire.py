"""The shop of the examples, in real processes that are killed, stopped and shut down at random."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from shop.numbering import Books, FencedOutError

from processes.kit_postgres import programs, server
from processes.kit_processes import PATIENCE, Crew, Post, Worker, check_order, clock
from tako_sync.ctx import Ctx
from tako_sync.errors import LeaseLostError
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime
from tako_sync.shutdown import install_signal_handlers
from tako_sync.singleton import Singleton

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signals here")

TTL: Final = 2.0
UNDER_FIRE: Final = 60.0
"""Seconds."""
INSTANCES: Final = 4

_here: list[tuple[Post, str]] = []


@Singleton
def invoicer(ctx: Ctx) -> None:
    """The shop's loop, reporting each step; it sweeps often, to be met in the midst of it."""
    ((post, database),) = _here
    with post.running(ctx):
        books = Books(database)
        while not ctx.wait(0.02):
            post.report("step", ctx)
            try:
                books.sweep(ctx.fence)
            except FencedOutError:
                post.report("fenced out", fence=ctx.fence)
                return


def instance(post: Post, leases: str, database: str) -> None:
    _here[:] = [(post, database)]
    backend = post.runtime(leases, TTL, 0.1).backend
    runtime = Runtime(
        backend,
        app="shop",
        env="test",
        policy=LeasePolicy(ttl=TTL, poll=0.1, restart=0.2),
        clock=clock,
        listeners=[post.tell],
    )
    install_signal_handlers()
    invoicer.bound_to(runtime).run()
    post.report("down")


def sweep_late(post: Post, leases: str, database: str) -> None:
    """Hold the lease, be stopped, and sweep on waking without asking the ctx."""

    def body(ctx: Ctx) -> str:
        books = Books(database)
        post.report("begin", ctx)
        post.order()
        try:
            books.sweep(ctx.fence)
        except FencedOutError:
            return "refused"
        finally:
            post.report("end", fence=ctx.fence, cancelled=ctx.cancelled)
        return "written"

    try:
        post.lock(leases, TTL, name="by-hand").do(body)
    except LeaseLostError as loss:
        post.report("outcome", value=loss.value)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the URL of a database in which the tables are made."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'shop.sqlite3'}"
        Books(url).create()
        yield url
    else:
        installed = programs()
        if installed is None:
            pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
        with server(installed) as url:
            Books(url).create()
            yield url


@pytest.fixture
def books(database: str) -> Books:
    return Books(database)


def numbers_are_sequential(books: Books) -> None:
    invoices = books.invoices()
    assert [number for number, _ in invoices] == list(range(1, len(invoices) + 1))
    orders = [order for _, order in invoices]
    assert orders == sorted(set(orders))


def test_three_orders_get_three_numbers_a_second_sweep_finds_nothing(books: Books) -> None:
    for number in range(3):
        books.order(f"order {number}")
    assert books.sweep(fence=7) == 3
    assert books.sweep(fence=7) == 0
    books.order("another")
    assert books.sweep(fence=9) == 1
    assert [number for number, _ in books.invoices()] == [1, 2, 3, 4], "it never rewinds"


def test_a_sweep_under_an_older_fence_is_refused_and_writes_nothing(books: Books) -> None:
    books.sweep(fence=9)
    books.order("late")
    with pytest.raises(FencedOutError):
        books.sweep(fence=8)
    assert books.open_orders() == 1


@pytest.mark.timeout(UNDER_FIRE + 4 * PATIENCE)
def test_the_shop_under_fire_gives_each_order_one_number(
    crew: Crew, books: Books, database: str, tmp_path: Path
) -> None:
    chance = random.Random(4)
    leases = str(tmp_path / "leases.sqlite3")

    def up() -> Worker:
        worker = crew.start(instance, leases, database)
        worker.expect("request")  # it is inside run(): SIGTERM before that ends it with 143
        return worker

    alive = [up() for _ in range(INSTANCES)]
    ordered = 0
    until = time.monotonic() + UNDER_FIRE
    while time.monotonic() < until:
        for _ in range(chance.randrange(4)):
            books.order(f"order {ordered}")
            ordered += 1
        runner = next((one for one in alive if len(one.all("begin")) > len(one.all("end"))), None)
        victim = chance.choice([*alive, *([runner] * INSTANCES if runner else [])])
        match chance.randrange(8):
            case 0:
                victim.send(signal.SIGKILL)
                victim.ends()
                alive[alive.index(victim)] = up()
            case 1:
                victim.send(signal.SIGTERM)
                victim.ends_well()
                alive[alive.index(victim)] = up()
            case 2:
                victim.send(signal.SIGSTOP)
                time.sleep(chance.uniform(0.1, 2.0) * TTL)
                victim.send(signal.SIGCONT)
            case _:
                time.sleep(chance.uniform(0.0, 0.3))
    end = time.monotonic() + PATIENCE
    while books.open_orders() and time.monotonic() < end:
        time.sleep(0.05)
    assert not books.open_orders(), "orders were lost, or nobody runs any more"
    for worker in alive:
        worker.send(signal.SIGTERM)
    for worker in alive:
        worker.ends_well()
    assert len(books.invoices()) == ordered > 100
    numbers_are_sequential(books)
    runs = check_order(crew.reports)
    assert len({run.who for run in runs}) > 3, "the loop has moved"


def test_a_rolling_deploy_hands_over_within_a_poll_and_loses_no_order(
    crew: Crew, books: Books, database: str, tmp_path: Path
) -> None:
    leases = str(tmp_path / "leases.sqlite3")
    old = crew.start(instance, leases, database, name="revision 1")
    old.expect("begin")
    new = crew.start(instance, leases, database, name="revision 2")
    new.expect("Waiting")
    for number in range(5):
        books.order(f"order {number}")
    old.send(signal.SIGTERM)
    old.ends_well()
    books.order("during the deployment")
    taken = new.expect("Acquired")
    assert taken["how"] == "released", "it did not wait for the old one to age"
    new.expect("begin")
    end = time.monotonic() + PATIENCE
    while books.open_orders() and time.monotonic() < end:
        time.sleep(0.02)
    new.send(signal.SIGTERM)
    new.ends_well()
    assert len(books.invoices()) == 6
    numbers_are_sequential(books)
    check_order(crew.reports)
    assert not old.all("fenced out") and not new.all("fenced out")


def test_the_late_sweep_of_a_resumed_holder_is_refused_by_the_fence(
    crew: Crew, books: Books, database: str, tmp_path: Path
) -> None:
    leases = str(tmp_path / "leases.sqlite3")
    stale = crew.start(sweep_late, leases, database, name="stale")
    stale.expect("begin")
    stale.expect("Renewed")
    stale.send(signal.SIGSTOP)
    fresh = crew.start(sweep_late, leases, database, name="fresh")
    fresh.expect("begin")
    books.order("one")
    fresh.tell("sweep")
    fresh.ends_well()
    books.order("two")
    stale.send(signal.SIGCONT)
    stale.tell("sweep")
    assert stale.expect("outcome")["value"] == "refused"
    assert [order for _, order in books.invoices()] == [1]
