"""The Flask extension: whose binding an application has, and what a guarded view answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flask
import pytest
import werkzeug
from flask.testing import FlaskClient

import tako_sync
from kit import World
from tako_sync.backends.memory import MemoryLease
from tako_sync.contrib.flask import Tako
from tako_sync.errors import BackendUnavailableError, ConfigurationError, UsageError
from tako_sync.lock import Lock
from tako_sync.runtime import Runtime, by_default, configure, current
from tako_sync.testing import occupy
from tako_sync.testing.faults import fail


@pytest.fixture(autouse=True)
def no_default() -> Iterator[None]:
    yield
    by_default(None)


def application(name: str = "shop", **config: Any) -> tuple[flask.Flask, Tako]:
    app = flask.Flask(name)
    app.config.update(TESTING=True, **config)
    return app, Tako(app)


class Shop:
    """An application on a fake clock, with a view under a lease."""

    def __init__(self) -> None:
        self.world = World()
        self.host = self.world.host("web")
        self.app, self.tako = application(TAKO_RUNTIME=self.host.runtime)
        self.view: Any = lambda: "done"
        self.ran: list[int] = []

        @self.app.route("/reindex", methods=["GET", "POST"])
        @self.tako.guard("reindex")
        def reindex() -> flask.typing.ResponseReturnValue:
            self.ran.append(tako_sync.current_ctx().fence)
            return self.view()  # type: ignore[no-any-return]

        @self.app.post("/patient")
        @self.tako.guard(Lock("reindex"), timeout=5)
        def patient() -> str:
            return "done"

        @self.app.post("/own-answer")
        @self.tako.guard("reindex", busy=lambda holder: (f"ask {holder and holder.owner}", 202))
        def own_answer() -> str:
            return "done"

    @property
    def client(self) -> FlaskClient:
        return self.app.test_client()


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_a_view_runs_under_its_lease_and_its_answer_is_its_own(shop: Shop) -> None:
    shop.view = lambda: ({"indexed": 3}, 201, {"X-Mine": "1"})
    answer = shop.client.post("/reindex")
    assert (answer.status_code, answer.json, answer.headers["X-Mine"]) == (201, {"indexed": 3}, "1")
    assert len(shop.ran) == 1 and Lock("reindex").bound_to(shop.host.runtime).holder() is None


def test_while_someone_else_holds_it_a_view_answers_409_with_the_holder(shop: Shop) -> None:
    with occupy("reindex", runtime=shop.host.runtime):
        answer = shop.client.post("/reindex")
        assert answer.status_code == 409 and not shop.ran
        assert answer.headers["Retry-After"] == "2"
        assert answer.json is not None and answer.json["error"] == "busy"
        assert answer.json["holder"]["fence"] > 0
    assert shop.client.post("/reindex").status_code == 200


def test_or_what_it_was_told_to_answer(shop: Shop) -> None:
    with occupy("reindex", runtime=shop.host.runtime) as occupation:
        answer = shop.client.post("/own-answer")
        holder = Lock("reindex").bound_to(shop.host.runtime).holder()
        assert holder is not None and occupation is not None
    assert (answer.status_code, answer.text) == (202, f"ask {holder.owner}")


def test_it_waits_as_long_as_it_was_told_to(shop: Shop) -> None:
    with occupy("reindex", runtime=shop.host.runtime):
        running = shop.world.start(lambda: shop.client.post("/patient").status_code)
        shop.world.advance(4)
        assert not running.done
        shop.world.advance(2)
        assert running.result() == 409


def test_a_view_that_loses_its_lease_answers_503_whatever_it_returns(shop: Shop) -> None:
    def lose() -> str:
        shop.host.storage.always("*", fail(lambda: BackendUnavailableError("down")))
        tako_sync.current_ctx().wait(60)
        return "all is well"

    shop.view = lose
    running = shop.world.start(lambda: shop.client.post("/reindex"))
    shop.world.advance(60)
    answer = running.result()
    assert answer.status_code == 503 and answer.json is not None
    assert answer.json["error"] == "lost" and "all is well" not in answer.text


def test_so_does_one_that_notices(shop: Shop) -> None:
    def lose() -> str:
        ctx = tako_sync.current_ctx()
        shop.host.storage.always("*", fail(lambda: BackendUnavailableError("down")))
        ctx.wait(60)
        ctx.check()
        return "all is well"

    shop.view = lose
    running = shop.world.start(lambda: shop.client.post("/reindex").status_code)
    shop.world.advance(60)
    assert running.result() == 503


def test_a_storage_that_does_not_say_who_holds_it_is_503_not_409(shop: Shop) -> None:
    shop.host.storage.always("*", fail(lambda: BackendUnavailableError("down")))
    running = shop.world.start(lambda: shop.client.post("/reindex"))
    shop.world.advance(30)
    answer = running.result()
    assert answer.status_code == 503 and answer.json == {"error": "unsettled", "lease": "reindex"}


def test_what_a_view_raises_is_flasks_to_answer(shop: Shop) -> None:
    def fall() -> None:
        raise ValueError("no index")

    shop.view = fall
    with pytest.raises(ValueError, match="no index"):
        shop.client.post("/reindex")
    shop.view = lambda: flask.abort(418)
    assert shop.client.post("/reindex").status_code == 418
    assert Lock("reindex").bound_to(shop.host.runtime).holder() is None


def test_a_lease_that_a_view_takes_besides_is_not_taken_for_its_own(shop: Shop) -> None:
    """Its busy is an error of the view, not a reason to say that the view has not run."""
    with occupy("other", runtime=shop.host.runtime):
        shop.view = lambda: Lock("other").do(lambda ctx: "x", timeout=0)
        with pytest.raises(tako_sync.LeaseBusyError):
            shop.client.post("/reindex")


@pytest.mark.parametrize(
    "stream",
    [
        lambda: flask.Response(flask.stream_with_context(iter(["a", "b"]))),
        lambda: (chunk for chunk in ("a", "b")),
        lambda: (flask.Response(chunk for chunk in ("a", "b")), 200),
        lambda: werkzeug.Response(chunk for chunk in ("a", "b")),
        lambda: flask.Response((chunk for chunk in ("a", "b")), direct_passthrough=True),
        lambda: lambda environ, start_response: iter([b"a"]),
        lambda: flask.abort(flask.Response(chunk for chunk in ("a", "b"))),
    ],
)
def test_a_stream_would_be_made_after_the_lease_is_given_back_and_is_refused(
    shop: Shop, stream: Any
) -> None:
    shop.view = stream
    with pytest.raises(UsageError, match=r"after its lease\s+was given back"):
        shop.client.post("/reindex")


def test_a_file_is_no_such_stream(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "index.txt").write_text("indexed")
    shop.view = lambda: flask.send_file(tmp_path / "index.txt")
    servers: tuple[dict[str, Any], ...] = ({}, {"wsgi.file_wrapper": lambda file, size=0: file})
    for environ in servers:
        with shop.client.post("/reindex", environ_overrides=environ) as answer:
            assert answer.get_data(as_text=True) == "indexed"
        part = {"Range": "bytes=2-4"}
        with shop.client.get("/reindex", environ_overrides=environ, headers=part) as answer:
            assert (answer.status_code, answer.get_data(as_text=True)) == (206, "dex")


def test_an_abort_with_a_whole_answer_goes_on(shop: Shop) -> None:
    shop.view = lambda: flask.abort(418)
    assert shop.client.post("/reindex").status_code == 418
    shop.view = lambda: flask.abort(flask.Response("later", 425))
    assert shop.client.post("/reindex").status_code == 425


@pytest.mark.parametrize("timeout", [None, 0])
def test_who_says_no_timeout_in_a_view_does_not_wait_for_ever(timeout: float | None) -> None:
    app, tako = application(TAKO_BACKEND="memory:")
    with app.app_context():
        assert current().policy.wait == 10
    app, tako = application(TAKO_BACKEND="memory:", TAKO_TIMEOUT=timeout)
    with app.app_context():
        assert tako.runtime.policy.wait == timeout


def test_two_applications_in_a_process_have_their_own_bindings() -> None:
    outer = configure(backend="memory:")
    one, one_tako = application("one", TAKO_APP="one", TAKO_BACKEND="memory:")
    two, two_tako = application("two", TAKO_APP="two", TAKO_BACKEND="memory:")
    plain, _ = application("plain")
    relock = Lock("reindex")
    with one.app_context():
        assert current() is one_tako.runtime and current().app == "one"
        with two.app_context():
            assert current() is two_tako.runtime
            with plain.app_context():
                assert current() is outer
            assert relock.try_do(lambda ctx: 1).ran
        assert current().app == "one"
    assert current() is outer


def test_without_settings_it_is_the_processs_binding_with_a_bounded_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TAKO_BACKEND", "memory:")
    app, tako = application()
    with app.app_context():
        assert tako.runtime is current() and current().policy.wait == 10
    assert current().policy.wait == 10
    mine = configure(backend="memory:")
    with app.app_context():
        assert tako.runtime is mine


def test_a_loop_that_is_started_in_a_context_has_its_binding(shop: Shop) -> None:
    namespace: dict[str, Any] = {"__name__": "m", "__file__": "m.py", "tako": tako_sync}
    namespace["fn"] = lambda ctx: ctx.wait(100)
    exec("flask_loop = tako.Singleton(fn)", namespace)
    loop: tako_sync.Singleton = namespace["flask_loop"]
    with shop.app.app_context():
        runner = loop.start()
    shop.world.advance(1)
    shop.app.register_blueprint(shop.tako.health([loop]))
    answer = shop.client.get("/tako/health")
    assert answer.status_code == 200 and answer.json is not None
    assert answer.json["flask_loop"]["state"] == "healthy"
    assert shop.client.get("/tako/live").status_code == 200
    runner.stop(timeout=0)
    shop.world.advance(10)
    assert shop.client.get("/tako/health").status_code == 503


def test_the_busy_view_of_one_thread_is_the_running_one_of_another(tmp_path: Path) -> None:
    """The seed's TestReindexCollapsesWhileHeld, on the real clock."""
    app, tako = application(TAKO_BACKEND=f"sqlite:///{tmp_path}/leases.sqlite3")
    inside, go_on = threading.Event(), threading.Event()

    @app.route("/reindex", methods=["GET", "POST"])
    @tako.guard("reindex")
    def reindex() -> str:
        inside.set()
        assert go_on.wait(20)
        return "done"

    first: list[int] = []
    thread = threading.Thread(
        target=lambda: first.append(app.test_client().post("/reindex").status_code)
    )
    thread.start()
    assert inside.wait(20)
    assert app.test_client().post("/reindex").status_code == 409
    go_on.set()
    thread.join(20)
    assert first == [200]


