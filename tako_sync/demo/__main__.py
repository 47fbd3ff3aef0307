"""``python -m tako_sync.demo [FOLDER]``."""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tempfile
from pathlib import Path

from tako_sync.demo.director import Director
from tako_sync.demo.index import sources
from tako_sync.errors import ConfigurationError
from tako_sync.policy import LeasePolicy


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tako_sync.demo", description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="what to index: its .py, .md, .rst and .txt files (default: the standard library)",
    )
    parser.add_argument("--ttl", type=float, default=2.0, help="seconds (default 2; real life 30)")
    options = parser.parse_args(arguments)
    try:
        policy = LeasePolicy(ttl=options.ttl, poll=options.ttl / 10)
    except ConfigurationError as error:
        parser.error(str(error))
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder")
    if not sources(options.folder):
        parser.error(f"{options.folder} holds nothing to index: no .py, .md, .rst or .txt file")
    with tempfile.TemporaryDirectory(prefix="tako-demo-") as scratch:
        return Director(options.folder, Path(scratch), policy).play()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
