"""Hooks of gunicorn: each worker starts the loops, and hands them over when it ends."""

from typing import Any

from contrib.wsgi import loops


def post_worker_init(worker: Any) -> None:
    worker.tako = loops.start()


def worker_exit(server: Any, worker: Any) -> None:
    loops.stop(getattr(worker, "tako", []))