# --- What is written wrongly


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"TAKO_TIME_OUT": 3}, "no setting TAKO_TIME_OUT"),
        ({"TAKO_TIMEOUT": -1}, "TAKO_TIMEOUT"),
        ({"TAKO_APP": "My Shop"}, "My Shop"),
        ({"TAKO_BACKEND": "ftp://x"}, "ftp"),
        ({"TAKO_POLICY": 30}, "TAKO_POLICY is a tako_sync.LeasePolicy"),
        ({"TAKO_RUNTIME": "memory:"}, "TAKO_RUNTIME is a tako_sync.Runtime"),
        ({"TAKO_RUNTIME": Runtime(MemoryLease()), "TAKO_APP": "x"}, "stands alone"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_where_the_application_is_bound(
    config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        application(**config)


def test_misuse_of_the_extension_is_told() -> None:
    app, tako = application()
    with pytest.raises(UsageError, match="once"):
        tako.init_app(app)
    with pytest.raises(UsageError, match="no current application"):
        _ = tako.runtime
    with flask.Flask("other").app_context(), pytest.raises(UsageError, match="init_app"):
        _ = tako.runtime
    with pytest.raises(ConfigurationError):
        tako.guard("Re Index")
    with pytest.raises(UsageError, match="or its name"):
        tako.guard(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="timeout"):
        tako.guard("reindex", timeout=-1)

    async def view() -> str:
        return ""

    with pytest.raises(UsageError, match="asynchronous"):
        tako.guard("reindex")(view)  # type: ignore[arg-type]
