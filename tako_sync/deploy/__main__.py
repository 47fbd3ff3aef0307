"""``python -m tako_sync.deploy shop.app --project ... --region ... --image ... --backend ...``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tako_sync.deploy.files import write
from tako_sync.deploy.target import Target
from tako_sync.errors import ConfigurationError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tako_sync.deploy",
        description="Write the Cloud Run manifests of an application: a service for each "
        "Singleton, a job and a Cloud Scheduler job for each Cron.",
    )
    parser.add_argument("module", help="what declares them, such as shop.app")
    for option, what in (
        ("project", "the Google Cloud project"),
        ("region", "such as europe-west1"),
        ("image", "of the container"),
    ):
        parser.add_argument(f"--{option}", required=True, help=what)
    for option, what in (
        ("app", "part of every name"),
        ("env", "likewise"),
        ("backend", "the storage of the leases, such as gs://bucket"),
    ):
        variable = f"TAKO_{option.upper()}"
        there = os.environ.get(variable)
        parser.add_argument(
            f"--{option}", default=there, required=not there, help=f"{what}; or {variable}"
        )
    parser.add_argument("--service-account", metavar="EMAIL", help="what the containers run as")
    parser.add_argument("--python", default="python", help="the interpreter in the image")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="environ")
    parser.add_argument("--out", default="deploy", metavar="FOLDER", help="default: deploy")
    chosen = parser.parse_args(arguments)
    for setting in chosen.environ:
        if "=" not in setting:
            parser.error(f"--set takes NAME=VALUE, not {setting!r}")
    try:
        target = Target(
            project=chosen.project,
            region=chosen.region,
            image=chosen.image,
            app=chosen.app,
            env=chosen.env,
            backend=chosen.backend,
            service_account=chosen.service_account,
            python=chosen.python,
            environ=dict(setting.split("=", 1) for setting in chosen.environ),
        )
        written = write(chosen.module, target, chosen.out)
    except ConfigurationError as error:
        parser.error(str(error))
    for path in written:
        print(path)  # noqa: T201 - a program's output
    return 0


if __name__ == "__main__":
    sys.exit(main())
