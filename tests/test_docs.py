"""Every Python snippet in README.md and docs/ runs.

The snippets of a page run in order, in one namespace, in an interpreter of their own: in an
empty folder, on memory storage, with warnings as errors. A fragment that cannot run has a
comment in the line before its fence: ``<!-- not run -->``, or ``<!-- not run: the reason -->``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tako_sync.record import Record, read
from tako_sync.snapshot import Snapshot

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

RUN_PAGE = """
import sys
page, *starts = sys.argv[1:]
namespace = {"__name__": "__page__"}
lines = open(page, encoding="utf-8").read().splitlines()
import textwrap
for start, end in (map(int, span.split("-")) for span in starts):
    code = textwrap.dedent("\\n".join(lines[start:end]))
    exec(compile("\\n" * start + code, page, "exec"), namespace)  # tracebacks show the page's lines
"""


def spans(text: str) -> list[tuple[int, int]]:
    """Return where the snippets to run are: the line after the fence, the line of its end."""
    found: list[tuple[int, int]] = []
    opened: tuple[str, int] | None = None  # the closing fence, and where the snippet begins
    runs, before = False, ""
    for number, line in enumerate(text.splitlines()):
        stripped = line.strip()
        if opened is not None:
            closing, start = opened
            if stripped == closing:
                if runs:
                    found.append((start, number))
                opened = None
        elif fence := re.match(r"(`{3,}|~{3,})\s*(\w*)", stripped):
            opened = fence[1], number + 1
            runs = fence[2] in ("python", "py") and not before.startswith("<!-- not run")
        if stripped:
            before = stripped
    assert opened is None, f"the fence before line {opened} is never closed"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """What a reader copies works."""
    snippets = spans(page.read_text(encoding="utf-8"))
    if not snippets:
        return
    folder = tmp_path / "empty"
    folder.mkdir()
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_PAGE, str(page)]
        + [f"{start}-{end}" for start, end in snippets],
        check=False,
        cwd=folder,
        env={**os.environ, "TAKO_BACKEND": "memory:", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=45,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"


@pytest.mark.parametrize(
    "page", [*PAGES, *ROOT.glob("[CS]*.md")], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Those to other files of the repository."""
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    inside = [link for link in links if "://" not in link]
    assert not [link for link in inside if not (page.parent / link).exists()]


def test_every_page_can_be_reached_from_the_index() -> None:
    """A page that nobody links to is read by nobody."""
    index = ROOT / "docs" / "index.md"
    links = re.findall(r"\]\(([^)#\s]+)", index.read_text(encoding="utf-8"))
    linked = {(index.parent / link).resolve() for link in links}
    assert not set((ROOT / "docs").rglob("*.md")) - linked - {index}


def test_a_snippet_marked_as_a_fragment_is_left_out() -> None:
    """The comment counts for the fence right after it, and for no other."""
    page = textwrap.dedent(
        """\
        <!-- not run: a fragment -->

        ```python
        ...
        ```

        ```
        output
        ```

        - in a list

          ```python
          pass
          ```
        """
    )
    assert spans(page) == [(13, 14)]


def test_the_example_in_the_record_format_is_a_record() -> None:
    """The documented fields are those that are written, in their order."""
    page = (ROOT / "docs/reference/record-format.md").read_text(encoding="utf-8")
    example = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert example is not None
    record = read(Snapshot(example[1].encode(), "1"))
    assert isinstance(record, Record)
    assert list(json.loads(record.encode()).items()) == list(json.loads(example[1]).items())
