"""How much of a machine one instance of a Singleton takes. Its number is not up for choice."""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn

from attrs import frozen

from tako_sync.errors import ConfigurationError

_CPU: Final = re.compile(r"[1-9][0-9]*m|[0-9]+(\.[0-9]+)?")
_MEMORY: Final = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(Ki|Mi|Gi|k|M|G)")


def refuse(where: str, options: dict[str, Any]) -> NoReturn:
    """Refuse ``options``, which are none: mostly those that scale other services."""
    raise ConfigurationError(
        f"{where} has no {', '.join(sorted(options))}: a Singleton is one instance with one loop, "
        "min = max = concurrency = 1, and the framework sees to that; its Footprint has cpu and "
        "memory"
    )


@frozen(init=False)
class Footprint:
    """CPU and memory of an instance; all else about it is the framework's.

    Args:
        cpu: CPUs: 1, 0.5 or ``"500m"``.
        memory: ``"512Mi"``, ``"2Gi"``.

    Raises:
        ConfigurationError: no such amount; or an option that scales, which a Singleton has not.
    """

    cpu: str
    memory: str

    def __init__(self, cpu: float | str = "1", memory: str = "512Mi", **options: object) -> None:
        if options:
            refuse("Footprint", options)
        self.__attrs_init__(_cpu(cpu), _memory(memory))  # pyright: ignore[reportAttributeAccessIssue]


def _cpu(value: object) -> str:
    text = f"{value:g}" if isinstance(value, (int, float)) and value is not True else value
    if not isinstance(text, str) or not _CPU.fullmatch(text) or not text.strip("0.m"):
        raise ConfigurationError(f"cpu is a number of CPUs such as 1, 0.5 or '500m', not {value!r}")
    return text


def _memory(value: object) -> str:
    if not isinstance(value, str) or not _MEMORY.fullmatch(value):
        raise ConfigurationError(f"memory is an amount such as '512Mi' or '2Gi', not {value!r}")
    return value
