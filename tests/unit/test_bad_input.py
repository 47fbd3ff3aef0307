"""Bad input is refused where it is written, and the text of the error says what to write."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tako_sync as tako
from tako_sync import runtime as binding
from tako_sync.backends.memory import MemoryLease
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    ConfigurationError,
    LeaseLostError,
    LossReason,
    TakoError,
    UsageError,
)
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime
from tako_sync.tenure import note_loss
from tako_sync.testing.clock import FakeClock
from tako_sync.testing.faults import FaultyBackend

WRONG_CHARACTERS = "is not made of a-z, 0-9, '.', '_' and '-', beginning with a letter or a digit"


@pytest.fixture
def storage() -> FaultyBackend:
    return FaultyBackend(MemoryLease(FakeClock()), prompt=True)


@pytest.fixture
def runtime(storage: FaultyBackend) -> Iterator[Runtime]:
    """The binding of this process; afterwards, the storage must not have been asked anything."""
    runtime = Runtime(storage, clock=FakeClock())
    with binding.rebound(runtime):
        yield runtime
    assert not storage.calls, "bad input reached the storage"


def refusal(call: Callable[[], object], kind: type[TakoError] = ConfigurationError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


# --- Names -------------------------------------------------------------------------------------


ODD_NAMES = [
    "", " ", ".", "..", "...", "-a", "_a", ".a", "a b", " a", "a ", "a/b", "/a", "a//b", "a/../b",
    "a\nb", "a\rb", "a\n", "a\r\n", "A", "Reindex", "caf\u00e9", "cafe\u0301", "#", "a#b", "?",
    "a?b", "%2F", "a%2fb", ".well-known/acme-challenge/x", "a\x00b", "a\ud800", "\u0661", "a:b",
    "a\\b", "a*", "\u202ea",
]  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_an_odd_name_is_refused_when_the_lock_is_written(name: str) -> None:
    """'..' in an object's URL would reach the bucket itself."""
    assert refusal(lambda: Lock(name)) == f"a lease's name {name!r} {WRONG_CHARACTERS}"


@pytest.mark.parametrize("name", [None, b"reindex", 7, 1.5, True, ["reindex"], ("a",), Lock("a")])
def test_a_name_that_is_no_string_is_refused(name: Any) -> None:
    assert refusal(lambda: Lock(name)) == f"a lease's name is a string, not {name!r}"


@pytest.mark.parametrize("length", [101, 1025, 100_000])
def test_a_name_that_is_too_long_is_refused_without_repeating_all_of_it(length: int) -> None:
    text = refusal(lambda: Lock("x" * length))
    assert text == f"a lease's name has {length} characters, 100 at most: '{'x' * 20}'…"


@pytest.mark.parametrize("prefix", ["singleton-", "cron-", "deploy-", "tako-"])
def test_the_frameworks_own_prefixes_are_refused(prefix: str) -> None:
    expected = "begins with '" + prefix + "', which is kept for the framework's own leases"
    assert refusal(lambda: Lock(f"{prefix}x")) == f"the name '{prefix}x' {expected}"
    assert refusal(lambda: Lock(prefix)) == f"the name {prefix!r} {expected}"
    assert Lock(prefix[:-1]).name == prefix[:-1], "only with the dash"


@pytest.mark.parametrize("name", ["a", "7", "x" * 100, "a.b_c-d", "a..b", "0.", "a-", "reindex"])
def test_a_good_name_is_kept_as_it_is_written(name: str) -> None:
    assert Lock(name).name == name


def test_a_name_that_is_a_subclass_of_str_is_a_name() -> None:
    class Name(str):
        pass

    assert Lock(Name("reindex")).name == "reindex"


@pytest.mark.parametrize("what", ["app", "env"])
@pytest.mark.parametrize("value", ["", "..", "Shop", "a/b", "a b", "é"], ids=ascii)
def test_an_odd_app_or_env_is_refused_by_configure(what: str, value: str) -> None:
    text = refusal(lambda: tako.configure(backend="memory:", **{what: value}))  # type: ignore[arg-type]
    assert text == f"{what} {value!r} {WRONG_CHARACTERS}"


