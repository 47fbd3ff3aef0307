"""A command that runs once at a time."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from tako_sync import current_ctx
from tako_sync.contrib.django.leased import LeasedCommandMixin


class Command(LeasedCommandMixin, BaseCommand):
    def handle(self, *args: Any, **options: Any) -> str:
        if options["verbosity"] == 3:
            raise CommandError("it fails")
        return f"ran under {current_ctx().lease.name}"
