"""Orders and their invoice numbers, in a database: SQLite or PostgreSQL, by URL."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

_TABLES = sa.MetaData()
_ORDERS = sa.Table(
    "orders",
    _TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("what", sa.Text, nullable=False),
)
_INVOICES = sa.Table(
    "invoices",
    _TABLES,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("order_id", sa.ForeignKey("orders.id"), nullable=False, unique=True),
    sa.Column("fence", sa.BigInteger, nullable=False),
)
_FENCES = sa.Table(
    "fences",
    _TABLES,
    sa.Column("guarded", sa.Text, primary_key=True),
    sa.Column("fence", sa.BigInteger, nullable=False),
)
_GUARDED = "invoices"
_WITHOUT_NUMBER = _ORDERS.c.id.not_in(sa.select(_INVOICES.c.order_id))


class FencedOutError(Exception):
    """A later holder of the lease has been here: what this one would write is not wanted."""


class Books:
    """The shop's database.

    Args:
        url: as SQLAlchemy has it: ``sqlite:///shop.sqlite3``, ``postgresql://user@host/shop``.
    """

    def __init__(self, url: str) -> None:
        made = sa.make_url(url)
        arguments: dict[str, Any] = {}
        if made.get_backend_name() == "postgresql":
            made = made.set(drivername="postgresql+psycopg")
            # A holder that is paused within a sweep has locked the fence: it must not keep the
            # next one from working for longer than that.
            arguments["options"] = "-c idle_in_transaction_session_timeout=5s"
        else:
            arguments["timeout"] = 30
        self._engine = sa.create_engine(made, poolclass=sa.NullPool, connect_args=arguments)

    def create(self) -> None:
        """Make the tables, where they are missing: once, before anything else."""
        _TABLES.create_all(self._engine)
        with self._engine.begin() as db:
            if db.execute(sa.select(_FENCES)).first() is None:
                db.execute(sa.insert(_FENCES).values(guarded=_GUARDED, fence=0))

    def order(self, what: str) -> None:
        """Take in an order."""
        with self._engine.begin() as db:
            db.execute(sa.insert(_ORDERS).values(what=what))

    def invoices(self) -> list[tuple[int, int]]:
        """Return the numbers that were given, with their orders."""
        columns = sa.select(_INVOICES.c.number, _INVOICES.c.order_id)
        with self._engine.connect() as db:
            found = db.execute(columns.order_by(_INVOICES.c.number))
            return [(number, order) for number, order in found]

    def last_number(self) -> int:
        """Return the largest number that was given; 0 if none was."""
        with self._engine.connect() as db:
            return _last_number(db)

    def open_orders(self) -> int:
        """Return how many orders have no number yet."""
        with self._engine.connect() as db:
            count = sa.select(sa.func.count()).select_from(_ORDERS).where(_WITHOUT_NUMBER)
            return int(db.execute(count).scalar_one())

    def sweep(self, fence: int) -> int:
        """Number all orders that have no number yet, in the order in which they came.

        Args:
            fence: of the holder that does it.

        Returns:
            how many were numbered; none are left behind.

        Raises:
            FencedOutError: a holder with a larger fence has swept before; nothing was written.
        """
        with self._engine.begin() as db:
            # First of all, and it locks: a sweep that came with a smaller fence waits here, and
            # is refused.
            row = sa.update(_FENCES).where(_FENCES.c.guarded == _GUARDED)
            if db.execute(row.where(_FENCES.c.fence <= fence).values(fence=fence)).rowcount == 0:
                raise FencedOutError(f"fence {fence} is not the largest any more")
            waiting = sa.select(_ORDERS.c.id).where(_WITHOUT_NUMBER).order_by(_ORDERS.c.id)
            numbered = [
                {"number": number, "order_id": order, "fence": fence}
                for number, order in enumerate(
                    db.execute(waiting).scalars().all(), start=_last_number(db) + 1
                )
            ]
            if numbered:
                db.execute(sa.insert(_INVOICES), numbered)
        return len(numbered)


def _last_number(db: sa.Connection) -> int:
    return int(db.execute(sa.select(sa.func.max(_INVOICES.c.number))).scalar() or 0)
