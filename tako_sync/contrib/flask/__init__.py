"""Flask: ``Tako(app)`` binds an application; its ``guard`` holds a lease while a view runs."""

from __future__ import annotations

from tako_sync.contrib.flask.extension import Tako as Tako

__all__ = ["Tako"]
