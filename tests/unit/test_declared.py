"""The declaring variable is the identity: of a Singleton here, found at its first use."""

from __future__ import annotations

from typing import Any

import pytest

from tako_sync.ctx import Ctx
from tako_sync.errors import ConfigurationError, UsageError
from tako_sync.footprint import Footprint
from tako_sync.singleton import Singleton, SingletonConfig


def sweep(ctx: Ctx) -> None:
    """Assign numbers."""


def module(source: str, name: str, file: str | None = None) -> dict[str, Any]:
    """Run a module of an application."""
    namespace: dict[str, Any] = {
        "__name__": name,
        "__file__": file or f"{name}.py",
        "Singleton": Singleton,
        "SingletonConfig": SingletonConfig,
        "sweep": sweep,
    }
    exec(compile(source, namespace["__file__"], "exec"), namespace)
    return namespace


def test_the_variable_names_it() -> None:
    shop = module("assigner = Singleton(sweep)", "shop_a")
    assert shop["assigner"].name == "assigner"
    assert shop["assigner"].lease == "singleton-assigner"
    assert repr(shop["assigner"]) == "<Singleton assigner>"
    assert shop["assigner"].__doc__ == "Assign numbers."


def test_as_a_decorator_the_function_does() -> None:
    shop = module("@Singleton\ndef decorated(ctx): return 42", "shop_b")
    assert shop["decorated"].name == "decorated"
    assert shop["decorated"].fn(None) == 42


def test_so_it_does_with_a_config() -> None:
    source = """
@Singleton.configured(SingletonConfig(max_silence=60))
def watched(ctx): ...
"""
    watched = module(source, "shop_c")["watched"]
    assert watched.name == "watched"
    assert watched.config.max_silence == 60


def test_capitals_are_lowered_as_names_of_leases_have_none() -> None:
    assert module("Invoices = Singleton(sweep)", "shop_d")["Invoices"].name == "invoices"


def test_a_name_for_type_checkers_and_an_import_elsewhere_do_no_harm() -> None:
    shop = module("mailer: Singleton = Singleton(sweep)", "shop_e")
    other = {"courier": shop["mailer"]}
    assert other["courier"].name == "mailer"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("made = [Singleton(sweep)]", "has no name"),
        (
            "def make():\n    hidden = Singleton(sweep)\n    return hidden\nmade = [make()]",
            "at the top level of a module, not in a function or a class",
        ),
        ("class Shop:\n    hidden = Singleton(sweep)\nmade = [Shop.hidden]", "not in a function"),
        ("one = two = Singleton(sweep)\nmade = [one]", "several names in shop_f: one, two"),
        ("_private = Singleton(sweep)\nmade = [_private]", "'_private' is not made of"),
        ("zähler = Singleton(sweep)\nmade = [zähler]", "is not made of"),
    ],
)
def test_what_has_no_name_of_its_own_is_refused_and_told_where_it_was_made(
    source: str, why: str
) -> None:
    (made,) = module(source, "shop_f")["made"]
    with pytest.raises(ConfigurationError) as caught:
        made.name  # noqa: B018
    assert why in str(caught.value)
    assert "shop_f.py" in str(caught.value) or "is not made of" in why


def test_two_modules_that_declare_one_name_are_refused() -> None:
    first = module("reporter = Singleton(sweep)", "shop_g")
    second = module("reporter = Singleton(sweep)", "shop_h")
    assert first["reporter"].name == "reporter"
    with pytest.raises(ConfigurationError, match="shop_g and shop_h both declare"):
        second["reporter"].run()
    assert first["reporter"].name == "reporter"


def test_a_module_that_is_loaded_again_is_the_same_declaration() -> None:
    first = module("loader = Singleton(sweep)", "shop_i")
    assert first["loader"].name == "loader"
    again = module("loader = Singleton(sweep)", "shop_i")
    assert again["loader"].name == "loader"
    as_main = module("loader = Singleton(sweep)", "__main__", file="shop_i.py")
    assert as_main["loader"].name == "loader", "a program that is also imported"


def test_calling_it_says_what_to_write_instead() -> None:
    shop = module("caller = Singleton(sweep)", "shop_j")
    with pytest.raises(UsageError, match=r"caller\.run\(ctx\) .* \.fn\(ctx\) is the bare loop"):
        shop["caller"]()


@pytest.mark.parametrize("fn", [lambda: None, lambda a, b: None, 42, None])
def test_a_loop_that_takes_no_ctx_is_refused_where_it_is_declared(fn: Any) -> None:
    with pytest.raises(UsageError):
        Singleton(fn)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Singleton(sweep, concurrency=2),
        lambda: SingletonConfig(max_instances=3),
        lambda: Footprint(min=2),
        lambda: Footprint(cpu=1, replicas=2),
    ],
)
def test_what_would_scale_it_is_refused_with_the_reason(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="a Singleton is one instance with one loop"):
        make()


@pytest.mark.parametrize("cpu", [0, -1, True, "a lot", "0", "0m", float("nan"), None, ""])
def test_an_amount_of_cpu_that_is_none_is_refused(cpu: Any) -> None:
    with pytest.raises(ConfigurationError, match="cpu is a number of CPUs"):
        Footprint(cpu=cpu)


@pytest.mark.parametrize("memory", ["512", 512, "0Mi", "512 Mi", "Mi", "-1Gi", None])
def test_an_amount_of_memory_that_is_none_is_refused(memory: Any) -> None:
    with pytest.raises(ConfigurationError, match="memory is an amount such as"):
        Footprint(memory=memory)


def test_a_footprint_says_it_as_the_platforms_do() -> None:
    assert Footprint() == Footprint("1", "512Mi")
    assert Footprint(cpu=0.5).cpu == "0.5"
    assert Footprint(cpu="500m", memory="2Gi").memory == "2Gi"


@pytest.mark.parametrize("value", [0, -1, float("inf"), True, "60"])
def test_times_that_cannot_be_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_silence"):
        SingletonConfig(max_silence=value)
    with pytest.raises(ConfigurationError, match="down_after"):
        SingletonConfig(down_after=value)


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="config is a"):
        Singleton(sweep, {"max_silence": 5})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="footprint is a"):
        SingletonConfig({"cpu": 1})  # type: ignore[arg-type]
