"""The demo itself, in processes: on a small folder, and on folders that are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tako_sync.demo", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)


@pytest.mark.timeout(120)
def test_the_demo_ends_with_a_verdict_that_all_is_as_promised(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"page-{number}.txt").write_text(f"page {number}")
    done = demo(str(tmp_path), "--ttl", "1.5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BAD" not in done.stdout
    assert done.stdout.rstrip().endswith("All as promised.")
    for line in (
        "7 bodies ran",
        "3 of 4 asked at once collapsed",
        "0.000 s in which two bodies ran",
        "1 stopped holder found itself cancelled",
        "1 late write refused by its fence",
        "6 of 6 pages in the index",
        "The ttl is 1.5 s here",
    ):
        assert line in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["no-such-folder"], "is no folder"),
        ([".", "--ttl", "0.01"], "leaves no room for two renewals"),
        ([".", "--ttl", "soon"], "invalid float value"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = demo(*arguments)
    assert done.returncode == 2 and word in done.stderr


def test_a_folder_without_text_is_refused_in_words(tmp_path: Path) -> None:
    done = demo(str(tmp_path))
    assert done.returncode == 2 and "holds nothing to index" in done.stderr
