"""Rows that know the fence under which they were written, and refuse an older one.

A holder that was paused past its lease, and goes on, does no harm to such a row:
whatever it writes carries an older fence than the row has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from django.db import IntegrityError, models, router, transaction
from django.db.models import F

from tako_sync.ctx import Ctx
from tako_sync.errors import TakoError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

M = TypeVar("M", bound="FencedModel")

_AT_ONCE: Final = 500
"""Rows that are locked by one statement: databases bound the number of its parameters."""


class FencedOutError(TakoError):
    """A holder with a larger fence has written the row, or it is gone: nothing was written.

    Attributes:
        fence: the one that is too old.
    """

    def __init__(self, what: str, fence: int, why: str = "was written under a larger one") -> None:
        super().__init__()
        self._says(f"{what} is not written under fence {fence}: it {why}", what, fence, why)
        self.fence = fence


class FencedQuerySet(models.QuerySet[M]):
    """Updates that carry a fence."""

    def update_fenced(self, fence: int | Ctx, **values: Any) -> int:
        """Update the rows whose fence is not larger; return how many that were.

        The check and the write are one step of the database: one UPDATE; or, where the rows are
        chosen by other tables, or are in two themselves, one transaction in which they are locked
        first. ``update`` itself knows no fence.

        Args:
            fence: of the holder that writes: ``ctx.fence``, or the ctx.
            values: as of ``update``.
        """
        number = number_of(fence)
        self._for_write = True
        self._result_cache = None  # as update() does
        rows = self.using(self.db)
        chosen = rows.filter(fence__lte=number)
        owner = owner_of(self.model)
        if owner is self.model._meta.concrete_model and chosen.query.count_active_tables() <= 1:
            # Django makes one UPDATE of this, whose condition a database looks at once more when
            # it has waited for a row's lock. Of anything else it makes a SELECT and an UPDATE.
            updated: int = chosen.update(fence=number, **values)
            return updated
        key, written = owner._meta.pk.name, 0
        with transaction.atomic(using=rows.db):
            keys = sorted(set(chosen.order_by().values_list(key, flat=True)))
            for first in range(0, len(keys), _AT_ONCE):
                among = {f"{key}__in": keys[first : first + _AT_ONCE]}
                # Changes nothing, and locks: whoever was at these rows has ended. What is chosen
                # after that is chosen by what they have left, and stays until it is updated.
                owner._base_manager.using(rows.db).filter(**among).update(fence=F("fence"))
                written += chosen.filter(**among).update(fence=number, **values)
        return written


class FencedModel(models.Model):
    """A model whose rows are written under a fence, with ``save_fenced`` and ``update_fenced``.

    ``save`` knows no fence. Rows are made with fence 0, which every holder's is larger than.
    """

    fence: models.Field[int, int] = models.BigIntegerField(default=0, editable=False)

    objects: ClassVar[FencedQuerySet[Self]] = FencedQuerySet.as_manager()  # type: ignore[assignment]

    # Of no type: the Meta of a user's model need not inherit from this one.
    Meta: Any = type("Meta", (), {"abstract": True})

    def save_fenced(
        self, fence: int | Ctx, *, update_fields: list[str] | None = None, using: str | None = None
    ) -> None:
        """Save, unless the row was written under a larger fence, or was read and is gone.

        What was deleted cannot say under which fence: a new instance of the same primary key
        makes the row anew. Keep a row that marks the deletion where a late holder may do that.

        Args:
            fence: of the holder that writes: ``ctx.fence``, or the ctx.
            update_fields, using: as of ``save``.

        Raises:
            FencedOutError: it was, or is; nothing is written, and the instance is as before.
        """
        number = number_of(fence)
        before, adding = self._what_a_failure_changes(), self._state.adding
        alias = using or router.db_for_write(type(self), instance=self)
        fields = None if update_fields is None else {*update_fields, "fence"}
        try:
            with transaction.atomic(using=alias):
                found = self._claim(number, alias)
                if not found and not adding and self.pk is not None:
                    raise FencedOutError(self._named(), number, "is gone")
                if not found and fields is None:
                    found = not self._insert(number, alias)
                if found or fields is not None:
                    self.fence, self._state.adding = number, adding and not found
                    self.save(update_fields=fields, using=alias)
        except BaseException:
            self._state.adding = adding
            kept: dict[str, Any] = vars(self)
            for name in self._what_a_failure_changes():
                del kept[name]
            kept.update(before)
            raise

    def _what_a_failure_changes(self) -> dict[str, Any]:
        """Return the fence and the primary keys, of parents, too; none that was deferred."""
        names = ["fence", *(field.attname for field in self._meta.fields if field.primary_key)]
        return {name: vars(self)[name] for name in names if name in vars(self)}

    def _claim(self, number: int, alias: str) -> bool:
        """Write the fence, and so lock the row until the end of the transaction.

        What is saved after that cannot meet a larger one. Returns whether there is a row.
        """
        owner = owner_of(type(self))
        link = self._meta.get_ancestor_link(owner)
        key = getattr(self, owner._meta.pk.attname)
        if key is None and link is not None:
            key = getattr(self, link.attname)
        if key is None:
            return False
        row = owner._base_manager.using(alias).filter(pk=key)
        while not row.filter(fence__lte=number).update(fence=number):
            found = row.select_for_update().values_list("fence", flat=True).first()
            if found is None:
                return False
            if found > number:
                raise FencedOutError(self._named(), number)
            # Someone with a smaller one has inserted it between the two.
        return True

    def _insert(self, number: int, alias: str) -> bool:
        """Insert a row; return False if somebody else has, and it was claimed since."""
        self.fence = number
        # Nothing but an INSERT, in all tables from that of the fence on: save() would try an
        # UPDATE before, and meet a row that another holder has inserted since the claim.
        try:
            with transaction.atomic(using=alias):
                self.save(force_insert=(owner_of(type(self)),), using=alias)
        except IntegrityError:
            if not self._claim(number, alias):
                raise  # it was of something else
            return False
        return True

    def _named(self) -> str:
        return f"{self._meta.label} {self.pk!r}"


def owner_of(model: type[models.Model]) -> Any:
    """Return the model whose table has the fence: a parent, where models inherit tables."""
    return model._meta.get_field("fence").model


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
