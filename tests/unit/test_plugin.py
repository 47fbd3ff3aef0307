"""The pytest plugin, as a user's test suite meets it."""

from __future__ import annotations

from importlib import metadata

import pytest

from tako_sync import runtime as binding
from tako_sync.testing import plugin

pytest_plugins = ["pytester"]

OPTIONS = ["-p", "no:randomly", "-p", "no:cacheprovider", "-W", "error", "-rA"]


@pytest.fixture(autouse=True)
def found_by_pytest(pytester: pytest.Pytester) -> None:
    """Make up for a checkout that is on the path only: pytest finds what is installed."""
    entries = metadata.entry_points(group="pytest11")
    if not any(entry.value == plugin.__name__ for entry in entries):
        names = "occupy, tako_clock, tako_runtime"
        pytester.makeconftest(f"from {plugin.__name__} import {names}  # noqa")


GALLERY = """
import tako_sync as tako

relock = tako.Lock("reindex")
ledger = []

def rebuild(ctx):
    ledger.append(ctx.fence)
    return f"run {len(ledger)}"

def reindex():
    ran, run = relock.try_do(rebuild)
    return {"started": ran, "run": run}

@relock.guard(busy="raise", timeout=10)
def refresh():
    return "refreshed"
"""


def passes(pytester: pytest.Pytester, test: str, count: int = 1, *options: str) -> None:
    """Run ``test`` beside an application of a user's; all of it must pass."""
    pytester.makepyfile(gallery=GALLERY, test_gallery=test)
    pytester.runpytest_inprocess(*OPTIONS, *options).assert_outcomes(passed=count)


def test_a_user_shows_that_a_second_reindex_collapses_into_the_first(
    pytester: pytest.Pytester,
) -> None:
    """The seed's promise: contention in a test is deterministic."""
    passes(
        pytester,
        """
        import gallery

        def test_reindex_collapses_while_held(tako_runtime, occupy):
            gallery.ledger.clear()
            with occupy("reindex"):
                assert gallery.reindex() == {"started": False, "run": None}
                assert gallery.ledger == []
            assert gallery.reindex() == {"started": True, "run": "run 1"}
        """,
    )


def test_a_user_decides_when_time_passes(pytester: pytest.Pytester) -> None:
    """No test of a timeout of ten seconds takes ten seconds."""
    passes(
        pytester,
        """
        import gallery, pytest, tako_sync as tako
        from concurrent.futures import ThreadPoolExecutor

        def test_refresh_gives_up_after_its_timeout(tako_runtime, tako_clock, occupy):
            occupy("reindex")
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(gallery.refresh)
                tako_clock.wait_for_waiters(2)
                tako_clock.advance(9.9)
                assert not answer.done()
                tako_clock.advance(0.2)
                with pytest.raises(tako.CampaignTimeoutError, match="not free within 10 s"):
                    answer.result(10)

        def test_refresh_goes_on_when_the_other_is_done(tako_runtime, tako_clock, occupy):
            other = occupy("reindex")
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(gallery.refresh)
                tako_clock.wait_for_waiters(2)
                other.release()
                tako_clock.advance(2.5)
                assert answer.result(10) == "refreshed"
        """,
        2,
    )


def test_the_runtime_is_on_the_clock_and_in_memory_and_bound(pytester: pytest.Pytester) -> None:
    passes(
        pytester,
        """
        import tako_sync as tako
        from tako_sync import runtime
        from tako_sync.testing import FakeClock

        def test_binding(tako_runtime, tako_clock):
            assert isinstance(tako_clock, FakeClock)
            assert tako_runtime.clock is tako_clock
            assert tako_runtime.backend.describe() == "memory:"
            assert (tako_runtime.app, tako_runtime.env) == ("test", "test")
            assert runtime.current() is tako_runtime
            begun = tako_clock.monotonic()
            assert tako.Lock("x").do(lambda ctx: ctx.remaining()) == 27.0
            assert tako_clock.monotonic() == begun
        """,
    )


