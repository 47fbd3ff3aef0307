"""All Singletons and Crons of an application in one process, for development.

``python -m tako_sync.dev shop.app`` runs :func:`run` until Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Final, TextIO

from tako_sync import checks
from tako_sync.application import declared_in
from tako_sync.ctx import Ctx
from tako_sync.errors import ConfigurationError
from tako_sync.policy import seconds
from tako_sync.runner import Runner, loops
from tako_sync.runtime import Runtime, rebound, resolve
from tako_sync.shutdown import install_signal_handlers

MEMORY: Final = "memory:"
_LOOK: Final = 1.0
"""Seconds between two looks at whether a loop has ended by itself, which none should."""
_TOLD: Final = ("Singleton", "Cron")
"""Events whose names begin so are told; of the leases beneath only what is amiss."""

log: Final = logging.getLogger("tako_sync")


def run(
    module: ModuleType | str,
    ctx: Ctx | None = None,
    *,
    runtime: Runtime | str = MEMORY,
    narrate: TextIO | None = sys.stderr,
    drain: float = 25.0,
) -> None:
    """Run all that a module declares, in threads of this process, until ``ctx`` is over.

    The leases are real: a loop that is registered twice, or runs in a second process on the same
    SQLite file, stands by. What the bodies do under ``tako_sync.Lock`` goes there, too.

    Args:
        module: or its name.
        ctx: whose end ends it. By default it goes on until the process is told to stop, by
            Ctrl-C or :func:`tako_sync.install_signal_handlers`.
        runtime: or the URL of a storage, for the application that the environment names.
        narrate: to where it tells, a line each, what the application logs, how its loops and
            slots end, and what is amiss; an idle loop says nothing. None: the process has its own
            logging.
        drain: seconds to wait at the end for bodies that go on.

    Raises:
        ConfigurationError: the module declares nothing, or a name is amiss.
        Exception: what ended a loop for good, as no body can.
    """
    parent = checks.parent(ctx)
    allowed = seconds("drain", drain, or_zero=True)
    application = declared_in(module)
    if isinstance(runtime, str):
        runtime = resolve(os.environ, backend=runtime)
    root = (parent or Ctx.background(runtime.clock)).child()
    with rebound(runtime), _narrated(narrate):
        runners: list[Runner] = []
        leave = loops.enter(root)
        try:
            runners.extend(thing.start() for thing in application.things)
            while not root.wait(_LOOK) and all(runner.running for runner in runners):
                pass
        finally:
            leave()
            _stop(runners, allowed, runtime)
    for runner in runners:
        if runner.error is not None:
            raise runner.error


def _stop(runners: Sequence[Runner], allowed: float, runtime: Runtime) -> None:
    until = runtime.clock.monotonic() + allowed
    for runner in runners:
        runner.stop(timeout=0)
    for runner in runners:
        if not runner.wait(max(0.0, until - runtime.clock.monotonic())):
            log.warning("%s goes on after %g s, and is left alone", runner.name, allowed)


@contextmanager
def _narrated(stream: TextIO | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(_worth_telling)
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO) or logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def _worth_telling(record: logging.LogRecord) -> bool:
    event = getattr(record, "tako_event", None)
    return (
        event is None or type(event).__name__.startswith(_TOLD) or record.levelno >= logging.WARNING
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tako_sync.dev",
        description="Run all Singletons and Crons of a module in this process, until Ctrl-C.",
    )
    parser.add_argument("module", help="the application, such as shop.app")
    parser.add_argument(
        "--backend",
        default=MEMORY,
        metavar="URL",
        help="where the leases are: memory: (the default), or sqlite:///path for several processes",
    )
    chosen = parser.parse_args(arguments)
    install_signal_handlers((signal.SIGTERM,))
    try:
        run(chosen.module, runtime=chosen.backend)
    except ConfigurationError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
