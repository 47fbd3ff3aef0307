"""For test cases: a binding in memory for each test, and leases held by others."""

from __future__ import annotations

import contextlib

from tako_sync.backends.memory import MemoryLease
from tako_sync.runtime import Runtime, rebound
from tako_sync.testing.occupy import Occupation
from tako_sync.testing.occupy import occupy as hold_as_another_process


class TakoTestMixin:
    """``class MyTest(TakoTestMixin, TestCase)``: each test has a fresh storage, in memory.

    Attributes:
        tako: the binding.
    """

    tako: Runtime

    def setUp(self) -> None:
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)  # type: ignore[attr-defined]
        self.tako = Runtime(MemoryLease(), app="test", env="test")
        stack.enter_context(rebound(self.tako))
        super().setUp()  # type: ignore[misc]

    def occupy(self, name: str) -> Occupation:
        """Hold a lease as another process would, until its ``release()`` or the test's end."""
        held = hold_as_another_process(name, self.tako)
        self.addCleanup(held.release)  # type: ignore[attr-defined]
        return held
