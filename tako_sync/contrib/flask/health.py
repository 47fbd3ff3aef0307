"""How the Singletons of a process do, as a blueprint."""

from __future__ import annotations

from collections.abc import Callable

import flask
from flask.typing import ResponseReturnValue

from tako_sync.singleton import Singleton
from tako_sync.vigil import Health


def blueprint(singletons: tuple[Singleton, ...], prefix: str) -> flask.Blueprint:
    """Return the blueprint of :meth:`tako_sync.contrib.flask.Tako.health`."""
    made = flask.Blueprint("tako", __name__, url_prefix=prefix)

    def tell(well: Callable[[Health], bool]) -> tuple[flask.Response, int, dict[str, str]]:
        found = {singleton.name: singleton.health() for singleton in singletons}
        facts = {name: {"state": h.state, "reason": h.reason} for name, h in found.items()}
        status = 200 if all(map(well, found.values())) else 503
        return flask.jsonify(facts), status, {"Cache-Control": "no-store"}

    @made.get("/health")
    def health() -> ResponseReturnValue:
        return tell(bool)

    @made.get("/live")
    def live() -> ResponseReturnValue:
        return tell(lambda health: health.alive)

    return made
