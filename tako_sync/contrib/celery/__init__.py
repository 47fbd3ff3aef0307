"""Celery: tasks that hold a lease while they run, and a beat of which any number may be started.

tasks       leased: a decorator below @app.task
keys        a lease for each of a declared set of keys
shutdown    how a running task hears that its worker ends
beat        LeasedScheduler: one of several beats sends
sent        what a beat has sent, as its lease remembers it
"""

from __future__ import annotations

from tako_sync.contrib.celery.tasks import leased as leased

__all__ = ["leased"]