def test_tests_do_not_share_records_clocks_or_fences(pytester: pytest.Pytester) -> None:
    passes(
        pytester,
        """
        import pytest, tako_sync as tako

        @pytest.mark.parametrize("number", range(3))
        def test_first_hold_of_all(number, tako_runtime, tako_clock, caplog):
            tako_clock.advance(number * 1000)
            lock = tako.Lock("reindex")
            assert lock.holder() is None
            assert list(tako_runtime.backend.list("", timeout=1)) == []
            lock.do(lambda ctx: None)
        """,
        3,
    )


def test_what_is_not_released_is_released_at_the_end_with_its_threads(
    pytester: pytest.Pytester,
) -> None:
    """Also after a test that fails: the next one must not pay for it."""
    pytester.makepyfile(
        """
        import threading, tako_sync as tako

        kept = []

        def test_leaves_everything_behind(tako_runtime, tako_clock, occupy):
            kept.extend([occupy("one"), occupy("two"), tako_runtime])
            tako_clock.advance(100)
            assert threading.active_count() >= 3, "their heartbeats"
            assert False, "on purpose"

        def test_meets_nothing_of_it(tako_runtime, occupy):
            assert threading.active_count() == 1
            for name in ("one", "two"):
                assert tako.Lock(name).bound_to(kept[2]).holder() is None
                assert tako.Lock(name).holder() is None
        """
    )
    result = pytester.runpytest_inprocess(*OPTIONS)
    result.assert_outcomes(passed=1, failed=1)


def test_an_occupation_lasts_until_it_is_released_however_long(pytester: pytest.Pytester) -> None:
    passes(
        pytester,
        """
        import tako_sync as tako

        def test_occupation(tako_runtime, tako_clock, occupy):
            lock = tako.Lock("reindex")
            other = occupy("reindex")
            tako_clock.advance(600)
            assert lock.holder().fence == other.fence
            assert not lock.try_do(lambda ctx: None)
            other.release()
            other.release()
            assert lock.do(lambda ctx: ctx.fence) > other.fence
        """,
    )


def test_an_occupation_that_crashes_is_held_for_a_ttl_and_then_taken_over(
    pytester: pytest.Pytester,
) -> None:
    """How the code under test fares after a SIGKILL elsewhere, without one."""
    passes(
        pytester,
        """
        import tako_sync as tako

        def test_crash(tako_runtime, tako_clock, occupy):
            lock, other = tako.Lock("reindex"), occupy("reindex")
            tako_clock.advance(100)
            other.crash()
            assert not lock.try_do(lambda ctx: None)
            tako_clock.advance(30)
            assert lock.do(lambda ctx: ctx.fence) > other.fence
            other.release()  # it is dead: this does nothing
            assert lock.try_do(lambda ctx: "in") == (True, "in")
        """,
    )


def test_an_occupation_of_a_held_name_is_refused(pytester: pytest.Pytester) -> None:
    passes(
        pytester,
        """
        import pytest, tako_sync as tako

        def test_twice(tako_runtime, occupy):
            occupy("reindex")
            with pytest.raises(tako.LeaseBusyError, match='lease "reindex" is busy: held by'):
                occupy("reindex")

        def test_under_my_own_hold(tako_runtime, occupy):
            with tako.Lock("reindex").hold():
                with pytest.raises(tako.LeaseBusyError):
                    occupy("reindex")
            occupy("reindex")
        """,
        2,
    )


def test_an_occupation_inside_a_body_of_another_name_is_busy_not_reentrant(
    pytester: pytest.Pytester,
) -> None:
    """It stands for another process, so a nested wait for it is a wait, not a mistake."""
    passes(
        pytester,
        """
        import pytest, tako_sync as tako

        def test_nested(tako_runtime, tako_clock, occupy):
            def body(ctx):
                occupy("inner")
                with pytest.raises(tako.CampaignTimeoutError):
                    tako.Lock("inner").do(lambda ctx: None, timeout=0)
                return "done"

            assert tako.Lock("outer").do(body) == "done"
        """,
    )


