"""A lease for each of a declared, finite set of keys: no task's argument makes a new name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final

from attrs import frozen

from tako_sync.errors import ConfigurationError, UsageError
from tako_sync.lock import Lock

_SEVERAL: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@frozen
class Keys:
    """The locks of a task.

    Args:
        name: of the lease; with a key, the beginning of the leases' names.
        key: the parameter whose value chooses the lease; None: there is one lease.
        among: the values that it may have.
    """

    name: str
    key: str | None
    locks: Mapping[object, Lock]
    signature: inspect.Signature

    @classmethod
    def of(
        cls, name: str, fn: Callable[..., Any], key: str | None, among: Iterable[object] | None
    ) -> Keys:
        """Make all locks now.

        Raises:
            ConfigurationError: a key without a set or a set without a key, no such parameter, or
                a value that can be no part of a lease's name.
        """
        signature = inspect.signature(fn)
        if (key is None) != (among is None):
            raise ConfigurationError(
                "key and among belong together: key names a parameter, among its possible values"
            )
        if key is None or among is None:
            return cls(name, None, {None: Lock(name)}, signature)
        parameter = signature.parameters.get(key)
        if parameter is None or parameter.kind in _SEVERAL:
            raise ConfigurationError(f"{fn.__name__} has no parameter {key!r}: {signature}")
        locks = {value: Lock(f"{name}-{_part(value)}") for value in among}
        if len(set(locks.values())) != len(locks) or not locks:
            raise ConfigurationError(
                f"among={among!r} is to have one lease for each value, and at least one"
            )
        plain = {value.value: lock for value, lock in locks.items() if isinstance(value, Enum)}
        return cls(name, key, {**plain, **locks}, signature)

    def lock(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Lock:
        """Return the lock of a call.

        Raises:
            TypeError: the arguments do not fit the function.
            UsageError: the key's value is not in the declared set.
        """
        if self.key is None:
            return self.locks[None]
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        value = bound.arguments[self.key]
        try:
            return self.locks[value]
        except (KeyError, TypeError):  # TypeError: it cannot even be looked up
            known = ", ".join(repr(known) for known in self.locks)
            raise UsageError(
                f"{self.key}={value!r} is none of those that lease {self.name!r} was declared "
                f"for: {known}"
            ) from None


def _part(value: object) -> str:
    plain = value.value if isinstance(value, Enum) else value
    if isinstance(plain, bool) or not isinstance(plain, (str, int)):
        raise ConfigurationError(f"among has {value!r}: a text, an int or a member of an Enum")
    return str(plain).lower()
