"""Which of a bucket's lifecycle rules may meet the records of leases, and what that would do.

A rule acts where all of its conditions are met. Ages count in days from the writing of an object,
and a held lease is written every few seconds: a rule that waits for a day meets none that is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tako_sync.findings import NOTE, OK, PROBLEM, Finding

_DELETE: Final = "Delete"
_ON_OBJECTS: Final = (_DELETE, "SetStorageClass")
_OF_OLD_VERSIONS: Final = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
_OF_CUSTOM_TIME: Final = ("daysSinceCustomTime", "customTimeBefore")
"""Our objects have no such time, and a rule that asks for it passes them by."""
_ADVICE: Final = "have the rule match other prefixes, or noncurrent versions, only"


def examine(lifecycle: object, folder: str) -> Iterator[Finding]:
    """Look at the rules.

    Args:
        lifecycle: of the bucket's metadata.
        folder: what the names of the leases' objects begin with.
    """
    rules = lifecycle.get("rule") if isinstance(lifecycle, Mapping) else None
    meeting = [rule for rule in rules or [] if _may_meet(rule, folder)]
    if not meeting:
        yield Finding("lifecycle", OK, f"no rule meets {folder}")
    for rule in meeting:
        yield _finding(rule, folder)


def _may_meet(rule: Mapping[str, Any], folder: str) -> bool:
    condition = _condition(rule)
    if _action(rule) not in _ON_OBJECTS or condition.get("isLive") is False:
        return False
    if any(condition.get(name) for name in (*_OF_OLD_VERSIONS, *_OF_CUSTOM_TIME)):
        return False
    prefixes = condition.get("matchesPrefix")
    return not prefixes or any(_overlap(str(prefix), folder) for prefix in prefixes)


def _overlap(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _finding(rule: Mapping[str, Any], folder: str) -> Finding:
    condition = _condition(rule)
    shown = ", ".join(f"{key} {value}" for key, value in condition.items()) or "always"
    which = f"a rule ({_action(rule)}: {shown}) may meet records in {folder}"
    if _action(rule) != _DELETE:
        return Finding("lifecycle", NOTE, f"{which}; another class costs more to replace", _ADVICE)
    days = condition.get("age")
    if isinstance(days, int) and days >= 1:
        return Finding(
            "lifecycle",
            NOTE,
            f"{which}: of leases that nobody has held for {days} days. Who held last is forgotten, "
            "and which slot of a Cron was run; fences rise all the same, by the storage's clock",
            _ADVICE,
        )
    return Finding(
        "lifecycle",
        PROBLEM,
        f"{which}; to delete that of a held lease lets others in beside its holder",
        _ADVICE,
    )


def _action(rule: Mapping[str, Any]) -> str:
    return str((rule.get("action") or {}).get("type", "?"))


def _condition(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    condition = rule.get("condition")
    return condition if isinstance(condition, Mapping) else {}
