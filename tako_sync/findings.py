"""What an examination of a storage has found, as values that can be printed."""

from __future__ import annotations

import textwrap
from typing import Final

from attrs import frozen

OK: Final = "ok"
NOTE: Final = "note"
PROBLEM: Final = "problem"

_WIDTH: Final = 80
_SIGNS: Final = {OK: "  ok       ", NOTE: "  note     ", PROBLEM: "  PROBLEM  "}
_INDENT: Final = " " * 11


@frozen
class Finding:
    """One thing that was looked at.

    Attributes:
        checked: what was looked at, in a word or three: ``compare-and-swap``, ``soft delete``.
        verdict: ``ok``, ``note`` (works, but costs something or may surprise) or ``problem``.
        text: what was found, in words.
        advice: what to do about it; empty if nothing.
    """

    checked: str
    verdict: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        sign = _SIGNS.get(self.verdict, f"  {self.verdict}  ")
        lines = _wrapped(f"{self.checked}: {self.text}", sign, _INDENT)
        if self.advice:
            lines += _wrapped(self.advice, f"{_INDENT}-> ", f"{_INDENT}   ")
        return "\n".join(lines)


def _wrapped(text: str, first: str, others: str) -> list[str]:
    # Paths and commands stay whole, even beyond the width: they are there to be copied.
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


@frozen
class Report:
    """All findings on one storage; true if none is a problem.

    Attributes:
        where: the storage.
        findings: in the order in which they were made.
    """

    where: str
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == PROBLEM)

    def __bool__(self) -> bool:
        return self.healthy

    def __str__(self) -> str:
        count = len(self.problems)
        end = "healthy" if self.healthy else "1 problem" if count == 1 else f"{count} problems"
        return "\n".join([self.where, *map(str, self.findings), f"  = {end}"])