@pytest.mark.parametrize("what", ["app", "env"])
@pytest.mark.parametrize("value", [7, b"shop", True])
def test_an_app_or_env_that_is_no_string_is_refused_by_configure(what: str, value: Any) -> None:
    text = refusal(lambda: tako.configure(backend="memory:", **{what: value}))
    assert text == f"{what} is a string, not {value!r}"


@pytest.mark.parametrize("what", ["app", "env"])
def test_an_app_or_env_that_is_too_long_is_refused(what: str) -> None:
    text = refusal(lambda: tako.configure(backend="memory:", **{what: "s" * 101}))  # type: ignore[arg-type]
    assert text == f"{what} has 101 characters, 100 at most: '{'s' * 20}'…"


# --- Options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"ttl": 30}, {"timeout": 5}, {"backend": "memory:"}, {"x": 1}])
def test_a_lock_accepts_no_options_and_says_so_with_the_seeds_words(options: Any) -> None:
    text = refusal(lambda: Lock("reindex", **options), UsageError)
    assert text.startswith("Lock accepts no options: the lease policy is framework-owned")
    assert "tako_sync.configure(policy=...)" in text, "it says who may set it, and where"


def test_a_lock_accepts_no_second_positional_argument() -> None:
    text = refusal(lambda: Lock("reindex", 30), UsageError)
    assert text.startswith("Lock accepts no options: the lease policy is framework-owned")


def test_options_are_refused_before_the_name_is_looked_at() -> None:
    """The more surprising rule first: who reads it need not read on."""
    assert "accepts no options" in refusal(lambda: Lock("..", ttl=1), UsageError)


def test_a_policy_knows_no_other_timings() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'interval'"):
        LeasePolicy(interval=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional argument"):
        LeasePolicy(30)


def test_configure_knows_no_other_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'ttl'"):
        tako.configure(ttl=30)  # type: ignore[call-arg]


# --- Timings -----------------------------------------------------------------------------------

NOT_NUMBERS: list[Any] = [True, False, "30", b"30", None, [30], 30j]
TIMINGS = ["ttl", "poll"]


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_a_timing_that_is_no_number_is_refused(timing: str, value: Any) -> None:
    text = refusal(lambda: LeasePolicy(**{timing: value}))
    assert text == f"{timing} is a number of seconds, not {value!r}"


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, 0.0, -0.0, -1, -0.5])
def test_a_timing_that_is_no_span_of_time_is_refused(timing: str, value: float) -> None:
    text = refusal(lambda: LeasePolicy(**{timing: value}))
    assert text == f"{timing} is a finite number of seconds above 0, not {value!r}"


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_timedelta_is_refused_with_what_to_write_instead(timing: str) -> None:
    text = refusal(lambda: LeasePolicy(**{timing: timedelta(seconds=30)}))  # type: ignore[arg-type]
    assert text == (
        f"{timing} is a number of seconds, not a timedelta: write {timing}=delta.total_seconds()"
    )


@pytest.mark.parametrize("ttl", [1e-9, 0.001, 0.1, 0.199])
def test_a_ttl_too_short_for_two_renewals_is_refused_with_the_bound(ttl: float) -> None:
    expected = f"ttl={ttl!r} leaves no room for two renewals: 0.2 s at least"
    assert refusal(lambda: LeasePolicy(ttl=ttl)) == expected


@pytest.mark.parametrize("ttl", [3600.001, 86400, 1e9, 10**30])
def test_a_ttl_that_outlives_a_crash_by_hours_is_refused_with_the_bound(ttl: float) -> None:
    expected = f"ttl={ttl!r} would keep others out too long after a crash: 3600 s at most"
    assert refusal(lambda: LeasePolicy(ttl=ttl)) == expected


@pytest.mark.parametrize("ttl", [0.2, 0.5, 1, 2.75, 30, 3600, 3600.0])
def test_a_ttl_within_the_bounds_is_kept_fractions_too(ttl: float) -> None:
    policy = LeasePolicy(ttl=ttl)
    assert policy.ttl == ttl
    assert policy.heartbeat == pytest.approx(ttl / 3)
    assert 2 * policy.heartbeat + policy.request_timeout <= ttl - policy.margin(0.0)


