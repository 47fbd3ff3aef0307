"""What is installed, what an import costs, and that the floors cover every module."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import tako_sync

ROOT = Path(__file__).parents[1]
PACKAGE = Path(tako_sync.__file__).parent

LATER = (
    "celery", "click", "django", "flask", "google", "pytest", "rich", "sqlite3", "tenacity",
)  # fmt: skip
"""What is imported at its use, and not before."""


def setup_cfg() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    return parsed


def loaded_by(program: str) -> set[str]:
    """Return the modules that are loaded once ``program`` has run in a fresh interpreter."""
    program += "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True
    )
    return set(json.loads(ran.stdout))


def test_the_version_is_the_same_everywhere() -> None:
    """In the module, in setup.cfg, and in what is installed (if not: run make again)."""
    assert tako_sync.__version__ == setup_cfg()["metadata"]["version"]
    assert tako_sync.__version__ == metadata.version("tako-sync")


def test_pyproject_has_no_project_table() -> None:
    """Beside the metadata in setup.cfg, a partial one breaks the build."""
    assert not re.search(r"^\[project\b", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_every_module_has_a_floor() -> None:
    """The names on the floors are those of the modules, each once, and the list is exhaustive."""
    floors = setup_cfg()["importlinter:contract:floors"]
    placed = re.findall(r"\w+", floors["layers"])
    modules = {
        path.stem
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()
    }
    assert floors.getboolean("exhaustive")
    assert len(placed) == len(set(placed))
    assert modules <= set(placed), "give these a floor in setup.cfg"


def test_the_type_marker_is_there() -> None:
    """Without py.typed, type checkers take no notice of the annotations."""
    assert (PACKAGE / "py.typed").exists()


def test_pytest_finds_the_plugin() -> None:
    """The fixtures for users come with the installation."""
    (plugin,) = metadata.entry_points(group="pytest11", name="tako_sync")
    assert plugin.value == "tako_sync.testing.plugin"


def test_every_public_name_can_be_had() -> None:
    """Names are resolved at their use, so a wrong one would go unnoticed until then."""
    for name in tako_sync.__all__:
        assert getattr(tako_sync, name) is not None


IMPORT = "import tako_sync"
HOLD = """
import tako_sync
tako_sync.configure(backend="memory:")
assert tako_sync.Lock("reindex").try_do(lambda ctx: None)
"""


@pytest.mark.parametrize(
    ("program", "used"),
    [(IMPORT, set[str]()), (HOLD, {"tenacity"})],
    ids=["an import", "a hold on memory"],
)
def test_nothing_is_imported_before_it_is_used(program: str, used: set[str]) -> None:
    """Neither an import nor an uncontended hold pays for what it does not use."""
    before = loaded_by("")
    loaded = {name.partition(".")[0] for name in loaded_by(program) - before}
    assert "tako_sync" in loaded
    assert not loaded.intersection(LATER) - used


def test_import_loads_none_of_its_own_modules() -> None:
    """``import tako_sync`` is the face alone: the rest comes with the first name."""
    loaded = {name for name in loaded_by("import tako_sync") if name.startswith("tako_sync.")}
    assert not loaded
