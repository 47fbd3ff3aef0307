"""What tests with worker processes start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from processes.kit_processes import Crew


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return where the leases of a test are."""
    return str(tmp_path / "leases.sqlite3")
