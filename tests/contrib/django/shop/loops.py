"""A Singleton and a Cron for the commands."""

from __future__ import annotations

import sys

import tako_sync


@tako_sync.Singleton
def django_invoicer(ctx: tako_sync.Ctx) -> None:
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    while not ctx.wait(0.05):
        pass
    sys.stdout.write("drained\n")
    sys.stdout.flush()


django_sweep = tako_sync.Cron("* * * * *", lambda ctx: None)
