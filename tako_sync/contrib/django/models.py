"""What the admin needs to have a page and permissions for leases: a model without a table."""

from __future__ import annotations

from django.db import models


class Lease(models.Model):
    """A lease, as a thing that permissions are about. It is in no table of the database."""

    class Meta:
        managed = False
        default_permissions = ("view",)
        permissions = (("break_lease", "Can break a lease"),)
        verbose_name = "lease"
        verbose_name_plural = "leases"
