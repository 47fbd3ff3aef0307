"""What an examination of a storage has found, as values that can be printed."""

from __future__ import annotations

import textwrap
from typing import Final

from attrs import frozen

OK: Final = "ok"
NOTE: Final = "note"
PROBLEM: Final = "problem"

_WIDTH: Final = 80
_SIGNS: Final = {OK: "  ok     ", NOTE: "  note   ", PROBLEM: "  PROBLEM"}


@frozen
class Finding:
    """One thing that was looked at.

    Attributes:
        verdict: ``ok``, ``note`` (works, but costs something or may surprise) or ``problem``.
        text: what was found, in words.
        advice: what to do about it; empty if nothing.
    """

    verdict: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        lines = textwrap.wrap(self.text, _WIDTH - 11)
        lines += [f"-> {line}" for line in textwrap.wrap(self.advice, _WIDTH - 14)[:1]]
        lines += [f"   {line}" for line in textwrap.wrap(self.advice, _WIDTH - 14)[1:]]
        return f"\n{' ' * 11}".join([f"{_SIGNS[self.verdict]}  {lines[0]}", *lines[1:]])


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
        end = "healthy" if self.healthy else f"{len(self.problems)} problems"
        if len(self.problems) == 1:
            end = "1 problem"
        return "\n".join([self.where, *map(str, self.findings), f"  = {end}"])
