"""A Cron as a job of Cloud Run that runs one slot, and what has Cloud Scheduler start it."""

from __future__ import annotations

from typing import Any, Final

from tako_sync.cron import Cron
from tako_sync.deploy import limits
from tako_sync.deploy.target import Target
from tako_sync.errors import ConfigurationError
from tako_sync.footprint import Footprint

_TO_START: Final = 60.0
"""Seconds that a container may take from the slot's time to its first step."""
_LONGEST_RUN: Final = 3600
"""Seconds. Cloud Run's own default, ten minutes, ends a job that nobody meant to be short."""


def job(cron: Cron, place: str, target: Target) -> dict[str, Any]:
    """Return the manifest of the job that runs a slot, as ``gcloud run jobs replace`` takes it.

    A run that ends without having finished is begun once more by the platform, where the lease's
    record keeps count; without single flight nothing does, and it is not.

    Raises:
        ConfigurationError: the platform does not take its name, or no container would be in time.
    """
    window = cron.config.catch_up
    if window is not None and window < _TO_START:
        raise ConfigurationError(
            f"Cron {cron.name} has catch_up={window:g}: a container that is started for a slot "
            f"begins seconds later, and would miss it. Write {_TO_START:g} or more"
        )
    amounts, _environment = limits.resources(Footprint(), f"Cron {cron.name}")
    container = {
        "image": target.image,
        "command": [target.python, "-m", "tako_sync.serve"],
        "args": [place],
        "env": target.variables,
        "resources": {"limits": amounts},
    }
    spec: dict[str, Any] = {
        "maxRetries": 1 if cron.config.singleflight else 0,
        "timeoutSeconds": str(_LONGEST_RUN),
        "containers": [container],
    }
    if target.service_account is not None:
        spec["serviceAccountName"] = target.service_account
    return {
        "apiVersion": "run.googleapis.com/v1",
        "kind": "Job",
        "metadata": {
            "name": limits.name(target.app, cron.name),
            "namespace": target.project,
            "labels": {"cloud.googleapis.com/location": target.region},
        },
        "spec": {
            "template": {
                "spec": {"taskCount": 1, "parallelism": 1, "template": {"spec": spec}},
            }
        },
    }


def scheduler_job(cron: Cron, target: Target) -> dict[str, Any]:
    """Return the Cloud Scheduler job, as its ``projects.locations.jobs.create`` takes it.

    It may start a slot's job more than once; single flight makes one run of that.

    Raises:
        ConfigurationError: Cloud Scheduler does not read the schedule, or no service account is
            there to start the job as.
    """
    if target.service_account is None:
        raise ConfigurationError(
            f"Cron {cron.name} is started by Cloud Scheduler, as a service account that may run "
            "the job: name it in service_account (--service-account)"
        )
    parent = f"projects/{target.project}/locations/{target.region}"
    name = limits.name(target.app, cron.name)
    return {
        "name": f"{parent}/jobs/{name}",
        "description": f"starts a slot of tako Cron {cron.lease}",
        "schedule": limits.schedule(cron.schedule.expression, f"Cron {cron.name}"),
        "timeZone": cron.config.tz,
        "attemptDeadline": "60s",
        "retryConfig": {"retryCount": 3},
        "httpTarget": {
            "httpMethod": "POST",
            "uri": f"https://run.googleapis.com/v2/{parent}/jobs/{name}:run",
            "oauthToken": {
                "serviceAccountEmail": target.service_account,
                "scope": "https://www.googleapis.com/auth/cloud-platform",
            },
        },
    }
