"""The pytest plugin: a bound runtime on ``MemoryLease`` with a ``FakeClock``, and ``occupy``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tako_sync import runtime as binding
from tako_sync.backends.memory import MemoryLease
from tako_sync.runtime import Runtime
from tako_sync.testing.clock import FakeClock
from tako_sync.testing.occupy import Occupation
from tako_sync.testing.occupy import occupy as hold_as_another_process


@pytest.fixture
def tako_clock() -> FakeClock:
    """A clock that stands still until the test advances it."""
    return FakeClock()


@pytest.fixture
def tako_runtime(tako_clock: FakeClock) -> Iterator[Runtime]:
    """The binding of this process for the test: memory storage, virtual time."""
    runtime = Runtime(MemoryLease(tako_clock), app="test", env="test", clock=tako_clock)
    with binding.rebound(runtime):
        yield runtime


@pytest.fixture
def occupy() -> Iterator[Callable[[str], Occupation]]:
    """``occupy("reindex")`` holds the very lease that ``Lock("reindex")`` campaigns for.

    On whatever binding the process has: use it together with ``tako_runtime``, or with one of
    your own. What is not released is released at the end of the test.
    """
    occupations: list[Occupation] = []

    def hold(name: str) -> Occupation:
        occupation = hold_as_another_process(name)
        occupations.append(occupation)
        return occupation

    yield hold
    for occupation in reversed(occupations):
        occupation.release()
