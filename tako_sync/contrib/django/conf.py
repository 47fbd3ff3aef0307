"""The setting ``TAKO``, and the binding that it makes."""

from __future__ import annotations

import warnings
from typing import Any, Final

from django.conf import settings
from django.db import connections

from tako_sync.contrib import settings as common
from tako_sync.contrib.django.atomic import in_transaction
from tako_sync.errors import ConfigurationError
from tako_sync.events import Event, Released
from tako_sync.runtime import Runtime

SETTING: Final = "TAKO"
WARN: Final = "WARN_IN_TRANSACTION"


class TransactionWarning(RuntimeWarning):
    """A lease was released inside a transaction: its name is free before the work is committed."""


def given() -> dict[str, Any]:
    """Return ``settings.TAKO``.

    Raises:
        ConfigurationError: it is no dictionary.
    """
    found = getattr(settings, SETTING, {})
    if not isinstance(found, dict):
        raise ConfigurationError(f"{SETTING} is a dictionary of settings, not {found!r}")
    return dict(found)


def binding() -> Runtime:
    """Return the binding that the settings make; the environment says what they do not.

    Raises:
        ConfigurationError: a setting cannot work.
    """
    found = given()
    warn = found.pop(WARN, True)
    if not isinstance(warn, bool):
        raise ConfigurationError(f'{SETTING}["{WARN}"] is True or False, not {warn!r}')
    return common.binding(found, SETTING + '["{}"]', (_Trap(),) if warn else ())


class _Trap:
    """Warns once of each lease that is released inside a transaction."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Released) or event.lease in self._told:
            return
        inside = [alias for alias in connections if in_transaction(alias)]
        if inside:
            self._told.add(event.lease)
            warnings.warn(
                f'lease "{event.lease}" was released inside a transaction on {", ".join(inside)}: '
                "the next holder may begin before the work is committed. Write `with "
                "tako_sync.contrib.django.transactions.hold(lock, until_commit=True)`, or put the "
                f'transaction inside the lease; TAKO["{WARN}"] = False if it guards something else',
                TransactionWarning,
                stacklevel=2,
            )
