"""The application: its Singleton, and where its database is."""

from __future__ import annotations

import logging
import os

import tako_sync as tako

from .numbering import Books

log = logging.getLogger("shop")


def books() -> Books:
    """Return the database that ``SHOP_DATABASE`` names."""
    return Books(os.environ.get("SHOP_DATABASE") or "sqlite:///shop.sqlite3")


@tako.Singleton
def invoicer(ctx: tako.Ctx) -> None:
    """Number what has come in, every two seconds, for as long as the lease is held."""
    ours = books()
    while not ctx.cancelled:
        count = ours.sweep(ctx.fence)
        if count:
            through = ours.last_number()
            log.info("invoicer: assigned invoice numbers orders=%d through=%d", count, through)
        ctx.wait(2)
