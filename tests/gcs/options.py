"""How a server behaves when nothing fails; every option may be changed while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Options:
    """The options of a server, and what they are if nothing is said.

    Attributes:
        random_generations: give each version a number that is unique and in no order, as the
            real service reserves for itself, instead of increasing ones.
        write_interval: refuse with 429 what would change an object within so many seconds of
            its last change; the real service has 1.0. What is refused is not applied.
        clock_shift: seconds by which the server's whole clock is off: ``Date``, and for what
            is written from now on ``Last-Modified``, ``updated`` and ``timeCreated``.
        date_shift: seconds by which ``Date`` alone is off, on top of that.
        send_date: whether answers carry ``Date``.
        send_last_modified: whether reads carry ``Last-Modified``.
        bucket_missing: answer as if the bucket did not exist.
        delay: real seconds that each request waits before it is looked at.
        denied: permissions that the caller lacks: what needs one of them gets a 403.
    """

    random_generations: bool = False
    write_interval: float = 0.0
    clock_shift: float = 0.0
    date_shift: float = 0.0
    send_date: bool = True
    send_last_modified: bool = True
    bucket_missing: bool = False
    delay: float = 0.0
    denied: tuple[str, ...] = ()

    def set(self, changes: Mapping[str, Any]) -> None:
        """Change some of them.

        Raises:
            TypeError: one of them does not exist; none is changed.
        """
        known = {field.name for field in fields(self)}
        if unknown := changes.keys() - known:
            raise TypeError(f"unknown options {sorted(unknown)}: there are {sorted(known)}")
        for name, value in changes.items():
            setattr(self, name, tuple(value) if name == "denied" else value)
