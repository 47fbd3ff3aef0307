"""Whether a transaction is open that somebody meant, and who ends it."""

from __future__ import annotations

from django.db import connections


def in_transaction(alias: str) -> bool:
    """Return whether this thread is inside ``atomic()`` on a database.

    The transaction that ``TestCase`` puts around each test is none: the code under test does
    not know of it.
    """
    if not hasattr(connections._connections, alias):  # type: ignore[attr-defined]
        return False  # never used in this thread: asking would connect nothing, but make it
    blocks = connections[alias].atomic_blocks
    return any(not getattr(block, "_from_testcase", False) for block in blocks)


def by_hand(alias: str) -> bool:
    """Return whether this thread commits by itself on a database: autocommit is off."""
    connection = connections[alias]
    if connection.in_atomic_block:
        return not connection.commit_on_exit
    opened = connection.connection is not None
    return not (connection.autocommit if opened else connection.settings_dict["AUTOCOMMIT"])


def ends_itself(alias: str) -> bool:
    """Return whether a transaction is open on a database of whose end Django will tell."""
    return (
        in_transaction(alias)
        and not by_hand(alias)
        and not connections[alias].closed_in_transaction  # then there is none any more
    )
