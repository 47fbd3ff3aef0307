"""``python -m shop order [N]``, ``run``, ``list``."""

from __future__ import annotations

import logging
import sys

import tako_sync as tako

from .app import database, invoicer
from .numbering import Books


def main(arguments: list[str]) -> None:
    match arguments:
        case ["run"]:
            logging.basicConfig(level=logging.INFO, format="%(message)s")
            tako.install_signal_handlers()
            invoicer.run()
        case ["order", *rest] if len(rest) <= 1:
            books = Books(database())
            for number in range(int(rest[0]) if rest else 1):
                books.order(f"order {number}")
            books.close()
        case ["list"]:
            books = Books(database())
            for number, order in books.invoices():
                print(f"invoice {number}: order {order}")
            books.close()
        case _:
            sys.exit("python -m shop order [N] | run | list")


if __name__ == "__main__":
    main(sys.argv[1:])