def test_a_frameworks_own_lease_can_be_occupied(pytester: pytest.Pytester) -> None:
    passes(
        pytester,
        """
        def test_singleton(tako_runtime, occupy):
            with occupy("singleton-invoicer"):
                assert list(tako_runtime.backend.list("", timeout=1)) == [
                    "run-test-test-singleton-invoicer"
                ]
        """,
    )


@pytest.mark.parametrize("name", ["..", "A", "", "a/b"])
def test_a_name_that_no_lock_can_have_cannot_be_occupied(
    pytester: pytest.Pytester, name: str
) -> None:
    """Else the test would pass and hold nothing that the code campaigns for."""
    passes(
        pytester,
        f"""
        import pytest, tako_sync as tako

        def test_name(tako_runtime, occupy):
            with pytest.raises(tako.ConfigurationError, match="is not made of"):
                occupy({name!r})
        """,
    )


def test_occupy_follows_a_binding_of_the_users_own(pytester: pytest.Pytester) -> None:
    passes(
        pytester,
        """
        import pytest, tako_sync as tako

        @pytest.fixture
        def shop():
            return tako.configure(app="shop", env="prod", backend="memory:")

        def test_own_binding(shop, occupy):
            with occupy("reindex"):
                holder = tako.Lock("reindex").holder()
                assert holder is not None
                assert list(shop.backend.list("", timeout=1)) == ["run-shop-prod-reindex"]
            assert tako.Lock("reindex").holder() is None
        """,
    )


def test_the_binding_from_before_is_back_after_each_test(pytester: pytest.Pytester) -> None:
    """A suite that configures once, in its conftest, keeps that for its other tests."""
    before = binding.configure(app="shop", backend="memory:")
    passes(
        pytester,
        """
        import pytest, tako_sync as tako
        from tako_sync import runtime

        def test_with(tako_runtime):
            assert runtime.current() is tako_runtime
            tako.configure(app="other", backend="memory:")

        def test_without():
            assert runtime.current().app == "shop"

        def test_that_configures_in_between(tako_runtime):
            assert runtime.current() is tako_runtime
        """,
        3,
    )
    assert binding.current() is before


def test_the_fixtures_are_explained(pytester: pytest.Pytester) -> None:
    listed = pytester.runpytest_inprocess(*OPTIONS, "--fixtures")
    listed.stdout.fnmatch_lines_random(
        [
            "tako_clock -- *",
            "*A clock that stands still until the test advances it.",
            "tako_runtime -- *",
            "*The binding of this process for the test: memory storage, virtual time.",
            "occupy -- *",
            '*``occupy("reindex")`` holds the very lease that ``Lock("reindex")`` campaigns for.',
        ]
    )


def test_a_test_that_uses_none_of_it_is_left_alone(pytester: pytest.Pytester) -> None:
    passes(
        pytester,
        """
        import sys
        from tako_sync import runtime

        def test_nothing():
            assert runtime._bound is None
        """,
    )


def test_the_fixtures_work_in_classes_and_across_modules(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        gallery=GALLERY,
        test_one="""
        import gallery, unittest, pytest

        class TestReindex:
            def test_collapses(self, tako_runtime, occupy):
                occupy("reindex")
                assert gallery.reindex()["started"] is False

        class TestOld(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def bound(self, tako_runtime, occupy):
                self.occupy = occupy

            def test_collapses(self):
                self.occupy("reindex")
                self.assertFalse(gallery.reindex()["started"])
        """,
        test_two="""
        import gallery

        def test_runs(tako_runtime):
            assert gallery.reindex()["started"] is True
        """,
    )
    pytester.runpytest_inprocess(*OPTIONS).assert_outcomes(passed=3)


def test_freezegun_and_the_fixtures_get_along(pytester: pytest.Pytester) -> None:
    """A user's suite freezes time around whole modules; it need not know of leases."""
    passes(
        pytester,
        """
        import gallery
        from freezegun import freeze_time

        @freeze_time("2012-01-14")
        def test_frozen(tako_runtime, tako_clock, occupy):
            with occupy("reindex"):
                tako_clock.advance(100)
                assert not gallery.reindex()["started"]
            assert gallery.reindex()["started"]
        """,
    )
