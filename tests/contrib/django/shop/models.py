"""A ledger whose rows know their fence."""

from __future__ import annotations

from django.db import models

from tako_sync.contrib.django.fenced import FencedModel


class Entry(models.Model):
    text: models.Field[str, str] = models.CharField(max_length=50)


class Account(FencedModel):
    name: models.Field[str, str] = models.CharField(max_length=50, unique=True)
    balance: models.Field[int, int] = models.IntegerField(default=0)
    entry: models.ForeignKey[Entry | None, Entry | None] = models.ForeignKey(
        Entry, models.CASCADE, null=True
    )


class Rate(FencedModel):
    """Of a natural key."""

    key: models.Field[str, str] = models.CharField(max_length=20, primary_key=True)
    value: models.Field[int, int] = models.IntegerField(default=0)

    class Meta:
        ordering = ("key",)


class Letter(Account):
    """Of two tables: the fence is in the parent's."""

    to: models.Field[str, str] = models.CharField(max_length=20)
