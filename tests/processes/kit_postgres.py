"""A PostgreSQL server of a test's own: on a socket in a folder, gone with it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

PATIENCE: Final = 40.0
_USERS: Final = ("postgres", "nobody")


def programs() -> Path | None:
    """Return the folder of ``initdb`` and ``postgres``; None if PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    candidates = [*found, *([Path(on_path).resolve().parent] if on_path else [])]
    return next((folder for folder in candidates if (folder / "postgres").exists()), None)


@contextmanager
def server(bin_: Path) -> Iterator[str]:
    """Run a server; yield the URL of an empty database. It listens on a socket of Unix alone."""
    folder = Path(tempfile.mkdtemp(prefix="tako-postgres-"))
    as_: dict[str, Any] = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if os.geteuid() == 0:  # as which PostgreSQL does not run
        user = next(name for name in _USERS if _there(name))
        entry = pwd.getpwnam(user)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
        as_ |= {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    try:
        data = folder / "data"
        subprocess.run(
            [bin_ / "initdb", "-D", data, "-U", "shop", "-A", "trust", "--no-sync"],
            check=True,
            **as_,
        )
        settings = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}"]
        process = subprocess.Popen([bin_ / "postgres", "-D", data, "-F", *settings], **as_)
        try:
            _wait_until_it_answers(bin_, folder, process)
            yield f"postgresql://shop@/postgres?host={folder}"
        finally:
            process.send_signal(signal.SIGQUIT)  # at once, clients or not
            process.communicate(timeout=PATIENCE)
    finally:
        shutil.rmtree(folder)


def _there(user: str) -> bool:
    try:
        return bool(pwd.getpwnam(user))
    except KeyError:
        return False


def _wait_until_it_answers(bin_: Path, folder: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE
    while subprocess.run([bin_ / "pg_isready", "-q", "-h", folder], check=False).returncode:
        assert process.poll() is None and time.monotonic() < until, "PostgreSQL does not start"
        time.sleep(0.05)
