"""Orders and their invoice numbers, in a database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

_TABLES = """
CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, what TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS invoices (
    number INTEGER PRIMARY KEY, order_id INTEGER NOT NULL UNIQUE REFERENCES orders, fence INTEGER
);
CREATE TABLE IF NOT EXISTS fences (guarded TEXT PRIMARY KEY, fence INTEGER NOT NULL);
INSERT OR IGNORE INTO fences VALUES ('invoices', 0);
"""


class FencedOutError(Exception):
    """A later holder of the lease has been here: what this one would write is not wanted."""


class Books:
    """The shop's database.

    Args:
        path: of the SQLite file; it is made if it is missing.
    """

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.executescript(_TABLES)

    def close(self) -> None:
        self._db.close()

    def order(self, what: str) -> None:
        """Take in an order."""
        self._db.execute("INSERT INTO orders (what) VALUES (?)", (what,))

    def invoices(self) -> list[tuple[int, int]]:
        """Return the numbers that were given, with their orders."""
        return self._db.execute("SELECT number, order_id FROM invoices ORDER BY number").fetchall()

    def open_orders(self) -> int:
        """Return how many orders have no number yet."""
        missing = "SELECT count(*) FROM orders WHERE id NOT IN (SELECT order_id FROM invoices)"
        (count,) = self._db.execute(missing).fetchone()
        return int(count)

    def sweep(self, fence: int) -> int:
        """Number all orders that have no number yet, in the order in which they came.

        Args:
            fence: of the holder that does it.

        Returns:
            how many were numbered; none are left behind.

        Raises:
            FencedOutError: a holder with a larger fence has swept before; nothing was written.
        """
        with self._transaction():
            found = self._db.execute(
                "UPDATE fences SET fence = :fence WHERE guarded = 'invoices' AND fence <= :fence",
                {"fence": fence},
            )
            if found.rowcount == 0:
                raise FencedOutError(f"fence {fence} is not the largest any more")
            (last,) = self._db.execute("SELECT coalesce(max(number), 0) FROM invoices").fetchone()
            orders = self._db.execute(
                "SELECT id FROM orders WHERE id NOT IN (SELECT order_id FROM invoices) ORDER BY id"
            ).fetchall()
            self._db.executemany(
                "INSERT INTO invoices VALUES (?, ?, ?)",
                [(number, order, fence) for number, (order,) in enumerate(orders, last + 1)],
            )
        return len(orders)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
