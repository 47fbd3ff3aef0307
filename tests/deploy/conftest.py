"""An application to deploy, written as a module."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tako_sync import declared
from tako_sync.deploy import Target

_numbers = itertools.count()

Declare = Callable[[str], ModuleType]


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
    """Return what makes a module of a text and imports it: each is an application of its own."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def make(text: str) -> ModuleType:
        monkeypatch.setattr(declared, "_declared", {})
        name = f"deployed_{next(_numbers)}"
        head = "import tako_sync as tako\n\ndef body(ctx):\n    return None\n\n"
        (tmp_path / f"{name}.py").write_text(head + text)
        made.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def target() -> Target:
    return Target(
        project="shop-prod-1234",
        region="europe-west1",
        image="europe-docker.pkg.dev/shop-prod-1234/shop/app:7",
        app="shop",
        env="prod",
        backend="gs://shop-tako",
        service_account="loops@shop-prod-1234.iam.gserviceaccount.com",
        environ={"LOG_LEVEL": "info"},
    )
