"""Which binding a lock, or a loop, uses: its own, its context's, its process's, the default one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kit import World
from tako_sync import runtime
from tako_sync.backends.memory import MemoryLease
from tako_sync.ctx import current_ctx
from tako_sync.errors import CampaignTimeoutError, ConfigurationError
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime, by_default, configure, current, in_context
from tako_sync.singleton import Singleton


@pytest.fixture
def default() -> Iterator[list[Runtime]]:
    """Have a framework make the binding; return those that it has made."""
    made: list[Runtime] = []

    def make() -> Runtime:
        made.append(Runtime(MemoryLease(), app=f"framework-{len(made)}"))
        return made[-1]

    by_default(make)
    yield made
    by_default(None)


def test_a_framework_binds_at_the_first_use_and_once(default: list[Runtime]) -> None:
    assert not default
    assert current() is current() is default[0]
    assert len(default) == 1


def test_what_is_configured_goes_before_a_frameworks_settings(default: list[Runtime]) -> None:
    mine = configure(backend="memory:")
    assert current() is mine and not default


def test_other_settings_drop_what_the_earlier_ones_made(default: list[Runtime]) -> None:
    before = current()
    by_default(lambda: Runtime(MemoryLease(), app="other"))
    assert current() is not before and current().app == "other"
    mine = configure(backend="memory:")
    by_default(None)
    assert current() is mine, "only what they made"


def test_settings_that_cannot_work_are_told_at_each_use() -> None:
    def fail() -> Runtime:
        raise ConfigurationError("no such setting")

    by_default(fail)
    try:
        for _ in range(2):
            with pytest.raises(ConfigurationError):
                Lock("reindex").holder()
    finally:
        by_default(None)
    assert runtime._bound is None


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> list[Runtime]:
    """What a framework says of the context that asks: the binding in the list, if there is one."""
    found: list[Runtime] = []
    monkeypatch.setattr(runtime, "_finders", ())
    in_context(lambda: found[-1] if found else None)
    return found


def test_a_context_may_have_a_binding_of_its_own(context: list[Runtime]) -> None:
    outer = configure(backend="memory:")
    inner = Runtime(MemoryLease(), app="inner")
    assert current() is outer
    context.append(inner)
    assert current() is inner
    assert Lock("reindex").do(lambda ctx: current_ctx().lease.name) == "reindex"
    context.clear()
    assert current() is outer


def test_a_loop_keeps_the_binding_of_who_has_started_it(
    world: World, context: list[Runtime]
) -> None:
    host = world.host()
    held: list[str] = []
    namespace: dict[str, Any] = {"__name__": "m", "__file__": "m.py", "Singleton": Singleton}
    namespace["fn"] = lambda ctx: (held.append(ctx.lease.owner), ctx.wait(1000))
    exec("bound_loop = Singleton(fn)", namespace)
    loop: Singleton = namespace["bound_loop"]
    context.append(host.runtime)
    runner = loop.start()
    context.clear()
    world.advance(1)
    assert held and "write" in host.requests()
    runner.stop(timeout=0)
    world.advance(10)


# --- How long who says nothing waits


@pytest.fixture
def world() -> World:
    return World(LeasePolicy(wait=10))


def test_the_policy_says_how_long_a_campaign_waits_that_was_not_told(world: World) -> None:
    first, second = world.host("first"), world.host("second")
    holding = world.start(lambda: first.lock().do(lambda ctx: ctx.wait(1000)))
    world.advance(1)

    def entered() -> None:
        with second.lock().hold():
            raise AssertionError

    campaigns = [
        lambda: second.lock().do(lambda ctx: None),
        entered,
        second.lock().guard(lambda: None),
    ]
    for campaign in campaigns:
        running = world.start(campaign)
        world.advance(9)
        assert not running.done
        world.advance(2)
        with pytest.raises(CampaignTimeoutError):
            running.result()
    longer = world.start(lambda: second.lock().do(lambda ctx: None, timeout=100))
    world.advance(50)
    assert not longer.done
    world.advance(60)
    assert isinstance(longer.error, CampaignTimeoutError)
    world.advance(1000)
    holding.result()


def test_a_singleton_waits_for_ever_all_the_same(world: World) -> None:
    namespace: dict[str, Any] = {"__name__": "m", "__file__": "m.py", "Singleton": Singleton}
    began: list[float] = []
    namespace["fn"] = lambda ctx: (began.append(1), ctx.wait(100))
    exec("patient = Singleton(fn)", namespace)
    hosts = [world.host("first"), world.host("second")]
    loops = [namespace["patient"].bound_to(host.runtime) for host in hosts]
    runners = [loop.start() for loop in loops]
    world.advance(90)
    assert len(began) == 1
    world.advance(30)
    assert len(began) == 2
    for runner in runners:
        runner.stop(timeout=0)
    world.advance(30)
    assert not any(runner.running for runner in runners)


@pytest.mark.parametrize("wait", [-1, float("nan"), "10", True])
def test_a_wait_that_cannot_be_is_refused(wait: Any) -> None:
    with pytest.raises(ConfigurationError, match="wait"):
        LeasePolicy(wait=wait)
