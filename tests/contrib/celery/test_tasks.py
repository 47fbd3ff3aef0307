"""Tasks under a lease, called here: which lease, and what is made of one that is busy or lost."""

from __future__ import annotations

import enum
import functools
from typing import Any

import pytest
from celery import Celery
from celery.local import Proxy

import tako_sync
from kit import World
from tako_sync.contrib.celery import leased
from tako_sync.contrib.celery.keys import Keys
from tako_sync.errors import (
    BackendUnavailableError,
    CampaignTimeoutError,
    ConfigurationError,
    LeaseBusyError,
    LeaseLostError,
    TakoError,
    UsageError,
)
from tako_sync.lock import Lock
from tako_sync.runtime import rebound
from tako_sync.testing import occupy
from tako_sync.testing.faults import fail

pytestmark = pytest.mark.usefixtures("in_memory")


class Tenant(enum.Enum):
    ACME = "acme"
    ZENITH = "zenith"


@pytest.fixture
def app() -> Celery:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_always_eager = True
    return app


def charge_all(order: int, tenant: object = "acme", *more: object) -> None:
    raise AssertionError


def charge(order: int, tenant: object = "acme") -> str:
    return f"{tako_sync.current_ctx().lease}"


# --- Keys

CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((1,), {}),
    ((1, "acme"), {}),
    ((), {"order": 1, "tenant": "acme"}),
)


def test_each_value_of_the_key_has_a_lease_wherever_the_value_is_written() -> None:
    task: Any = leased("charge", key="tenant", among=["acme", "zenith"])(charge)
    with occupy("charge-acme"):
        assert task(1, "zenith") == task(1, tenant="zenith") == "charge-zenith"
        for args, kwargs in CALLS:
            with pytest.raises(LeaseBusyError):
                task(*args, **kwargs)


def test_members_of_an_enum_are_keys() -> None:
    task = leased("charge", key="tenant", among=Tenant)(charge)
    assert task(1, Tenant.ZENITH) == "charge-zenith"
    assert task(1, "zenith") == "charge-zenith", "as JSON has it"
    with pytest.raises(UsageError, match="none of those"):
        task(1, "other")


def test_a_call_that_does_not_fit_is_refused_where_it_is_sent(app: Celery) -> None:
    app.conf.task_always_eager = False
    task = app.task(name="typed")(leased("charge")(charge))
    with pytest.raises(TypeError, match="order"):
        task.delay()
    with pytest.raises(TypeError):
        task.delay(1, "acme", "more")


def test_the_wrong_order_of_decorators_is_refused(app: Celery) -> None:
    task: Any = app.task(name="above")(charge)
    for above in (task, task.s(), functools.partial(task, 1), Proxy(lambda: task)):
        with pytest.raises(UsageError, match=r"below @app\.task"):
            leased("charge")(above)


@pytest.mark.parametrize("kind", [LeaseBusyError, CampaignTimeoutError, LeaseLostError])
def test_a_tasks_errors_reach_who_asks_for_its_result_as_what_they_are(
    app: Celery, kind: type[TakoError]
) -> None:
    """By way of Celery's JSON, which keeps a class and its args."""
    made: dict[type[TakoError], TakoError] = {
        LeaseBusyError: LeaseBusyError("charge"),
        CampaignTimeoutError: CampaignTimeoutError("charge", 2.5),
        LeaseLostError: LeaseLostError("charge", tako_sync.LossReason.TAKEN, 7, "receipt"),
    }
    app.conf.task_always_eager = False
    app.backend.store_result("id", made[kind], "FAILURE")
    with pytest.raises(kind) as caught:
        app.AsyncResult("id").get(timeout=5)
    assert type(caught.value).__name__ == kind.__name__
    assert str(caught.value) == str(made[kind])
    assert isinstance(caught.value, (LeaseBusyError, LeaseLostError))
    assert caught.value.lease == "charge"
    if isinstance(caught.value, LeaseLostError):
        assert caught.value.reason is tako_sync.LossReason.TAKEN


