"""The door for testers: virtual time, faults on demand, contention on demand, conformance.

The conformance suite for backends is ``tako_sync.testing.conformance`` (it needs pytest); the
pytest plugin with fixtures is ``tako_sync.testing.plugin``, found by pytest itself.
"""

from __future__ import annotations

from tako_sync.testing import faults
from tako_sync.testing.clock import FakeClock
from tako_sync.testing.faults import FaultyBackend
from tako_sync.testing.occupy import Occupation, occupy
from tako_sync.testing.overlap import OverlapMeter

__all__ = ["FakeClock", "FaultyBackend", "Occupation", "OverlapMeter", "faults", "occupy"]