@pytest.mark.parametrize("value", [-0.1, 1, 1.0, 5, math.nan, math.inf, True, "0.25", None])
def test_a_jitter_that_is_no_share_is_refused(value: Any) -> None:
    text = refusal(lambda: LeasePolicy(jitter=value))
    assert text == f"jitter is a share from 0 up to 1, not {value!r}"


def test_a_ttl_that_does_not_fit_the_storages_clock_is_refused_by_configure(
    storage: FaultyBackend,
) -> None:
    """A margin that ate the ttl would leave nothing to hold."""
    storage.clock_skew = 5.0
    expected = (
        "ttl=30 is too short for a storage whose clock is off by up to 5 s: two renewals do not "
        "fit before the holder must give up"
    )
    assert refusal(lambda: tako.configure(backend=storage)) == expected
    assert tako.configure(backend=storage, policy=LeasePolicy(ttl=90)).terms.margin == 10.09


TIMED: dict[str, Callable[[Any], object]] = {
    "do": lambda timeout: Lock("reindex").do(lambda ctx: None, timeout=timeout),
    "hold": lambda timeout: Lock("reindex").hold(timeout=timeout),
    "guard": lambda timeout: Lock("reindex").guard(timeout=timeout),
    "child": lambda timeout: Ctx.background(FakeClock()).child(timeout=timeout),
}


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("method", TIMED)
@pytest.mark.parametrize("timeout", [True, False, "10", b"1", [], 1j])
def test_a_timeout_that_is_no_number_is_refused_before_the_storage_is_asked(
    method: str, timeout: Any
) -> None:
    text = refusal(lambda: TIMED[method](timeout))
    assert text == f"timeout is a number of seconds, not {timeout!r}"


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("method", TIMED)
@pytest.mark.parametrize("timeout", [math.nan, math.inf, -math.inf, -1, -1e-9])
def test_a_timeout_that_is_no_span_of_time_is_refused_before_the_storage_is_asked(
    method: str, timeout: float
) -> None:
    text = refusal(lambda: TIMED[method](timeout))
    assert text == f"timeout is a finite number of seconds from 0 up, not {timeout!r}"


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("method", TIMED)
def test_a_timedelta_as_timeout_is_refused_with_what_to_write(method: str) -> None:
    text = refusal(lambda: TIMED[method](timedelta(seconds=10)))
    assert text == (
        "timeout is a number of seconds, not a timedelta: write timeout=delta.total_seconds()"
    )


@pytest.mark.parametrize("value", [math.nan, -1, "5", True, None, timedelta(seconds=5)])
@pytest.mark.parametrize("method", ["ensure", "wait"])
def test_ensure_and_wait_refuse_what_is_no_span_of_time(method: str, value: Any) -> None:
    ctx = Ctx.background(FakeClock())
    with pytest.raises(ConfigurationError, match=r"^seconds is a (finite )?number of seconds"):
        getattr(ctx, method)(value)


# --- Backends and URLs -------------------------------------------------------------------------

URLS = {
    "redis": "backend 'redis' is no URL: write memory:, sqlite:///absolute/path or gs://bucket",
    "memory": "backend 'memory' is no URL: write memory:, sqlite:///absolute/path or gs://bucket",
    "": "backend '' is no URL: write memory:, sqlite:///absolute/path or gs://bucket",
    "/var/lib/x.sqlite3": (
        "backend '/var/lib/x.sqlite3' is no URL: "
        "write memory:, sqlite:///absolute/path or gs://bucket"
    ),
    "memory:x": "backend 'memory:x': nothing follows memory:",
    "memory://": "backend 'memory://': nothing follows memory:",
    "sqlite:": "backend 'sqlite:': write sqlite:///absolute/path",
    "sqlite:x.db": "backend 'sqlite:x.db': write sqlite:///absolute/path",
    "sqlite://x.db": "backend 'sqlite://x.db': write sqlite:///absolute/path",
    "sqlite:///": "backend 'sqlite:///': write sqlite:///absolute/path",
    "sqlite:////": "backend 'sqlite:////': write sqlite:///absolute/path",
    "redis://localhost": (
        "backend 'redis://localhost': nobody knows the scheme 'redis'; there are memory:, "
        "sqlite:///absolute/path and gs://bucket, and what installed packages register as "
        "tako_sync.backends"
    ),
    "MEMORY:": (
        "backend 'MEMORY:': nobody knows the scheme 'MEMORY'; there are memory:, "
        "sqlite:///absolute/path and gs://bucket, and what installed packages register as "
        "tako_sync.backends"
    ),
    "://": (
        "backend '://': nobody knows the scheme ''; there are memory:, "
        "sqlite:///absolute/path and gs://bucket, and what installed packages register as "
        "tako_sync.backends"
    ),
}


