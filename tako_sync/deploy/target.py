"""Where an application is deployed to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from attrs import Factory, field, frozen

from tako_sync import names
from tako_sync.errors import ConfigurationError

_HERE: Final = ("memory", "sqlite")
"""Storages that exclude nobody on another machine."""
_OURS: Final = ("TAKO_APP", "TAKO_ENV", "TAKO_BACKEND")
_GIVEN: Final = ("PORT", "K_SERVICE", "K_REVISION", "K_CONFIGURATION")
"""Variables that Cloud Run sets itself, and refuses."""
_PROJECT: Final = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]|[0-9]+")
_REGION: Final = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+")
_IMAGE: Final = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")
_ACCOUNT: Final = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@frozen
class Target:
    """Where an application is deployed to, and as what.

    Args:
        project: of Google Cloud, by id or number.
        region: of Cloud Run and Cloud Scheduler, such as ``europe-west1``.
        image: of the container; tako_sync and the application are installed in it.
        app, env: as of :func:`tako_sync.configure`; the app is the beginning of each name.
        backend: URL of the storage of the leases, which all instances share: ``gs://bucket``.
        service_account: e-mail address of the account that the containers run as, and that Cloud
            Scheduler starts jobs as. None: the project's default one, which then has to be named
            for applications with Crons.
        python: the interpreter in the image.
        environ: further environment variables of the containers.

    Raises:
        ConfigurationError: one of them cannot be.
    """

    project: str
    region: str
    image: str
    app: str
    env: str
    backend: str
    service_account: str | None = None
    python: str = "python"
    environ: Mapping[str, str] = field(default=Factory(dict))

    def __attrs_post_init__(self) -> None:
        names.part("app", self.app)
        names.part("env", self.env)
        _matches("project", self.project, _PROJECT, "the id of one, such as shop-prod-1234")
        _matches("region", self.region, _REGION, "one such as europe-west1")
        _matches("image", self.image, _IMAGE, "one such as europe-docker.pkg.dev/shop/shop/app:1")
        _matches("backend", self.backend, re.compile(r"[a-z][a-z0-9+.-]*:.*"), "a URL")
        if self.backend.partition(":")[0] in _HERE:
            raise ConfigurationError(
                f"backend {self.backend!r} is of one machine, and excludes nobody on the others "
                "that the application runs on: write gs://bucket"
            )
        if self.service_account is not None:
            _matches("service_account", self.service_account, _ACCOUNT, "an e-mail address")
        if not isinstance(self.python, str) or not self.python:
            raise ConfigurationError(f"python is the interpreter's name, not {self.python!r}")
        for variable, value in self.environ.items():
            _matches("environ", variable, _VARIABLE, "a variable's name")
            if variable in _OURS + _GIVEN:
                whose = "Target's own fields say" if variable in _OURS else "Cloud Run sets"
                raise ConfigurationError(f"environ has {variable}, which {whose}: leave it out")
            if not isinstance(value, str):
                raise ConfigurationError(f"environ[{variable!r}] is a text, not {value!r}")

    @property
    def variables(self) -> list[dict[str, str]]:
        """The environment of a container."""
        ours = dict(zip(_OURS, (self.app, self.env, self.backend)))
        return [{"name": name, "value": value} for name, value in (ours | {**self.environ}).items()]


def _matches(what: str, value: object, pattern: re.Pattern[str], like: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ConfigurationError(f"{what} {value!r} is none: write {like}")
