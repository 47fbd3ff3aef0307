"""For test cases: a binding in memory for each test, and leases held by others."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Callable
from typing import Any

from tako_sync.backends.memory import MemoryLease
from tako_sync.contrib.mixins import comes_first
from tako_sync.runtime import Runtime, rebound
from tako_sync.testing.occupy import Occupation
from tako_sync.testing.occupy import occupy as hold_as_another_process


class TakoTestMixin:
    """``class MyTest(TakoTestMixin, TestCase)``: each test has a fresh storage, in memory.

    So has ``setUpTestData``.

    Attributes:
        tako: the binding.
    """

    tako: Runtime

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        comes_first(cls, TakoTestMixin, unittest.TestCase)

    @classmethod
    def setUpClass(cls) -> None:
        cls.tako = _bound(cls.addClassCleanup)  # type: ignore[attr-defined]
        super().setUpClass()  # type: ignore[misc]

    def setUp(self) -> None:
        self.tako = _bound(self.addCleanup)  # type: ignore[attr-defined]
        super().setUp()  # type: ignore[misc]

    def occupy(self, name: str) -> Occupation:
        """Hold a lease as another process would, until its ``release()`` or the test's end."""
        held = hold_as_another_process(name, self.tako)
        self.addCleanup(held.release)  # type: ignore[attr-defined]
        return held


def _bound(at_the_end: Callable[[Callable[[], None]], object]) -> Runtime:
    """Bind this process to a storage of its own until the end."""
    stack = contextlib.ExitStack()
    at_the_end(stack.close)
    runtime = Runtime(MemoryLease(), app="test", env="test")
    stack.enter_context(rebound(runtime))
    return runtime
