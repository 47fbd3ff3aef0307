"""All manifests of an application, as files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tako_sync.application import declared_in
from tako_sync.deploy.job import job, scheduler_job
from tako_sync.deploy.service import service
from tako_sync.deploy.target import Target
from tako_sync.errors import ConfigurationError

_HEAD: Final = "# Written by tako_sync.deploy, from {module}: change that, and write it anew.\n"


def manifests(module: ModuleType | str, target: Target) -> dict[str, dict[str, Any]]:
    """Return what is to be deployed for a module, by the name of its file.

    Raises:
        ConfigurationError: the module declares nothing; or the platform does not take what it
            declares. Nothing is returned unless all of it can be.
    """
    application = declared_in(module)
    found: dict[str, dict[str, Any]] = {}
    for singleton in application.singletons:
        manifest = service(singleton, application.place(singleton), target)
        _add(found, f"{manifest['metadata']['name']}.service.yaml", manifest)
    for cron in application.crons:
        manifest = job(cron, application.place(cron), target)
        name = manifest["metadata"]["name"]
        _add(found, f"{name}.job.yaml", manifest)
        _add(found, f"{name}.scheduler.json", scheduler_job(cron, target))
    return found


def write(module: ModuleType | str, target: Target, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the manifests of a module into a folder, which is made; return their paths.

    Each file is replaced whole. Files that are there for what is declared no more stay.

    Raises:
        ConfigurationError: as of :func:`manifests`, and nothing is written; or PyYAML is not
            installed.
        OSError: the folder cannot be written.
    """
    application = declared_in(module)
    texts = {
        name: _text(name, manifest, application.module)
        for name, manifest in manifests(module, target).items()
    }
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        beside = where / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(where / name)
    return [where / name for name in texts]


def _add(found: dict[str, dict[str, Any]], name: str, manifest: dict[str, Any]) -> None:
    if name in found:
        raise ConfigurationError(
            f"two variables would both be deployed as {name.partition('.')[0]}, where '_' and '-' "
            "are the same: rename one of them"
        )
    found[name] = manifest


def _text(name: str, manifest: dict[str, Any], module: str) -> str:
    if name.endswith(".json"):
        return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(
            "manifests are written with PyYAML: pip install 'tako-sync[deploy]'"
        ) from None
    return _HEAD.format(module=module) + yaml.safe_dump(manifest, sort_keys=False)
