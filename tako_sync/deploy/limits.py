"""What Cloud Run and Cloud Scheduler take: names, amounts, schedules. Refused before they do.

Sources: the discovery documents of run.v1, run.v2 and cloudscheduler.v1; Cloud Run's pages on CPU
and memory limits; Cloud Scheduler's on the crontab format.
"""

from __future__ import annotations

import re
from typing import Final

from tako_sync.errors import ConfigurationError
from tako_sync.footprint import Footprint

_LONGEST: Final = 49
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MEBI: Final = 1024**2
_GIBI: Final = 1024**3
_UNITS: Final = {
    "Ki": 1024, "Mi": _MEBI, "Gi": _GIBI, "k": 1000, "M": 1000**2, "G": 1000**3,
}  # fmt: skip
_MEMORY_OF: Final = {
    1: (_MEBI * 128, 4 * _GIBI),
    2: (_MEBI * 128, 8 * _GIBI),
    4: (2 * _GIBI, 16 * _GIBI),
    6: (4 * _GIBI, 24 * _GIBI),
    8: (4 * _GIBI, 32 * _GIBI),
}
"""Least and most bytes, by the number of CPUs."""
_SECOND_GENERATION: Final = 512 * _MEBI
_WORD: Final = re.compile(r"[A-Za-z]{3}")
_FIELD: Final = re.compile(r"[0-9*,/-]*")


def name(app: str, thing: str) -> str:
    """Return ``<app>-<name>`` as Cloud Run takes it, with ``-`` for ``_``.

    Raises:
        ConfigurationError: it takes none so long, or made of such characters.
    """
    joined = f"{app}-{thing}".replace("_", "-")
    if len(joined) > _LONGEST:
        raise ConfigurationError(
            f"{joined!r} has {len(joined)} characters, and Cloud Run takes names of "
            f"{_LONGEST}: shorten the app {app!r} or the variable {thing!r}"
        )
    if not _NAME.fullmatch(joined):
        raise ConfigurationError(
            f"Cloud Run takes no name {joined!r}: a-z, 0-9 and '-', beginning with a letter and "
            f"not ending with '-'. It is made of the app {app!r} and the variable {thing!r}"
        )
    return joined


def resources(footprint: Footprint, whose: str) -> tuple[dict[str, str], str]:
    """Return the limits of a container, and the execution environment that has so little.

    Raises:
        ConfigurationError: Cloud Run has no such instance.
    """
    cpu = _cpus(footprint.cpu)
    memory = _bytes(footprint.memory)
    if cpu < 1:
        raise ConfigurationError(
            f"the footprint of {whose} has cpu {footprint.cpu}: Cloud Run gives less than one CPU "
            "only while a request is served, and the loop would stand still: write 1"
        )
    if cpu not in _MEMORY_OF:
        raise ConfigurationError(
            f"the footprint of {whose} has cpu {footprint.cpu}, and Cloud Run has instances of "
            "1, 2, 4, 6 and 8"
        )
    least, most = _MEMORY_OF[int(cpu)]
    if not least <= memory <= most:
        raise ConfigurationError(
            f"the footprint of {whose} has {footprint.memory}, and Cloud Run gives {cpu:g} CPU "
            f"{_shown(least)} to {_shown(most)}"
        )
    environment = "gen2" if memory >= _SECOND_GENERATION else "gen1"
    return {"cpu": f"{cpu:g}", "memory": footprint.memory}, environment


def schedule(expression: str, whose: str) -> str:
    """Return a crontab expression that Cloud Scheduler reads as we do.

    Raises:
        ConfigurationError: it does not.
    """
    for part in expression.split():
        if not _FIELD.fullmatch(_WORD.sub("", part)):
            raise ConfigurationError(
                f"the schedule of {whose}, {expression!r}, has {part!r}, which Cloud Scheduler "
                "does not read: numbers, names of three letters, and * , - / alone"
            )
    if re.search(r"(^|[^0-9])7", expression.split()[4]):
        raise ConfigurationError(
            f"the schedule of {whose}, {expression!r}, has day 7 of the week, which Cloud "
            "Scheduler does not know: write 0, or SUN"
        )
    return expression


def _cpus(text: str) -> float:
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _bytes(text: str) -> float:
    unit = text.lstrip("0123456789.")
    return float(text[: -len(unit)]) * _UNITS[unit]


def _shown(amount: int) -> str:
    return f"{amount // _GIBI}Gi" if amount >= _GIBI else f"{amount // _MEBI}Mi"
