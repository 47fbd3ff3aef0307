"""What the workers reported, and what follows from it: runs, collapses, overlap, fences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import define, field

Report = Mapping[str, Any]


@define
class Run:
    """One body that ran: the stretch in which its context was not cancelled."""

    who: str
    fence: int
    began: float
    ended: float


@define
class Timeline:
    """All reports in order of time; the clock is one for all processes of a machine."""

    reports: list[Report] = field(factory=list)

    def add(self, report: Report) -> None:
        self.reports.append(report)

    def runs(self) -> list[Run]:
        """Return the runs in the order in which they began.

        A body that was killed or stopped reports no end. It may have believed in its lease
        until the deadline that it told last, or until it was killed; no longer.
        """
        runs: dict[int, Run] = {}
        for report in sorted(self.reports, key=lambda report: float(report["at"])):
            what, at, fence = report["what"], report["at"], report.get("fence", 0)
            if what == "begin":
                runs[fence] = Run(report["who"], fence, at, report["deadline"])
            elif what in ("step", "midway") and fence in runs:
                runs[fence].ended = report["deadline"]
            elif what in ("end", "lost", "refused") and fence in runs:
                runs[fence].ended = min(runs[fence].ended, at)
            elif what == "killed":
                for run in runs.values():
                    if run.who == report["who"]:
                        run.ended = min(run.ended, at)
        return list(runs.values())

    def overlap(self) -> float:
        """Return the seconds in which more than one body ran with an un-cancelled context."""
        runs = self.runs()
        return sum(
            max(0.0, min(one.ended, other.ended) - max(one.began, other.began))
            for place, one in enumerate(runs)
            for other in runs[place + 1 :]
        )

    def fences_rise(self) -> bool:
        fences = [run.fence for run in self.runs()]
        return all(one < other for one, other in itertools.pairwise(fences))

    def count(self, what: str) -> int:
        return sum(report["what"] == what for report in self.reports)

    def between(self, earlier: str, later: str) -> float | None:
        """Return the seconds from the first ``earlier`` to the next ``later``."""
        began = _first(self.reports, earlier, 0.0)
        ended = _first(self.reports, later, began) if began is not None else None
        return ended - began if began is not None and ended is not None else None


def _first(reports: Iterable[Report], what: str, after: float) -> float | None:
    return min((r["at"] for r in reports if r["what"] == what and r["at"] > after), default=None)
