"""Manifests for Cloud Run: a service for each Singleton of an application, a job for each Cron.

    target     where to: project, region, image, storage
    limits     what the platform takes: names, amounts, schedules
    service    a Singleton as a Knative service
    job        a Cron as a Cloud Run job, and the Cloud Scheduler job that starts it
    files      all of it, as files

``python -m tako_sync.deploy shop.app ...`` writes them. What they start is
:mod:`tako_sync.serve`: it is in the package, so nothing that is generated need be put in an image.
"""

from __future__ import annotations

from tako_sync.deploy.files import manifests as manifests
from tako_sync.deploy.files import write as write
from tako_sync.deploy.target import Target as Target

__all__ = ["Target", "manifests", "write"]
