"""The lease policy: how long, how often, how soon. Refuses timings that cannot work."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, Final

from attrs import Attribute, field, frozen

from tako_sync.errors import ConfigurationError
from tako_sync.record import MAX_TTL

MIN_TTL: Final = 0.2
"""Seconds. Below this, two renewals and their requests do not fit into a ttl on a busy machine."""
CLOCK_DRIFT: Final = 0.001
"""Seconds a second by which two monotonic clocks may run apart: NTP slews each by 0.0005."""


def seconds(name: str, value: object, *, or_zero: bool = False) -> float:
    """Return ``value`` as seconds, or say what is wrong with it.

    Args:
        or_zero: whether 0 will do.

    Raises:
        ConfigurationError: it is not a finite int or float above 0 (or from 0 up).
    """
    if isinstance(value, timedelta):
        hint = f"write {name}=delta.total_seconds()"
        raise ConfigurationError(f"{name} is a number of seconds, not a timedelta: {hint}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{name} is a number of seconds, not {value!r}")
    if not _is_finite(value) or value < 0 or (value == 0 and not or_zero):
        bound = "from 0 up" if or_zero else "above 0"
        raise ConfigurationError(f"{name} is a finite number of seconds {bound}, not {value!r}")
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def _seconds(_instance: object, attribute: Attribute[Any], value: object) -> None:
    seconds(attribute.name, value)


def _ttl(_instance: object, attribute: Attribute[Any], value: object) -> None:
    ttl = seconds(attribute.name, value)
    if ttl < MIN_TTL:
        raise ConfigurationError(
            f"ttl={value!r} leaves no room for two renewals: {MIN_TTL:g} s at least"
        )
    if ttl > MAX_TTL:
        raise ConfigurationError(
            f"ttl={value!r} would keep others out too long after a crash: {MAX_TTL:g} s at most"
        )


def _wait(_instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None:
        seconds(attribute.name, value, or_zero=True)


def _jitter(_instance: object, attribute: Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigurationError(f"{attribute.name} is a share from 0 up to 1, not {value!r}")


@frozen(kw_only=True)
class LeasePolicy:
    """The timings of every lease of a binding.

    They belong to the framework, not to a lock: all processes that share names should
    share the policy, though none depends on it (each judges a record by its own ttl).

    Args:
        ttl: seconds that a lease outlives its holder, from 0.2 to 3600.
        poll: mean seconds between two looks of a campaign.
        jitter: share by which a pause varies either way.
        restart: least seconds from the end of a Singleton's loop to its next start.
        wait: seconds that ``do``, ``hold`` and ``guard`` of a lock wait at most where they are
            given no timeout; None: for ever. Integrations with web frameworks set it.

    Raises:
        ConfigurationError: a timing cannot work; the message names it and the bound.
    """

    ttl: float = field(default=30.0, validator=_ttl)
    poll: float = field(default=2.0, validator=_seconds)
    jitter: float = field(default=0.25, validator=_jitter)
    restart: float = field(default=5.0, validator=_seconds)
    wait: float | None = field(default=None, validator=_wait)

    @property
    def heartbeat(self) -> float:
        """Seconds from one renewal to the next."""
        return self.ttl / 3

    @property
    def request_timeout(self) -> float:
        """Seconds that one storage request may take."""
        return self.ttl / 6

    def margin(self, clock_skew: float) -> float:
        """Return the seconds by which a holder gives up before others may take over.

        Args:
            clock_skew: what the backend states as its own clock's skew, in seconds.

        Raises:
            ConfigurationError: with that skew, two renewals no longer fit into the ttl.
        """
        margin = max(self.ttl / 10, 2 * clock_skew + CLOCK_DRIFT * self.ttl)
        if 2 * self.heartbeat + self.request_timeout > self.ttl - margin:
            raise ConfigurationError(
                f"ttl={self.ttl:g} is too short for a storage whose clock is off by up to "
                f"{clock_skew:g} s: two renewals do not fit before the holder must give up"
            )
        return margin

    def jittered(self, pause: float, chance: float) -> float:
        """Return ``pause`` varied by the policy's jitter; ``chance`` is from [0, 1)."""
        return pause * (1 + self.jitter * (2 * chance - 1))
