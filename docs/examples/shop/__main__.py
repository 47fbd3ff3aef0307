"""``python -m shop create``, ``order [N]``, ``run``, ``list``."""

from __future__ import annotations

import logging
import sys

import tako_sync as tako

from .app import books, invoicer


def main(arguments: list[str]) -> None:
    match arguments:
        case ["create"]:
            books().create()
        case ["run"]:
            logging.basicConfig(level=logging.INFO, format="%(message)s")
            tako.install_signal_handlers()
            invoicer.run()
        case ["order", *rest] if len(rest) <= 1:
            for number in range(int(rest[0]) if rest else 1):
                books().order(f"order {number}")
        case ["list"]:
            for number, order in books().invoices():
                print(f"invoice {number}: order {order}")
        case _:
            sys.exit("python -m shop create | order [N] | run | list")


if __name__ == "__main__":
    main(sys.argv[1:])
