"""Rows that know the fence under which they were written, and refuse an older one.

A holder that was paused past its lease, and goes on, does no harm to such a row:
whatever it writes carries an older fence than the row has.
"""

from __future__ import annotations

from typing import Any, TypeVar

from django.db import models, transaction

from tako_sync.ctx import Ctx
from tako_sync.errors import UsageError

M = TypeVar("M", bound="FencedModel")


class FencedOutError(Exception):
    """A holder with a larger fence has written the row: what was to be written is not wanted.

    Attributes:
        fence: the one that is too old.
    """

    def __init__(self, what: str, fence: int) -> None:
        super().__init__(f"{what} was written under a larger fence than {fence}: not written")
        self.fence = fence


class FencedQuerySet(models.QuerySet[M]):
    """Updates that carry a fence."""

    def update_fenced(self, fence: int | Ctx, **values: Any) -> int:
        """Update the rows whose fence is not larger; return how many that were.

        One UPDATE: the check and the write are one step of the database. ``update`` itself knows
        no fence.

        Args:
            fence: of the holder that writes: ``ctx.fence``, or the ctx.
            values: as of ``update``.
        """
        number = number_of(fence)
        written: int = self.filter(fence__lte=number).update(fence=number, **values)
        return written


class FencedModel(models.Model):
    """A model whose rows are written under a fence, with ``save_fenced`` and ``update_fenced``.

    ``save`` knows no fence. Rows are made with fence 0, which every holder's is larger than.
    """

    fence: models.Field[int, int] = models.BigIntegerField(default=0, editable=False)

    objects: FencedQuerySet[Any] = FencedQuerySet.as_manager()  # type: ignore[assignment]

    class Meta:
        abstract = True

    def save_fenced(
        self, fence: int | Ctx, *, update_fields: list[str] | None = None, using: str | None = None
    ) -> None:
        """Save, unless the row was written under a larger fence.

        Args:
            fence: of the holder that writes: ``ctx.fence``, or the ctx.
            update_fields, using: as of ``save``.

        Raises:
            FencedOutError: it was; nothing is written, and the instance is as before.
        """
        number, before = number_of(fence), self.fence
        alias = using or self._state.db
        manager = type(self)._base_manager.using(alias)
        with transaction.atomic(using=manager.db):
            if not self._state.adding:
                # This locks the row until the end of the transaction, so the save that follows
                # cannot meet a larger fence.
                row = manager.filter(pk=self.pk, fence__lte=number)
                if not row.update(fence=number) and manager.filter(pk=self.pk).exists():
                    raise FencedOutError(f"{self._meta.label} {self.pk!r}", number)
            self.fence = number
            fields = None if update_fields is None else {*update_fields, "fence"}
            try:
                self.save(update_fields=fields, using=using)
            except BaseException:
                self.fence = before
                raise


def number_of(fence: int | Ctx) -> int:
    """Return the fence itself.

    Raises:
        UsageError: it is none.
    """
    if isinstance(fence, Ctx):
        return fence.fence
    if isinstance(fence, bool) or not isinstance(fence, int):
        raise UsageError(f"fence is ctx.fence, or the ctx, not {fence!r}")
    return fence
