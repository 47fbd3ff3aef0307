"""The objects of one bucket: compare-and-swap on generations, strictly."""

from __future__ import annotations

import base64
import hashlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any, Final

from .answers import Refusal, no_object, not_met, too_fast
from .options import Options


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # noqa: PLW2901 - shifted out
        table.append(byte)
    return table


_TABLE: Final = _crc_table()


def crc32c(body: bytes) -> str:
    """Return the CRC-32C (Castagnoli) of ``body`` as the service writes it."""
    crc = 0xFFFFFFFF
    for byte in body:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return base64.b64encode((crc ^ 0xFFFFFFFF).to_bytes(4, "big")).decode()


def md5(body: bytes) -> str:
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return base64.b64encode(digest).decode()


def rfc3339(at: float) -> str:
    """Return seconds since 1970 as metadata has them, to the millisecond."""
    moment = datetime.fromtimestamp(at, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


@dataclass(frozen=True)
class Stored:
    """One version of an object.

    Attributes:
        name: the name.
        body: the bytes.
        generation: of the body.
        metageneration: of the metadata, from 1 with each generation.
        created: when this generation was written, by the server's clock, since 1970.
        updated: when its metadata were.
        properties: what the writer set: ``cacheControl``, ``contentType``, ``metadata``, …
    """

    name: str
    body: bytes
    generation: int
    metageneration: int
    created: float
    updated: float
    properties: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def crc32c(self) -> str:
        return crc32c(self.body)

    @property
    def etag(self) -> str:
        return base64.b64encode(f"{self.generation}/{self.metageneration}".encode()).decode()

    @property
    def cache_control(self) -> str | None:
        value = self.properties.get("cacheControl")
        return None if value is None else str(value)


_CONDITIONS: Final = (
    "ifGenerationMatch",
    "ifGenerationNotMatch",
    "ifMetagenerationMatch",
    "ifMetagenerationNotMatch",
)


@dataclass(frozen=True)
class Conditions:
    """The preconditions of a request; a generation of 0 stands for no object."""

    generation_match: int | None = None
    generation_not_match: int | None = None
    metageneration_match: int | None = None
    metageneration_not_match: int | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Conditions:
        """Read them from a query.

        Raises:
            Refusal: one of them cannot be read, or is none that there is: to pass over it
                would be to write without the condition that was asked for.
        """
        for key in query:
            if key.startswith("if") and key not in _CONDITIONS:
                raise Refusal(400, "invalidParameter", f"Unknown precondition: {key}")

        def number(key: str) -> int | None:
            text = query.get(key)
            if text is None:
                return None
            if not text.isascii() or not text.isdigit():
                raise Refusal(400, "invalidParameter", f"Invalid value for {key}: '{text}'")
            return int(text)

        return cls(*map(number, _CONDITIONS))

    def check(self, current: Stored | None, *, reading: bool) -> None:
        """Raise the refusal of a request that meets ``current``."""
        generation = current.generation if current else 0
        metageneration = current.metageneration if current else 0
        if self.generation_match not in (None, generation):
            raise not_met()
        if self.metageneration_match not in (None, metageneration):
            raise not_met()
        same = self.generation_not_match == generation
        if same or self.metageneration_not_match == metageneration:
            raise Refusal(304) if reading else not_met()


class Objects:
    """The live objects of a bucket. All methods are atomic; versions that were replaced are gone.

    Args:
        bucket: its name, for messages.
        options: those of the server.
        wall: seconds since 1970.
        monotonic: what the interval between writes is measured with.
        seed: of the random generations.
    """

    def __init__(
        self,
        bucket: str,
        options: Options,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
        seed: int,
    ) -> None:
        self.bucket = bucket
        self._options = options
        self._wall = wall
        self._monotonic = monotonic
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._live: dict[str, Stored] = {}
        self._used: set[int] = {0}
        self._last = 0
        self._changed: dict[str, float] = {}

    def peek(self, name: str) -> Stored | None:
        """Return the live version, if there is one."""
        with self._lock:
            return self._live.get(name)

    def get(self, name: str, conditions: Conditions, pinned: int | None) -> Stored:
        """Return the live version; ``pinned`` is the only generation that will do."""
        with self._lock:
            return self._found(name, conditions, pinned, reading=True)

    def put(
        self,
        name: str,
        body: bytes,
        properties: Mapping[str, Any],
        conditions: Conditions | None = None,
        allow: Callable[[Stored | None], None] = lambda current: None,
    ) -> Stored:
        """Store a new generation.

        Args:
            name: of the object.
            body: its bytes.
            properties: what the writer sets.
            conditions: None is direct access, which no rate holds up.
            allow: raises the refusal of a writer that may not replace this version.
        """
        with self._lock:
            current = self._live.get(name)
            allow(current)
            if conditions is not None:
                conditions.check(current, reading=False)
                self._pace(name)
            now = self._wall() + self._options.clock_shift
            stored = Stored(name, body, self._next(), 1, now, now, dict(properties))
            self._live[name] = stored
            return stored

    def patch(
        self, name: str, changes: Mapping[str, Any], conditions: Conditions, pinned: int | None
    ) -> Stored:
        """Change metadata: the generation stays, the metageneration rises."""
        with self._lock:
            found = self._found(name, conditions, pinned, reading=False)
            self._pace(name)
            merged = {**found.properties, **changes}
            stored = replace(
                found,
                properties={key: value for key, value in merged.items() if value is not None},
                metageneration=found.metageneration + 1,
                updated=self._wall() + self._options.clock_shift,
            )
            self._live[name] = stored
            return stored

    def delete(
        self, name: str, conditions: Conditions | None = None, pinned: int | None = None
    ) -> None:
        """Remove the live version."""
        with self._lock:
            if conditions is None:
                self._live.pop(name, None)
                return
            self._found(name, conditions, pinned, reading=False)
            self._pace(name)
            del self._live[name]

    def page(self, prefix: str, after: str, start: str, limit: int) -> tuple[Sequence[Stored], str]:
        """Return up to ``limit`` objects in the order of their names, and the last name of a
        page that is not the last one."""
        with self._lock:
            names = sorted(
                name
                for name in self._live
                if name.startswith(prefix) and name > after and name >= start
            )
            page = [self._live[name] for name in names[:limit]]
        return page, page[-1].name if len(names) > limit else ""

    def _found(
        self, name: str, conditions: Conditions, pinned: int | None, *, reading: bool
    ) -> Stored:
        current = self._live.get(name)
        if current is None or pinned not in (None, current.generation):
            raise no_object(self.bucket, name)
        conditions.check(current, reading=reading)
        return current

    def _pace(self, name: str) -> None:
        now = self._monotonic()
        last = self._changed.get(name)
        if last is not None and now - last < self._options.write_interval:
            raise too_fast(self.bucket, name)
        self._changed[name] = now

    def _next(self) -> int:
        generation = max(self._last + 1, int(self._wall() * 1_000_000))
        if self._options.random_generations:
            generation = 0
        while generation in self._used:  # never twice, whatever is switched in between
            generation = self._chance.randrange(10**15, 2 * 10**15)
        self._used.add(generation)
        self._last = max(self._last, generation)
        return generation
