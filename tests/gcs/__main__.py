"""``python -m gcs`` (or ``tests.gcs``): the server as a process of its own.

It prints its URL, and ends when its standard input does, so that it never outlives the test
that started it, or with Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from .server import GCSServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="gcs", description="A server for tests.")
    parser.add_argument("--bucket", default="bucket")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--options", type=json.loads, default={}, help="as JSON")
    chosen = parser.parse_args()
    server = GCSServer(chosen.bucket, port=chosen.port, **chosen.options)
    with server, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
