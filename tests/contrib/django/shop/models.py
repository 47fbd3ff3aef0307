"""A ledger whose rows know their fence."""

from __future__ import annotations

from django.db import models

from tako_sync.contrib.django.fenced import FencedModel


class Account(FencedModel):
    name: models.Field[str, str] = models.CharField(max_length=50)
    balance: models.Field[int, int] = models.IntegerField(default=0)


class Entry(models.Model):
    text: models.Field[str, str] = models.CharField(max_length=50)
