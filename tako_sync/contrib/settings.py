"""The settings of a web application, and the binding that they make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import attrs

from tako_sync.abc import Listener
from tako_sync.errors import ConfigurationError
from tako_sync.policy import LeasePolicy, seconds
from tako_sync.runtime import Runtime, resolve

WAIT: Final = 10.0
"""Seconds that a campaign waits where nothing is said: a third of the thirty after which gunicorn
takes a worker for hung."""
KNOWN: Final = ("APP", "BACKEND", "ENV", "LISTENERS", "NOTE", "POLICY", "TIMEOUT")


def binding(
    settings: Mapping[str, Any], where: str, listeners: tuple[Listener, ...] = ()
) -> Runtime:
    """Return the binding that settings make; what they do not say comes from the environment.

    Args:
        settings: of the keys ``KNOWN``. ``TIMEOUT``: seconds that ``do``, ``hold`` and ``guard``
            wait where they are given no timeout, 10 by default; None: for ever. The others as
            of :func:`tako_sync.configure`.
        where: how a key is written there, for messages: ``TAKO_{}``.
        listeners: besides those of the settings.

    Raises:
        ConfigurationError: an unknown key, or a value that cannot work.
    """
    for key in settings:
        if key not in KNOWN:
            known = ", ".join(where.format(name) for name in KNOWN)
            raise ConfigurationError(f"there is no setting {where.format(key)}: there are {known}")
    policy = settings.get("POLICY", LeasePolicy())
    if not isinstance(policy, LeasePolicy):
        raise ConfigurationError(
            f"{where.format('POLICY')} is a tako_sync.LeasePolicy, not {policy!r}"
        )
    wait = settings.get("TIMEOUT", WAIT if policy.wait is None else policy.wait)
    if wait is not None:
        wait = seconds(where.format("TIMEOUT"), wait, or_zero=True)
    given = {key.lower(): settings[key] for key in ("APP", "ENV", "BACKEND") if settings.get(key)}
    told = settings.get("LISTENERS", ())
    if not isinstance(told, (list, tuple)):
        raise ConfigurationError(
            f"{where.format('LISTENERS')} is a list of functions, not {told!r}"
        )
    return resolve(
        os.environ,
        policy=attrs.evolve(policy, wait=wait),
        note=settings.get("NOTE", ""),
        listeners=(*told, *listeners),
        **given,
    )
