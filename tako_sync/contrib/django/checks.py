"""System checks: what will go wrong in production, told by ``manage.py check``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004 - as Django has it
from django.db import connections

from tako_sync.contrib.django import conf
from tako_sync.errors import ConfigurationError

TAG: Final = "tako"


def check(app_configs: Any = None, **_kwargs: Any) -> list[CheckMessage]:
    """Look at the settings; no storage is asked."""
    return list(_found())


def _found() -> Iterator[CheckMessage]:
    try:
        given = conf.given()
        runtime = conf.binding()
    except ConfigurationError as error:
        yield Error(str(error), id="tako_sync.E001")
        return
    if any(connections[alias].settings_dict["ATOMIC_REQUESTS"] for alias in connections):
        yield Warning(
            "ATOMIC_REQUESTS puts a transaction around each view: a lease that is released inside "
            "the view is free before the work is committed.",
            hint="Use tako_sync.contrib.django.views.guard, which puts the transaction inside the "
            "lease, or hold(lock, until_commit=True).",
            id="tako_sync.W003",
        )
    if settings.DEBUG:
        return
    if runtime.backend.describe().startswith("memory:"):
        yield Warning(
            "The leases are in memory: each worker process has its own, and excludes no other.",
            hint='TAKO = {"BACKEND": "gs://bucket"}, or sqlite:///absolute/path on one machine.',
            id="tako_sync.W001",
        )
    for key in ("APP", "ENV"):
        if not given.get(key) and not os.environ.get(f"TAKO_{key}"):
            yield Warning(
                f'TAKO["{key}"] is not set: its default is that of every other application, and '
                "with a shared storage their leases exclude each other.",
                hint=f'TAKO = {{"{key}": ...}}, or TAKO_{key} in the environment.',
                id="tako_sync.W002",
            )
    named = given.get("BACKEND") or os.environ.get("TAKO_BACKEND") or os.environ.get("TAKO_PROJECT")
    if not named:
        yield Warning(
            "No storage is named for the leases: they are in a file of this user, on this machine.",
            hint='TAKO = {"BACKEND": "gs://bucket"}, or TAKO_BACKEND in the environment.',
            id="tako_sync.W004",
        )