@pytest.mark.parametrize("url", URLS)
def test_a_url_that_names_no_backend_is_refused_by_configure(url: str) -> None:
    assert refusal(lambda: tako.configure(backend=url)) == URLS[url]


@pytest.mark.parametrize("backend", [7, object, MemoryLease, {"memory": 1}])
def test_a_backend_that_is_none_is_refused_by_configure(backend: Any) -> None:
    """The class in place of an instance is the usual slip."""
    text = refusal(lambda: tako.configure(backend=backend))
    assert text == f"backend is a LeaseBackend, not {backend!r}"


def test_good_urls_open_nothing(tmp_path: Path) -> None:
    path = tmp_path / "no" / "such" / "folder.sqlite3"
    runtime = tako.configure(backend=f"sqlite://{path.as_posix()}")
    assert runtime.backend.describe().endswith(path.as_posix())
    assert not path.parent.exists(), "nothing is made before the first use"
    assert tako.configure(backend="memory:").backend.describe() == "memory:"


# --- configure ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [30, {"ttl": 30}, LeasePolicy, "30"])
def test_a_policy_that_is_none_is_refused(policy: Any) -> None:
    text = refusal(lambda: tako.configure(backend="memory:", policy=policy))
    assert text == f"policy is a LeasePolicy, not {policy!r}"


@pytest.mark.parametrize("clock", [0, FakeClock, object()])
def test_a_clock_that_is_none_is_refused(clock: Any) -> None:
    text = refusal(lambda: tako.configure(backend="memory:", clock=clock))
    assert text == f"clock is a Clock, not {clock!r}"


@pytest.mark.parametrize("note", [7, b"pod 7", None])
def test_a_note_that_is_no_text_is_refused(note: Any) -> None:
    text = refusal(lambda: tako.configure(backend="memory:", note=note))
    assert text == f"note is a str, not {note!r}"


def test_a_note_that_is_a_novel_is_refused() -> None:
    text = refusal(lambda: tako.configure(backend="memory:", note="x" * 501))
    assert text == "note is a text of at most 500 characters"
    assert tako.configure(backend="memory:", note="x" * 500).terms.note == "x" * 500


@pytest.mark.parametrize("listener", [7, "print", None])
def test_a_listener_that_cannot_be_called_is_refused(listener: Any) -> None:
    text = refusal(lambda: tako.configure(backend="memory:", listeners=[listener]))
    assert text == f"a listener is a function of an event, not {listener!r}"


def test_a_listener_outside_a_list_is_refused_with_what_to_write() -> None:
    text = refusal(lambda: tako.configure(backend="memory:", listeners=print))  # type: ignore[arg-type]
    assert text.startswith("listeners is a list of functions, not ")
    assert text.endswith(": write listeners=[fn]")


def test_a_refused_configure_leaves_the_binding_as_it_was() -> None:
    before = tako.configure(app="shop", backend="memory:")
    refusal(lambda: tako.configure(app="..", backend="memory:"))
    refusal(lambda: tako.configure(backend="nonsense"))
    assert binding.current() is before


