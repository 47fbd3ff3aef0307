"""What a container runs: one Singleton for ever, or one Cron's slot, and nothing else.

``python -m tako_sync.serve shop.app:invoicer`` campaigns for ever for ``singleton-invoicer``,
behind a health endpoint on ``$PORT``. ``python -m tako_sync.serve shop.app:sweep`` runs the slot
that is due, and ends: with 0 if it is done, wherever, with 1 if it is not.

:mod:`tako_sync.deploy` writes the manifests that start it so.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from tako_sync.application import find
from tako_sync.clock import SystemClock
from tako_sync.cron import Cron
from tako_sync.endpoint import endpoint
from tako_sync.errors import ConfigurationError
from tako_sync.shutdown import install_signal_handlers
from tako_sync.singleton import Singleton

PORT: Final = 8080
"""Where ``$PORT`` is not set."""

log: Final = logging.getLogger("tako_sync")


def singleton(thing: Singleton, port: int) -> None:
    """Run a Singleton in this thread until the process is told to stop, and tell its health.

    Raises:
        OSError: the port cannot be had.
    """
    with endpoint(port, thing.health, SystemClock()) as bound:
        log.info("singleton %s: health is told on port %d", thing.name, bound)
        thing.run()


def slot(thing: Cron) -> bool:
    """Run the slot of a Cron that is due; return whether nothing is left to be done of it."""
    try:
        thing.run_due()
    except Exception as error:  # noqa: BLE001 - it is the exit status of a program
        log.error("cron %s: its slot was not run to its end: %s", thing.name, error)
        return False
    return True


def _port(environ: Mapping[str, str]) -> int:
    text = environ.get("PORT") or str(PORT)
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise ConfigurationError(f"PORT is the number of a port, not {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tako_sync.serve",
        description="Run one Singleton for ever, or the slot of a Cron that is due.",
    )
    parser.add_argument("place", help="module:variable, such as shop.app:invoicer")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        thing, port = find(chosen.place), _port(os.environ)
    except ConfigurationError as error:
        parser.error(str(error))
    install_signal_handlers()
    try:
        if isinstance(thing, Cron):
            return 0 if slot(thing) else 1
        singleton(thing, port)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
