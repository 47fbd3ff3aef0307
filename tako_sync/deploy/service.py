"""A Singleton as a Knative service, as ``gcloud run services replace`` takes it.

One instance, always on, that serves nobody: its ingress is internal, it has no URL, nobody is given
the right to invoke it, and its endpoint answers health checks alone.
"""

from __future__ import annotations

from typing import Any, Final

from tako_sync.deploy import limits
from tako_sync.deploy.target import Target
from tako_sync.endpoint import LIVE
from tako_sync.serve import PORT
from tako_sync.singleton import Singleton

_TO_START: Final = {"periodSeconds": 5, "timeoutSeconds": 3, "failureThreshold": 24}
"""Two minutes to import the application in."""
_TO_LIVE: Final = {"periodSeconds": 30, "timeoutSeconds": 5, "failureThreshold": 3}


def _probe(timings: dict[str, int]) -> dict[str, Any]:
    return {"httpGet": {"path": LIVE, "port": PORT}} | timings


def service(singleton: Singleton, place: str, target: Target) -> dict[str, Any]:
    """Return the manifest of a Singleton.

    Args:
        singleton: its footprint is honoured.
        place: ``module:variable``.
        target: where to.

    Raises:
        ConfigurationError: the platform does not take its name or its footprint.
    """
    whose = f"Singleton {singleton.name}"
    amounts, environment = limits.resources(singleton.config.footprint, whose)
    container: dict[str, Any] = {
        "image": target.image,
        "command": [target.python, "-m", "tako_sync.serve"],
        "args": [place],
        "env": target.variables,
        "ports": [{"name": "http1", "containerPort": PORT}],
        "resources": {"limits": amounts},
        "startupProbe": _probe(_TO_START),
        "livenessProbe": _probe(_TO_LIVE),
    }
    spec: dict[str, Any] = {"containerConcurrency": 1, "containers": [container]}
    if target.service_account is not None:
        spec["serviceAccountName"] = target.service_account
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {
            "name": limits.name(target.app, singleton.name),
            "namespace": target.project,
            "labels": {"cloud.googleapis.com/location": target.region},
            "annotations": {
                "run.googleapis.com/ingress": "internal",
                "run.googleapis.com/default-url-disabled": "true",
                "run.googleapis.com/description": f"tako Singleton {singleton.lease}",
            },
        },
        "spec": {
            "template": {
                "metadata": {
                    "annotations": {
                        "autoscaling.knative.dev/minScale": "1",
                        "autoscaling.knative.dev/maxScale": "1",
                        # Else the loop has a CPU only while a request is served: never.
                        "run.googleapis.com/cpu-throttling": "false",
                        "run.googleapis.com/execution-environment": environment,
                    }
                },
                "spec": spec,
            },
            "traffic": [{"latestRevision": True, "percent": 100}],
        },
    }
