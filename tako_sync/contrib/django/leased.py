"""Management commands that run once at a time, anywhere."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tako_sync import checks
from tako_sync.contrib.attempt import Ended, attempt
from tako_sync.contrib.mixins import comes_first
from tako_sync.errors import ConfigurationError
from tako_sync.lock import Lock


class LeasedCommandMixin:
    """``class Command(LeasedCommandMixin, BaseCommand)``: ``handle`` runs under a lease.

    A second invocation, on any machine, says who holds it and exits with status 0, without having
    done anything; ``--tako-wait SECONDS`` has it wait first. ``tako_sync.current_ctx()`` is the
    ctx inside. If the lease is lost while ``handle`` runs, the command fails.

    Attributes:
        lease_name: of the lease; by default that of the command.
    """

    lease_name: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        comes_first(cls, LeasedCommandMixin, BaseCommand)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)  # type: ignore[misc]
        parser.add_argument(
            "--tako-wait",
            type=float,
            default=0.0,
            metavar="SECONDS",
            help="how long to wait if this command runs already; by default not at all",
        )

    def execute(self, *args: Any, **options: Any) -> Any:
        name = self.lease_name or type(self).__module__.rpartition(".")[2].lower()
        try:
            wait = checks.timeout(options.pop("tako_wait", 0.0) or 0.0)
        except ConfigurationError as error:
            raise CommandError(f"--tako-wait: {error}") from error
        outcome = attempt(
            Lock(name),
            lambda: super(LeasedCommandMixin, self).execute(*args, **options),  # type: ignore[misc]
            timeout=wait,
        )
        if outcome.ended is Ended.RAN:
            return outcome.value
        if outcome.ended is Ended.BUSY:
            stderr = options.get("stderr") or self.stderr  # type: ignore[attr-defined]
            stderr.write(f"{name} runs already, and is left alone: {outcome.error}")
            return None
        raise CommandError(str(outcome.error)) from outcome.error
