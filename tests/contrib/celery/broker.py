"""A broker in a folder: kombu's, but that no reader ever meets half a message."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from time import monotonic
from typing import Any, Final

from celery import Celery
from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps

SCHEME: Final = "folder"


class Channel(filesystem.Channel):  # type: ignore[misc]  # kombu says nothing of its types
    def _put(self, queue: str, message: Any, **_kwargs: Any) -> None:  # type: ignore[override]
        name = f"{round(monotonic() * 1000):015d}_{uuid.uuid4()}.{queue}.msg"
        folder = Path(self.data_folder_out)
        new = folder / f"{name}.new"
        new.write_text(dumps(message))
        os.replace(new, folder / name)


class Transport(filesystem.Transport):  # type: ignore[misc]
    Channel = Channel


TRANSPORT_ALIASES[SCHEME] = f"{__name__}:Transport"


def application(name: str, folder: Path) -> Celery:
    """Return an application whose messages, control and results are in ``folder``.

    If it has a file ``broker``, its messages go to the address that this says.
    """
    app = Celery(name, broker=_broker(folder), backend=f"db+sqlite:///{folder}/results.sqlite3")
    if str(app.conf.broker_url).startswith(SCHEME):
        for part in ("queue", "control", "taken"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        app.conf.broker_transport_options = {
            "data_folder_in": str(folder / "queue"),
            "data_folder_out": str(folder / "queue"),
            "control_folder": str(folder / "control"),
            "store_processed": True,
            "processed_folder": str(folder / "taken"),
            "polling_interval": 0.02,
        }
    app.conf.update(
        broker_connection_retry_on_startup=True,
        result_extended=True,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
    )
    return app


def _broker(folder: Path) -> str:
    other = folder / "broker"
    return other.read_text() if other.exists() else f"{SCHEME}://"
