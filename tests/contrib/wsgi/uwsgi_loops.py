"""The loops in uWSGI's workers: started after the fork, handed over when a worker ends."""

from __future__ import annotations

from typing import Any

import uwsgi
from uwsgidecorators import postfork

from contrib.wsgi import loops

app: Any = loops.app


def start() -> None:
    runners = loops.start()
    uwsgi.atexit = lambda: loops.stop(runners)  # type: ignore[attr-defined]


if "lazy-apps" in uwsgi.opt:
    start()  # each worker imports this
else:
    postfork(start)
