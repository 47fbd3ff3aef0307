"""The order of base classes, where a class after another one would do nothing at all."""

from __future__ import annotations

from tako_sync.errors import UsageError


def comes_first(cls: type, mixin: type, base: type) -> None:
    """Refuse a class whose ``base`` would answer before ``mixin`` is asked.

    Raises:
        UsageError: it is such a one.
    """
    line = cls.__mro__
    if base in line and line.index(base) < line.index(mixin):
        raise UsageError(
            f"class {cls.__name__}: write {mixin.__name__} before {base.__name__}'s classes, or it "
            f"does nothing: class {cls.__name__}({mixin.__name__}, ...)"
        )
