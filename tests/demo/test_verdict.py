"""What the demo's verdict is computed from."""

from __future__ import annotations

from typing import Any

import pytest

from tako_sync.demo.timeline import Timeline


def timeline(*reports: dict[str, Any]) -> Timeline:
    line = Timeline()
    for report in reports:
        line.add(report)
    return line


def report(at: float, who: str, what: str, **facts: Any) -> dict[str, Any]:
    return {"at": at, "who": who, "what": what, **facts}


def test_two_bodies_one_after_the_other_do_not_overlap() -> None:
    line = timeline(
        report(1, "a", "begin", fence=1, deadline=4),
        report(2, "a", "end", fence=1, deadline=5),
        report(2.5, "b", "begin", fence=2, deadline=6),
        report(3, "b", "end", fence=2, deadline=6),
    )
    assert line.overlap() == 0 and line.fences_rise()


def test_two_bodies_at_once_overlap_for_as_long_as_both_run() -> None:
    line = timeline(
        report(1, "a", "begin", fence=1, deadline=4),
        report(2, "b", "begin", fence=2, deadline=6),
        report(3, "a", "end", fence=1, deadline=6),
        report(4, "b", "end", fence=2, deadline=6),
    )
    assert line.overlap() == pytest.approx(1)


def test_a_stopped_body_counts_until_the_deadline_that_it_told_last() -> None:
    line = timeline(
        report(1, "a", "begin", fence=1, deadline=4),
        report(2, "a", "midway", fence=1, deadline=5),
        report(2, "a", "stopped"),
        report(4.5, "b", "begin", fence=2, deadline=8),
        report(6, "b", "end", fence=2, deadline=8),
        report(9, "a", "refused", fence=1),
        report(9, "a", "lost", fence=1, reason="expired"),
    )
    assert line.overlap() == pytest.approx(0.5)


def test_a_killed_body_counts_until_it_was_killed() -> None:
    line = timeline(
        report(1, "a", "begin", fence=1, deadline=4),
        report(2, "a", "killed"),
        report(3, "b", "begin", fence=2, deadline=8),
    )
    assert line.overlap() == 0


def test_a_fence_that_falls_is_seen() -> None:
    line = timeline(
        report(1, "a", "begin", fence=7, deadline=2),
        report(3, "b", "begin", fence=6, deadline=4),
    )
    assert not line.fences_rise()
