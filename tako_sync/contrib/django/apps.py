"""The app: settings make the binding, checks look at them."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.signals import setting_changed

from tako_sync.contrib.django import conf
from tako_sync.contrib.django.checks import TAG, check
from tako_sync.runtime import by_default


class TakoConfig(AppConfig):
    """``tako_sync.contrib.django`` in ``INSTALLED_APPS``."""

    name = "tako_sync.contrib.django"
    label = "tako_sync"
    verbose_name = "Leases"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        by_default(conf.binding)
        checks.register(check, TAG)
        setting_changed.connect(_rebind, dispatch_uid="tako_sync.rebind")


def _rebind(*, setting: str, **_kwargs: Any) -> None:
    if setting == conf.SETTING:
        by_default(conf.binding)
