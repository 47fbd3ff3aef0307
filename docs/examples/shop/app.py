"""The application: its Singleton, and where its database is."""

from __future__ import annotations

import logging
import os

import tako_sync as tako

from .numbering import Books

log = logging.getLogger("shop")


def database() -> str:
    """Return the path of the database that ``SHOP_DATABASE`` names."""
    url = os.environ.get("SHOP_DATABASE", "")
    if not url:
        return "shop.sqlite3"
    if not url.startswith("sqlite:///"):
        raise ValueError(f"SHOP_DATABASE {url!r}: write sqlite:///absolute/path")
    return url.removeprefix("sqlite://")


@tako.Singleton
def invoicer(ctx: tako.Ctx) -> None:
    """Number what has come in, every two seconds, for as long as the lease is held."""
    books = Books(database())
    try:
        while not ctx.cancelled:
            count = books.sweep(ctx.fence)
            if count:
                through = books.invoices()[-1][0]
                log.info("invoicer: assigned invoice numbers orders=%d through=%d", count, through)
            ctx.wait(float(os.environ.get("SHOP_PAUSE", "2")))
    finally:
        books.close()