@pytest.mark.parametrize("tenant", ["other", "ACME", None, [], 3])
def test_a_value_that_was_not_declared_is_refused_and_the_known_ones_named(tenant: Any) -> None:
    task = leased("charge", key="tenant", among=["acme", "zenith"])(charge)
    with pytest.raises(UsageError, match="'acme', 'zenith'"):
        task(1, tenant)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": "tenant"}, "belong together"),
        ({"among": ["acme"]}, "belong together"),
        ({"key": "customer", "among": ["acme"]}, "no parameter 'customer'"),
        ({"key": "tenant", "among": []}, "at least one"),
        ({"key": "tenant", "among": ["acme", "ACME"]}, "one lease for each"),
        ({"key": "tenant", "among": [True]}, "a text, an int"),
        ({"key": "tenant", "among": [1.5]}, "a text, an int"),
        ({"busy": "wiat"}, "'raise' or 'retry' or 'skip' or 'wait'"),
        ({"on_loss": "ignore"}, "on_loss"),
        ({"on_shutdown": "die"}, "on_shutdown"),
        ({"key": "more", "among": ["acme"]}, "no parameter 'more'"),
        ({"max_retries": -1}, "max_retries"),
        ({"max_retries": "x"}, "max_retries"),
        ({"countdown": -1}, "countdown"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused_where_it_is_written(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        leased("charge", **options)(charge_all)


def test_the_arguments_of_a_call_that_fits_no_signature_are_the_callers_error() -> None:
    keys = Keys.of("charge", charge, "tenant", ["acme"])
    with pytest.raises(TypeError):
        keys.lock((1, "acme", "more"), {})


# --- Busy


def test_busy_raises_skips_or_comes_again_as_chosen(app: Celery) -> None:
    refusing = app.task(name="refusing")(leased("charge")(charge))
    skipping = app.task(name="skipping")(leased("charge", busy="skip")(charge))
    waiting = app.task(name="waiting")(leased("charge", busy="wait", timeout=0.01)(charge))
    with occupy("charge"):
        for task in (refusing, waiting):
            with pytest.raises(LeaseBusyError):
                task.apply((1,), throw=True)
        assert skipping.apply((1,), throw=True).get() is None
    assert [task.apply((1,)).get() for task in (refusing, skipping, waiting)] == ["charge"] * 3


def test_one_that_has_come_again_often_enough_fails_with_what_it_found(app: Celery) -> None:
    @app.task(name="coming-again", bind=True)
    @leased("charge", busy="retry", countdown=0, max_retries=2)
    def coming_again(self: Any) -> None:
        raise AssertionError("it is busy")

    with occupy("charge"):
        app.conf.task_always_eager = False
        with pytest.raises(LeaseBusyError):
            coming_again.apply(retries=2, throw=True)
        with pytest.raises(LeaseBusyError):
            coming_again()


def test_a_task_that_campaigns_by_itself_does_not_wait_for_ever(app: Celery) -> None:
    world = World()
    host = world.host("worker")
    allowed: list[float] = []

    @app.task(name="by-itself")
    def by_itself(timeout: float | None = None) -> None:
        try:
            Lock("inner").do(lambda ctx: None, timeout=timeout)
        except CampaignTimeoutError as error:
            allowed.append(error.timeout)

    with rebound(host.runtime):
        with world.host("other").lock("inner").hold():
            for timeout in (None, 3):
                running = world.start(lambda timeout=timeout: by_itself.apply((timeout,)))  # type: ignore[misc]
                world.advance(30)
                running.result()
            outside = world.start(lambda: Lock("inner").do(lambda ctx: "at last"))
            world.advance(100)
            assert not outside.done and allowed == [10, 3]
        world.advance(5)
        assert outside.result() == "at last"


# --- Lost


@pytest.mark.parametrize("on_loss", ["raise", "report"])
def test_finished_work_whose_lease_was_lost_fails_or_is_kept_as_chosen(
    on_loss: Any, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    host = world.host("worker")
    runs: list[str] = []

    @app.task(name="pay", autoretry_for=(TakoError,), max_retries=1, retry_backoff=False)
    @leased("charge", on_loss=on_loss)
    def pay() -> str:
        runs.append("begun")
        host.storage.always("*", fail(lambda: BackendUnavailableError("down")))
        tako_sync.current_ctx().wait(60)
        runs.append("paid")
        return "receipt"

    with rebound(host.runtime):
        running = world.start(lambda: pay.apply(retries=1, throw=True).get())
        world.advance(60)
        if on_loss == "report":
            assert running.result() == "receipt"
            assert "has finished, and keeps its result" in caplog.text
        else:
            with pytest.raises(LeaseLostError):
                running.result()
    assert runs == ["begun", "paid"]


def test_what_the_task_raises_is_what_it_fails_with_lease_or_not(app: Celery) -> None:
    @app.task(name="fails")
    @leased("charge", on_loss="report")
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails.apply(throw=True)
    assert Lock("charge").holder() is None
