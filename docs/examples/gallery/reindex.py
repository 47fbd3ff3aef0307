"""The gallery's index is rebuilt by one at a time, however often that is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tako_sync as tako

relock = tako.Lock("reindex")
PAGE = Path(__file__).with_name("page.html").read_text()
PICTURES = 20


def ledger() -> Path:
    """Where each rebuild that was finished is noted, a line each."""
    return Path(os.environ.get("GALLERY_LEDGER", "gallery-ledger.txt"))


def rebuilds() -> int:
    path = ledger()
    return len(path.read_text().splitlines()) if path.exists() else 0


def rebuild(ctx: tako.Ctx) -> int:
    """Go through the pictures; stop where the lease is lost."""
    seconds = float(os.environ.get("GALLERY_SECONDS", "3"))
    for _picture in range(PICTURES):
        ctx.wait(seconds / PICTURES)  # the work; it ends at once if the ctx is cancelled
        ctx.check()
    with ledger().open("a") as file:
        file.write(f"{ctx.fence}\n")
    return PICTURES


def reindex() -> dict[str, Any]:
    """Rebuild, unless someone does so already: then this call collapses into that one."""
    started, pictures = relock.try_do(rebuild)
    return {"started": started, "pictures": pictures, "rebuilds": rebuilds()}
