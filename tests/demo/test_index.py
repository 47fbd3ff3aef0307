"""The demo's index is the receiving half of fencing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tako_sync.demo.index import Index, StaleFenceError, chunks, sources


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "pages"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.py").write_text("lease and fence")
    (folder / "deep" / "b.md").write_text("a lease")
    (folder / "c.bin").write_bytes(b"\0")
    (folder / "tests").mkdir()
    (folder / "tests" / "d.py").write_text("lease")
    return sources(folder)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    index = Index(tmp_path / "index.sqlite3")
    index.create()
    return index


def test_what_was_added_is_found(index: Index, pages: list[Path]) -> None:
    index.begin(fence=5)
    index.add(pages, fence=5)
    assert (index.count(), index.count("lease"), index.count("fence")) == (2, 2, 1)


def test_a_late_write_of_an_earlier_holder_is_refused_and_changes_nothing(
    index: Index, pages: list[Path]
) -> None:
    index.begin(fence=5)
    index.begin(fence=6)
    with pytest.raises(StaleFenceError):
        index.add(pages, fence=5)
    assert index.count() == 0


def test_even_two_pages_have_a_middle(pages: list[Path]) -> None:
    assert [list(chunk) for chunk in chunks(pages)] == [[pages[0]], [pages[1]]]
