"""An application in one process: all that a module declares runs there, and tells what matters."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from kit import Running, World
from tako_sync import declared, dev
from tako_sync.application import declared_in, find
from tako_sync.cron import Cron, CronConfig
from tako_sync.ctx import Ctx
from tako_sync.errors import ConfigurationError, ShutdownError
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.record import Record, read
from tako_sync.runner import loops
from tako_sync.singleton import Singleton

log = logging.getLogger("shop")


def module(name: str = "shop_app", **declares: Any) -> ModuleType:
    """Return a module at whose top level each of ``declares`` is made of its function."""
    made = ModuleType(name)
    vars(made).update(Singleton=Singleton, Cron=Cron, CronConfig=CronConfig)
    for variable, (source, fn) in declares.items():
        vars(made)["fn"] = fn
        exec(f"{variable} = {source}", vars(made))
    return made


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is an application of its own."""
    monkeypatch.setattr(declared, "_declared", {})


class Development(World):
    """A run of an application, on one host."""

    def __init__(self) -> None:
        super().__init__()
        self.ctx = Ctx.background(self.clock)
        self.told = io.StringIO()
        self.runs: list[Running[None]] = []

    def run(self, module: ModuleType, host: str = "here") -> Running[None]:
        runtime = self.host(host).runtime
        self.runs.append(
            self.start(
                lambda: dev.run(module, self.ctx, runtime=runtime, narrate=self.told, drain=10),
                host,
            )
        )
        return self.runs[-1]

    @property
    def lines(self) -> list[str]:
        return self.told.getvalue().splitlines()


@pytest.fixture
def development() -> Iterator[Development]:
    development = Development()
    yield development
    development.ctx.cancel()
    development.advance(120)
    for running in development.runs:
        assert running.done


def shop(began: list[str]) -> ModuleType:
    """The invoicer of the tako documentation, and a Cron."""
    waiting = [3, 0, 0, 0]

    def assign(ctx: Ctx) -> None:
        began.append("invoicer")
        through = 0
        while not ctx.cancelled:
            orders = waiting.pop(0) if waiting else 0
            if orders:
                through += orders
                log.info("invoicer: assigned invoice numbers orders=%d through=%d", orders, through)
            ctx.wait(2)

    def sweep(ctx: Ctx) -> None:
        began.append("sweep")

    once = "Cron('* * * * *', fn, CronConfig(singleflight=True))"
    return module(invoicer=("Singleton(fn)", assign), sweep=(once, sweep))


def test_all_that_a_module_declares_runs_and_only_productive_sweeps_are_told(
    development: Development,
) -> None:
    began: list[str] = []
    development.run(shop(began))
    development.advance(30)
    assert began[:1] == ["invoicer"]
    assert "invoicer: assigned invoice numbers orders=3 through=3" in development.lines
    before = len(development.lines)
    development.advance(10)  # idle
    told = development.lines[before:]
    assert all(line.startswith("cron sweep, due ") for line in told)
    development.advance(60)
    assert began.count("sweep") >= 1 and began.count("invoicer") == 1
    assert not [line for line in development.lines if "singleton-" in line], "nothing of leases"


def test_a_loop_that_returns_is_narrated_as_tako_does(development: Development) -> None:
    development.run(module(invoicer=("Singleton(fn)", lambda ctx: None)))
    development.advance(1)
    assert development.lines == ["♾ singleton invoicer returned — restarting in 5s."]


def test_in_two_processes_the_loop_still_runs_once(development: Development) -> None:
    began: list[str] = []
    application = shop(began)
    development.run(application, "one")
    other = shop(began)
    declared._declared.clear()  # as in another process
    development.run(other, "two")
    development.advance(20)
    assert began.count("invoicer") == 1


def test_locks_within_the_bodies_are_kept_in_the_same_storage(development: Development) -> None:
    held: list[str] = []

    def body(ctx: Ctx) -> None:
        Lock("reindex").do(lambda ctx: held.append(ctx.lease.name))
        ctx.wait(100)

    development.run(module(invoicer=("Singleton(fn)", body)))
    development.advance(5)
    assert held == ["reindex"]
    assert isinstance(read(development.store.read("run-shop-test-reindex", timeout=1)), Record)


def test_its_end_lets_the_bodies_drain(development: Development) -> None:
    causes: list[object] = []

    def body(ctx: Ctx) -> None:
        ctx.wait(1000)
        causes.append(ctx.cause)
        development.clock.wait(Flag(), 5)

    running = development.run(module(invoicer=("Singleton(fn)", body)))
    development.advance(5)
    development.ctx.cancel()
    development.advance(4)
    assert not running.done and len(causes) == 1
    assert isinstance(causes[0], ShutdownError)
    development.advance(2)
    assert running.done


def test_a_signal_reaches_it_as_any_other_loop(development: Development) -> None:
    running = development.run(shop([]))
    development.advance(5)
    loops.close("test", ShutdownError("the process was sent SIGTERM"))
    loops.stop("test")
    try:
        development.advance(5)
        assert running.done
        again = development.run(shop([]))
        development.advance(1)
        assert again.done, "a process that is told to end begins nothing"
    finally:
        loops.reopen("test")


def test_a_body_that_goes_on_at_the_end_is_named_and_left_alone(development: Development) -> None:
    go = Flag()

    def deaf(ctx: Ctx) -> None:
        development.clock.wait(go)

    running = development.run(module(deaf=("Singleton(fn)", deaf)))
    development.advance(5)
    development.ctx.cancel()
    development.advance(12)
    assert running.done
    assert development.lines == ["singleton deaf goes on after 10 s, and is left alone"]
    go.set()
    development.advance(10)


def test_logging_is_as_it_was_afterwards(development: Development) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    development.run(shop([]))
    development.advance(1)
    development.ctx.cancel()
    development.advance(10)
    assert (root.level, list(root.handlers)) == before


# --- What an application declares


def test_what_is_imported_from_elsewhere_counts_and_once() -> None:
    loops_module = module("shop_loops", invoicer=("Singleton(fn)", lambda ctx: None))
    app = ModuleType("shop_main")
    vars(app).update(invoicer=vars(loops_module)["invoicer"], again=vars(loops_module)["invoicer"])
    application = declared_in(app)
    assert [singleton.name for singleton in application.singletons] == ["invoicer"]
    assert application.crons == ()


def test_a_module_that_declares_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="neither a Singleton nor a Cron"):
        declared_in(ModuleType("empty"))


@pytest.mark.parametrize("name", ["no_such_module", "", ".relative", "json.no_such"])
def test_a_module_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        declared_in(name)


def test_an_import_that_fails_inside_the_module_is_told_as_it_is(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_app.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        declared_in("broken_app")


@pytest.mark.parametrize("place", ["shop", "shop:", ":x", "json:dumps", "json:nothing", "nope:x"])
def test_a_place_where_nothing_is_declared_is_refused(place: str) -> None:
    with pytest.raises(ConfigurationError):
        find(place)