# --- The environment ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["APP", "ENV"])
def test_an_odd_name_in_the_environment_is_refused_at_first_use_naming_the_variable(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Who did not write `app=` anywhere would look for it in vain."""
    monkeypatch.setenv("TAKO_BACKEND", "memory:")
    monkeypatch.setenv(f"TAKO_{what}", "My Shop")
    lock = Lock("reindex")  # not yet
    text = refusal(lambda: lock.try_do(lambda ctx: None))
    assert text == f"TAKO_{what} 'My Shop' {WRONG_CHARACTERS}"


def test_a_malformed_url_in_the_environment_is_refused_at_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TAKO_BACKEND", "leases.sqlite3")
    lock = Lock("reindex")
    expected = (
        "backend 'leases.sqlite3' is no URL: write memory:, sqlite:///absolute/path or gs://bucket"
    )
    assert expected in refusal(lock.holder)
    assert expected in refusal(lambda: lock.do(lambda ctx: None)), "and at each use after it"


def test_what_configure_is_told_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"BACKEND": "nonsense", "APP": "..", "ENV": "", "PROJECT": "x"}.items():
        monkeypatch.setenv(f"TAKO_{name}", value)
    runtime = tako.configure(app="shop", env="prod", backend="memory:")
    assert (runtime.app, runtime.env, runtime.backend.describe()) == ("shop", "prod", "memory:")


def test_the_environment_fills_in_what_configure_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"BACKEND": "memory:", "APP": "shop", "ENV": "pr-42"}.items():
        monkeypatch.setenv(f"TAKO_{name}", value)
    runtime = tako.configure(note="pod 7")
    assert str(runtime.identity("reindex")) == "shop/pr-42/reindex"
    assert runtime.backend.describe() == "memory:"


def test_a_project_names_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKO_PROJECT", "gallery")
    asked: list[str] = []

    def connect(url: str) -> MemoryLease:
        asked.append(url)
        return MemoryLease()

    monkeypatch.setattr(binding, "connect", connect)
    binding.current()
    monkeypatch.setenv("TAKO_BACKEND", "memory:")
    tako.configure()
    assert asked == ["gs://gallery-tako", "memory:"], "TAKO_BACKEND goes before TAKO_PROJECT"


PLATFORMS = {
    "K_SERVICE": "Cloud Run",
    "CLOUD_RUN_JOB": "Cloud Run",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
    "GAE_ENV": "App Engine",
    "GAE_SERVICE": "App Engine",
    "ECS_CONTAINER_METADATA_URI": "ECS",
    "ECS_CONTAINER_METADATA_URI_V4": "ECS",
    "DYNO": "Heroku",
}


@pytest.mark.parametrize("variable", PLATFORMS)
def test_the_default_is_refused_where_it_would_exclude_nobody(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "something")
    expected = (
        f"no backend is configured, and this is {PLATFORMS[variable]} ({variable} is set): a file "
        "on one machine would exclude nobody on the others. Name a storage that all of them "
        "share: set TAKO_BACKEND=gs://<bucket>, or call "
        'tako_sync.configure(backend="gs://<bucket>")'
    )
    lock = Lock("reindex")  # at first use, not when it is declared
    assert refusal(lambda: lock.try_do(lambda ctx: None)) == expected
    assert refusal(lambda: tako.configure(app="shop")) == expected
    assert tako.configure(backend="memory:").app == "app", "what is named is not refused"


def test_every_platform_that_is_refused_is_tried_here() -> None:
    assert binding._SEVERAL_MACHINES == PLATFORMS


def test_a_platforms_variable_that_is_empty_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DYNO", "")
    assert binding.current().backend.describe().startswith("sqlite:")


# --- The default -------------------------------------------------------------------------------


def test_the_default_is_a_file_of_the_users_and_one_line_says_so_at_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    path = state / "tako_sync" / "leases.sqlite3"
    lock = Lock("reindex")
    assert not caplog.records, "not when a lock is declared"
    with caplog.at_level(logging.INFO, "tako_sync"):
        assert lock.holder() is None
        assert lock.try_do(lambda ctx: 7).value == 7
    (line,) = caplog.records
    assert (line.levelno, line.name) == (logging.WARNING, "tako_sync")
    assert line.getMessage() == (
        f"no backend is configured: leases of app/dev are kept in sqlite://{path.as_posix()} and "
        "exclude the processes of this user on this machine only; set TAKO_BACKEND or call "
        "tako_sync.configure()"
    )
    assert path.is_file()


def test_the_default_lies_below_the_home_folder_where_no_state_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / ".local" / "state" / "tako_sync" / "leases.sqlite3"
    assert binding.current().backend.describe() == f"sqlite://{expected.as_posix()}"
    assert not (tmp_path / ".local").exists(), "nothing is made before the first request"


PROGRAM = """
import sys
import tako_sync as tako
from tako_sync import runtime
relock = tako.Lock("reindex")
other = tako.Lock.__name__
@relock.guard(busy="skip")
def refresh(): ...
assert runtime._bound is None
assert "sqlite3" not in sys.modules
print("quiet so far")
"""


def test_nothing_is_resolved_opened_or_logged_at_import_and_declaration(tmp_path: Path) -> None:
    """A module that declares locks must import where nothing is configured yet, or wrongly."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TAKO_")}
    root = str(Path(tako.__file__).parents[1])
    environ |= {
        "DYNO": "web.1", "TAKO_BACKEND": "nonsense", "TAKO_APP": "..", "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": root,
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("quiet so far\n", "", 0)
    assert not list(tmp_path.iterdir())


# --- Bodies ------------------------------------------------------------------------------------


def none_at_all() -> None: ...


def one(ctx: Ctx) -> None: ...


def two(ctx: Ctx, other: int) -> None: ...


def keyword_only(*, ctx: Ctx) -> None: ...


def one_and_a_needed_keyword(ctx: Ctx, *, other: int) -> None: ...


def defaults(ctx: Ctx, other: int = 1, *, third: int = 2) -> None: ...


def anything(*args: object, **kwargs: object) -> None: ...


@functools.wraps(two)
def wrapper_of_two(ctx: Ctx) -> None: ...


@functools.wraps(one)
def wrapper_of_one() -> None: ...


class Job:
    def __init__(self, ctx: Ctx) -> None: ...

    def run(self, ctx: Ctx) -> None: ...

    def run_all(self) -> None: ...

    @classmethod
    def made(cls, ctx: Ctx) -> None: ...

    @classmethod
    def made_of_none(cls) -> None: ...

    @staticmethod
    def plain(ctx: Ctx) -> None: ...

    @staticmethod
    def plain_of_none() -> None: ...


class NoArgument:
    def __call__(self) -> None: ...


class OneArgument:
    def __call__(self, ctx: Ctx) -> None: ...


JOB = Job(Ctx.background(FakeClock()))

UNFIT: dict[str, tuple[Any, str]] = {
    "function of none": (none_at_all, "none_at_all"),
    "function of two": (two, "two"),
    "keyword only": (keyword_only, "keyword_only"),
    "needed keyword": (one_and_a_needed_keyword, "one_and_a_needed_keyword"),
    "wrapper of none": (wrapper_of_one, "one"),
    "lambda of none": (lambda: None, "<lambda>"),
    "lambda of two": (lambda a, b: None, "<lambda>"),
    "partial of none left": (functools.partial(one, 1), ""),  # type: ignore[arg-type]
    "partial of two left": (functools.partial(two), ""),
    "bound method of none": (JOB.run_all, "Job.run_all"),
    "unbound method": (Job.run, "Job.run"),
    "classmethod of none": (Job.made_of_none, "Job.made_of_none"),
    "staticmethod of none": (Job.plain_of_none, "Job.plain_of_none"),
    "class of none": (NoArgument, "NoArgument"),
    "callable of none": (NoArgument(), ""),
    "builtin of two": (divmod, "divmod"),
    "builtin of none": (globals, "globals"),
    "builtin method of none": ([].clear, "list.clear"),
}

FIT: dict[str, Any] = {
    "function": one,
    "defaults": defaults,
    "anything": anything,
    "wrapper of two": wrapper_of_two,
    "lambda": lambda ctx: None,
    "lambda with default": lambda ctx, other=1: None,
    "partial of two": functools.partial(two, other=2),
    "partial of a partial": functools.partial(functools.partial(two, other=2)),
    "bound method": JOB.run,
    "classmethod": Job.made,
    "staticmethod": Job.plain,
    "class": Job,
    "callable": OneArgument(),
    "builtin function": repr,
    "builtin class": str,
    "builtin method": [].append,
    "builtin without a signature": type,
}

CALLS: dict[str, Callable[[Any], object]] = {
    "do": lambda fn: Lock("reindex").do(fn),
    "try_do": lambda fn: Lock("reindex").try_do(fn),
}


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("method", CALLS)
def test_a_body_that_cannot_take_the_ctx_is_refused_before_the_campaign(
    method: str, case: str
) -> None:
    fn, name = UNFIT[case]
    text = refusal(lambda: CALLS[method](fn), UsageError)
    assert text == (
        f"{text.split(' cannot be called')[0]} cannot be called with the ctx as its one argument: "
        "write `def body(ctx): ...`, or lambda ctx: ... around it; guard() keeps a function's "
        "own arguments"
    )
    assert name in text.split(" cannot be called")[0], "the message names the function"


@pytest.mark.parametrize("case", FIT)
@pytest.mark.parametrize("method", CALLS)
def test_a_body_that_can_take_the_ctx_is_accepted(method: str, case: str) -> None:
    runtime = Runtime(MemoryLease(clock := FakeClock()), clock=clock)
    with binding.rebound(runtime):
        CALLS[method](FIT[case])


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("fn", [None, 7, "rebuild", [none_at_all]])
def test_a_body_that_is_no_function_is_refused(fn: Any) -> None:
    for call in (*CALLS.values(), Lock("reindex").guard(busy="skip")):
        text = refusal(functools.partial(call, fn), UsageError)
        assert text == f"the body is a function, not {fn!r}"


def test_the_result_of_a_call_in_place_of_the_function_is_refused(runtime: Runtime) -> None:
    """`lock.do(rebuild())`, the usual slip."""
    text = refusal(lambda: Lock("reindex").do(none_at_all()), UsageError)  # type: ignore[arg-type]
    assert text == "the body is a function, not None"


@pytest.mark.usefixtures("runtime")
def test_a_ctx_that_is_none_is_refused_by_each_method() -> None:
    lock, event = Lock("reindex"), object()
    for call in (
        lambda: lock.do(one, ctx=event),  # type: ignore[arg-type]
        lambda: lock.try_do(one, ctx=event),  # type: ignore[arg-type]
        lambda: lock.hold(ctx=event),  # type: ignore[arg-type]
    ):
        assert refusal(call, UsageError) == f"ctx is a tako_sync.Ctx, not {event!r}"


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("busy", ["ignore", "", None, True, "WAIT"])
def test_a_guard_knows_three_answers_to_busy(busy: Any) -> None:
    text = refusal(lambda: Lock("reindex").guard(busy=busy))
    assert text == f"busy is 'wait', 'skip' or 'raise', not {busy!r}"


@pytest.mark.usefixtures("runtime")
def test_breaking_wants_what_holder_showed() -> None:
    lock = Lock("reindex")
    expected = "give what Lock.holder() returned, or its version"
    assert refusal(lock.break_, UsageError) == expected
    assert refusal(lambda: lock.break_(None), UsageError) == expected
    text = refusal(lambda: lock.break_("host:1:abc"), UsageError)  # type: ignore[arg-type]
    assert text == "holder is what Lock.holder() returned, not 'host:1:abc'"
    text = refusal(lambda: lock.request_handover(None), UsageError)  # type: ignore[arg-type]
    assert text == expected


# --- The errors themselves ---------------------------------------------------------------------


def test_bad_input_is_also_what_python_calls_it() -> None:
    """A framework that turns ValueError into a 400 need not know tako_sync."""
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(UsageError, TypeError)
    assert issubclass(ConfigurationError, TakoError)
    assert issubclass(UsageError, TakoError)


def test_an_error_of_bad_input_survives_pickling() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Lock("..")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (ConfigurationError, str(caught.value))


def test_a_loss_reaches_another_process_even_if_the_bodys_value_cannot() -> None:
    for value, arrives in ((42, 42), (threading.Lock(), None), (lambda: None, None)):
        error = LeaseLostError("reindex", LossReason.TAKEN, 7, value)
        again = pickle.loads(pickle.dumps(error))
        assert (again.reason, again.fence, again.value) == (LossReason.TAKEN, 7, arrives)
        assert copy.copy(error).value is value


def test_the_refusals_come_from_the_line_that_is_wrong() -> None:
    """The traceback ends one or two frames below the user's call, not in a thread."""
    with pytest.raises(ConfigurationError) as caught:
        Lock("..")
    assert caught.traceback[0].path == Path(inspect.getfile(inspect.currentframe()))  # type: ignore[arg-type]
    assert len(caught.traceback) <= 4


# --- What is noticed only when it is there ------------------------------------------------------


def _generator(ctx: Ctx) -> Iterator[int]:
    yield 1


async def _coroutine(ctx: Ctx) -> int:
    return 1


async def _async_generator(ctx: Ctx) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("deferred", [_generator, _coroutine, _async_generator])
def test_a_body_that_returns_work_still_to_be_done_is_refused(
    deferred: Callable[[Ctx], Any],
) -> None:
    def hidden(ctx: Ctx) -> Any:
        return deferred(ctx)

    tako.configure(backend="memory:")
    lock = Lock("reindex")
    ways: list[Callable[[], object]] = [
        lambda: lock.do(hidden),
        lambda: lock.try_do(hidden),
        lock.guard(lambda: deferred(tako.current_ctx())),
    ]
    for way in ways:
        text = refusal(way, UsageError)
        assert "whose work would be done after the lease is given back" in text
    assert lock.holder() is None


def test_guard_says_what_it_cannot_guard() -> None:
    lock: Any = Lock("reindex")
    assert refusal(lambda: lock.guard(staticmethod(print)), UsageError) == (
        "write @staticmethod above @lock.guard, so that guard() sees the function"
    )
    assert refusal(lambda: lock.guard(classmethod(print)), UsageError) == (
        "write @classmethod above @lock.guard, so that guard() sees the function"
    )
    assert refusal(lambda: lock.guard(Counter), UsageError) == (
        "guard() is for functions and methods, not for the class Counter"
    )


def test_a_ctx_refuses_what_is_no_function_and_no_clock() -> None:
    ctx: Any = Ctx.background()
    refusals: dict[str, Callable[[], object]] = {
        "on_cancel takes a function, not None": lambda: ctx.on_cancel(None),
        "wrap takes a function, not 1": lambda: ctx.wrap(1),
        "clock is a tako_sync.abc.Clock, not 1": lambda: ctx.background(clock=1),
    }
    for text, call in refusals.items():
        assert refusal(call, UsageError) == text


@pytest.mark.parametrize("url", ["sqlite:///~/x.db", "sqlite:///x.db?mode=ro", "sqlite:////x#1"])
def test_after_sqlite_stands_a_path_alone(url: str) -> None:
    assert "stands the absolute path alone" in refusal(lambda: tako.configure(backend=url))


def test_a_path_in_place_of_a_backend_is_told_what_to_write(tmp_path: Path) -> None:
    backend: Any = tmp_path / "x.db"
    assert "write sqlite:///absolute/path, or SqliteLease(path)" in refusal(
        lambda: tako.configure(backend=backend)
    )


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("APP", "ENV", "PROJECT"):
        monkeypatch.setenv(f"TAKO_{name}", "")
    monkeypatch.setenv("TAKO_BACKEND", "memory:")
    assert str(tako.configure().identity("x")) == "app/dev/x"


def test_a_wrong_project_is_refused_by_its_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKO_PROJECT", "My Project")
    assert refusal(tako.configure).startswith("TAKO_PROJECT 'My Project'")


def test_a_block_that_was_left_or_never_entered_cannot_be_left() -> None:
    tako.configure(backend="memory:")
    hold = Lock("reindex").hold()
    with pytest.raises(UsageError, match="is not entered, or was left"):
        hold.__exit__(None, None, None)
    hold = Lock("reindex").hold()
    with hold:
        pass
    with pytest.raises(UsageError, match="is not entered, or was left"):
        hold.__exit__(None, None, None)


def test_an_error_that_takes_no_note_comes_out_of_a_lost_hold_all_the_same() -> None:
    class Deaf(Exception):
        def add_note(self, note: str) -> None:
            raise RuntimeError("no room")

    error = Deaf()
    note_loss(error, LeaseLostError("reindex", LossReason.TAKEN, 7))
