"""The variable that declares a thing is the thing's name: found when it is first needed.

``invoicer = tako.Singleton(assign_invoices)`` knows its module when it is made, and its name only
once the assignment has been done.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Final

from tako_sync import names
from tako_sync.errors import ConfigurationError

_MODULE_LEVEL: Final = "<module>"


class Declaration:
    """Where a thing is declared.

    Args:
        kind: ``Singleton`` or ``Cron``, for the messages.
        thing: what is declared.
        depth: how many calls up the declaring line stands, as of ``sys._getframe``.
    """

    def __init__(self, kind: str, thing: object, depth: int) -> None:
        self._kind = kind
        self._thing = weakref.ref(thing)
        frame = sys._getframe(depth)
        self._variables = frame.f_globals
        self._at_module_level = frame.f_code.co_name == _MODULE_LEVEL
        self.module: str = frame.f_globals.get("__name__", "?")
        self._where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self._name: str | None = None

    @property
    def name(self) -> str:
        """The name of the declaring variable, in lower case.

        Raises:
            ConfigurationError: there is none, there are several, another module of the
                application declares the same one, or a lease cannot be named so.
        """
        if self._name is None:
            name = self._find()
            _register(self._kind, name, self)
            self._name = name
        return self._name

    def _find(self) -> str:
        variables = list(self._variables.items())
        thing = self._thing()
        found = [variable for variable, value in variables if value is thing]
        what = f"the {self._kind} made at {self._where}"
        if not found:
            why = "" if self._at_module_level else ", not in a function or a class"
            raise ConfigurationError(
                f"{what} has no name: the variable that declares it is its identity. Write "
                f"`name = tako.{self._kind}(...)` at the top level of a module{why}"
            )
        if len(found) > 1:
            raise ConfigurationError(
                f"{what} has several names in {self.module}: {', '.join(sorted(found))}. The "
                "variable that declares it is its identity: keep one of them"
            )
        return names.part(f"the {self._kind} named by the variable", found[0].lower())

    @property
    def file(self) -> str:
        # A program that is also imported runs its file twice, as __main__ and by its name.
        return str(self._variables.get("__file__", self.module))

    def is_of(self, other: Declaration) -> bool:
        """Whether both are one declaration, made anew perhaps: a reload, or ``__main__``."""
        return self.file == other.file


_lock = threading.Lock()
_declared: dict[tuple[str, str], Declaration] = {}


def _register(kind: str, name: str, declaration: Declaration) -> None:
    with _lock:
        first = _declared.get((kind, name))
        alive = first is not None and first._thing() is not None
        if first is not None and alive and not first.is_of(declaration):
            raise ConfigurationError(
                f"{first.module} and {declaration.module} both declare a {kind} named {name!r}: "
                "they would be the same one. Rename one of them"
            )
        _declared[kind, name] = declaration
