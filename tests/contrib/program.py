"""A program under test as a process of its own, gone with its children at the end of the block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

from typing_extensions import Self

PATIENCE: Final = 40.0
"""Real seconds after which what has not come will not come."""
_TESTS: Final = Path(__file__).parents[1]

P = TypeVar("P", bound="Program")


class Program:
    """A process, and its children.

    Args:
        command: with its arguments.
        environ: added to this process's.
        folder: where it runs.
    """

    def __init__(
        self, command: Sequence[str], environ: dict[str, str], folder: Path | None = None
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        paths = [str(_TESTS), str(_TESTS.parent / "docs" / "examples"), *sys.path]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ},
            cwd=folder,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self, within: float = PATIENCE) -> int:
        return self.process.wait(within)

    def kill(self) -> None:
        """End it, and all its children."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            sys.stderr.write(self.log)  # pytest shows it beside the failure
        self.kill()
        self._log.close()
