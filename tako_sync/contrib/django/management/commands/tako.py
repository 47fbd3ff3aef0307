"""``manage.py tako``: see leases, break one, examine the storage, run loops."""

from __future__ import annotations

import signal
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tako_sync import breaking, names
from tako_sync.application import find
from tako_sync.checkup import doctor
from tako_sync.cron import Cron
from tako_sync.dev import run
from tako_sync.errors import TakoError
from tako_sync.listing import leases
from tako_sync.record import Holder, Identity
from tako_sync.runtime import Runtime, current
from tako_sync.shutdown import install_signal_handlers
from tako_sync.singleton import Singleton


class Command(BaseCommand):
    """Each subcommand is a method of its name."""

    help = "See who holds a lease, break one, examine their storage, run Singletons and Crons."

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
        verbs.add_parser("list", help="all leases of this application")
        who = verbs.add_parser("who", help="who holds a lease; exit status 1 if nobody does")
        who.add_argument("name")
        break_ = verbs.add_parser("break", help="break a lease, exactly as it is shown")
        break_.add_argument("name")
        break_.add_argument(
            "--version-shown",
            metavar="VERSION",
            help="of the holder that `who` has shown: breaks without asking, that or nothing",
        )
        break_.add_argument(
            "--now",
            action="store_true",
            help="free it at once: the holder's work and the next one's may overlap",
        )
        handover = verbs.add_parser("handover", help="ask the holder of a lease to hand over")
        handover.add_argument("name")
        verbs.add_parser("doctor", help="examine the storage; exit status 1 if it is not well")
        singleton = verbs.add_parser("singleton", help="run a Singleton until SIGTERM or Ctrl-C")
        singleton.add_argument("place", help="module:variable, such as shop.loops:invoicer")
        crons = verbs.add_parser(
            "loops", help="run all Singletons and Crons of a module until SIGTERM or Ctrl-C"
        )
        crons.add_argument("module")
        cron = verbs.add_parser("cron", help="run a Cron until SIGTERM or Ctrl-C")
        cron.add_argument("place", help="module:variable, such as shop.loops:sweep")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            getattr(self, f"_{options['verb']}")(**options)
        except TakoError as error:
            raise CommandError(str(error)) from error

    # --- Leases

    def _list(self, **_options: Any) -> None:
        runtime = current()
        self.stdout.write(f"{runtime.app}/{runtime.env} in {runtime.backend.describe()}")
        for lease in leases(runtime):
            self.stdout.write(f"{lease.name}: {lease.holder or 'free'}")

    def _who(self, name: str, **_options: Any) -> None:
        holder = self._holder(name)
        if holder is None:
            raise CommandError(f"{name} is free", returncode=1)
        self.stdout.write(f"{name}: {holder}\nversion {holder.version}")

    def _break(self, name: str, version_shown: str | None, now: bool, **_options: Any) -> None:
        runtime, identity = self._lease(name)
        version, owner = version_shown, None
        if version is None:
            holder = self._holder(name)
            if holder is None:
                raise CommandError(f"{name} is free: there is nothing to break")
            self.stdout.write(f"{name}: {holder}")
            if now:
                self.stdout.write("Its work and the next holder's may overlap.")
            if self._answer(f"To break it, type its name ({name}): ") != name:
                raise CommandError("not broken")
            version, owner = holder.version, holder.owner
        breaking.break_lease(
            runtime, identity, version=version, owner=owner, now=now, by="manage.py"
        )
        freed = "It is free." if now else "It is free when its holder has ended, or in a ttl."
        self.stdout.write(f"{name} is broken. {freed}")

    def _answer(self, question: str) -> str:
        try:
            return input(question).strip()
        except EOFError:
            raise CommandError(
                "not broken: there is nobody to ask. Give --version-shown, as `who` tells it"
            ) from None

    def _handover(self, name: str, **_options: Any) -> None:
        runtime, identity = self._lease(name)
        holder = self._holder(name)
        if holder is None:
            raise CommandError(f"{name} is free: nobody could hand it over")
        breaking.request_handover(
            runtime, identity, version=holder.version, owner=holder.owner, by="manage.py"
        )
        self.stdout.write(f"{name}: {holder} is asked to hand over")

    def _doctor(self, **_options: Any) -> None:
        report = doctor()
        self.stdout.write(str(report))
        if not report.healthy:
            raise CommandError("the storage is not well", returncode=1)

    def _lease(self, name: str) -> tuple[Runtime, Identity]:
        runtime = current()
        return runtime, runtime.identity(names.part("a lease's name", name))

    def _holder(self, name: str) -> Holder | None:
        return breaking.who(*self._lease(name))

    # --- Loops

    def _singleton(self, place: str, **_options: Any) -> None:
        self._run(place, Singleton)

    def _cron(self, place: str, **_options: Any) -> None:
        self._run(place, Cron)

    def _run(self, place: str, kind: type[Singleton | Cron]) -> None:
        thing = find(place)
        if not isinstance(thing, kind):
            raise CommandError(f"{place} is a {type(thing).__name__}, not a {kind.__name__}")
        undo = install_signal_handlers((signal.SIGTERM,))
        try:
            thing.run()
        finally:
            undo()

    def _loops(self, module: str, **_options: Any) -> None:
        undo = install_signal_handlers((signal.SIGTERM,))
        try:
            run(module, runtime=current(), narrate=None)
        finally:
            undo()
