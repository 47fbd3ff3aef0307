"""What an application declares: the Singletons and Crons of one module, found in its variables."""

from __future__ import annotations

import importlib
from types import ModuleType

from attrs import frozen

from tako_sync.cron import Cron
from tako_sync.errors import ConfigurationError
from tako_sync.singleton import Singleton


@frozen
class Application:
    """The Singletons and Crons that the top level of a module knows, its own and imported ones.

    Attributes:
        module: its name.
        singletons, crons: by their names, in order.
    """

    module: str
    singletons: tuple[Singleton, ...]
    crons: tuple[Cron, ...]

    @property
    def things(self) -> tuple[Singleton | Cron, ...]:
        return self.singletons + self.crons

    def place(self, thing: Singleton | Cron) -> str:
        """Return ``module:variable``, by which :func:`find` has it from anywhere."""
        variables = vars(importlib.import_module(self.module))
        return f"{self.module}:{min(v for v, value in variables.items() if value is thing)}"


def declared_in(module: ModuleType | str) -> Application:
    """Return what a module declares; it is imported if it is given by name.

    Raises:
        ConfigurationError: there is no such module, it declares neither a Singleton nor a Cron, or
            one of them has no name (:attr:`Singleton.name`).
    """
    module = _imported(module) if isinstance(module, str) else module
    if not isinstance(module, ModuleType):
        raise ConfigurationError(f"module is a module or the name of one, not {module!r}")
    values = {id(value): value for value in list(vars(module).values())}.values()
    singletons = [value for value in values if isinstance(value, Singleton)]
    crons = [value for value in values if isinstance(value, Cron)]
    if not singletons and not crons:
        raise ConfigurationError(
            f"{module.__name__} declares neither a Singleton nor a Cron at its top level: name the "
            "module that does, or import them there"
        )
    return Application(
        module.__name__,
        tuple(sorted(singletons, key=lambda singleton: singleton.name)),
        tuple(sorted(crons, key=lambda cron: cron.name)),
    )


def find(place: str) -> Singleton | Cron:
    """Return the Singleton or Cron at ``module:variable``; the module is imported.

    Raises:
        ConfigurationError: there is none.
    """
    module, colon, variable = place.partition(":")
    if not (module and colon and variable):
        raise ConfigurationError(f"write module:variable, such as shop.app:invoicer, not {place!r}")
    thing = getattr(_imported(module), variable, None)
    if not isinstance(thing, (Singleton, Cron)):
        raise ConfigurationError(f"{module} has no Singleton and no Cron named {variable}")
    return thing


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise ConfigurationError(
            f"there is no module {name!r} here: write it as `import` has it, such as shop.app, and "
            "start from the folder that its first part is in"
        ) from None
    except (ValueError, TypeError):  # "" and relative names
        raise ConfigurationError(f"{name!r} is not the name of a module") from None
