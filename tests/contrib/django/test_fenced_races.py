"""Holders with different fences at one row at once, on a database that lets them: PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections, transaction

from contrib.django.shop.models import Account, Entry, Letter, Rate
from processes.kit_postgres import programs, server
from tako_sync.contrib.django.fenced import FencedOutError

DB = "races"
PATIENCE = 40.0
ROUNDS = 15


@pytest.fixture(scope="module")
def postgresql() -> Iterator[None]:
    installed = programs()
    if installed is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with server(installed) as url:
        folder = url.partition("host=")[2]
        connections.settings[DB] = {
            **connections.settings["default"],
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "USER": "shop",
            "HOST": folder,
        }
        try:
            with connections[DB].schema_editor() as editor:
                for model in (Entry, Account, Letter, Rate):
                    editor.create_model(model)
            yield
        finally:
            connections[DB].close()
            del connections[DB], connections.settings[DB]


class Holder:
    """One in a thread of its own, with a connection of its own."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self._do = do
        self.outcome: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._do()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.outcome = error
        finally:
            connections[DB].close()

    def ends(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.outcome


def new_rate(number: int, fence: int) -> Rate:
    return Rate(key=f"key {number}", value=fence)


def new_letter(number: int, fence: int) -> Letter:
    return Letter(pk=number + 1, name=f"name {number}", to="x", balance=fence)


@pytest.mark.usefixtures("postgresql")
@pytest.mark.parametrize("make", [new_rate, new_letter])
def test_of_three_that_make_a_row_the_largest_fence_always_writes_it(
    make: Callable[[int, int], Rate | Letter],
) -> None:
    for number in range(ROUNDS):
        barrier = threading.Barrier(3)

        def write(fence: int, number: int = number, barrier: threading.Barrier = barrier) -> int:
            barrier.wait(PATIENCE)
            make(number, fence).save_fenced(fence, using=DB)
            return fence

        holders = [Holder(lambda fence=fence: write(fence)) for fence in (1, 2, 3)]  # type: ignore[misc]
        outcomes = [holder.ends() for holder in holders]
        assert outcomes[2] == 3
        assert all(isinstance(one, (int, FencedOutError)) for one in outcomes), outcomes
        made = make(number, 3)
        row: Any = type(made)._base_manager.using(DB).get(pk=made.pk)
        assert (row.fence, getattr(row, "value", 3), getattr(row, "balance", 3)) == (3, 3, 3)


def by_name(fence: int) -> int:
    rows = Account.objects.using(DB).filter(name="late")
    return int(rows.update_fenced(fence, balance=fence))


def by_another_table(fence: int) -> int:
    rows = Account.objects.using(DB).filter(entry__text="x")
    return int(rows.update_fenced(fence, balance=fence))


def of_two_tables(fence: int) -> int:
    rows = Letter.objects.using(DB).filter(to="late")
    return int(rows.update_fenced(fence, balance=fence, to="y"))


@pytest.mark.usefixtures("postgresql")
@pytest.mark.parametrize("update", [by_name, by_another_table, of_two_tables])
def test_a_late_update_that_has_waited_for_a_row_does_not_write_it(
    update: Callable[[int], int],
) -> None:
    Account.objects.using(DB).all().delete()
    entry = Entry.objects.using(DB).create(text="x")
    letter = Letter(name="late", to="late", entry=entry, balance=1)
    letter.save_fenced(1, using=DB)
    with transaction.atomic(using=DB):
        account = Account.objects.using(DB).get()
        account.balance = 2
        account.save_fenced(2, using=DB)
        late = Holder(lambda: update(1))
        with connections[DB].cursor() as cursor:
            waiting = 0
            while not waiting:  # until it stands at our lock
                cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
                waiting = cursor.fetchone()[0]
    assert late.ends() == 0
    row = Letter.objects.using(DB).get()
    assert (row.fence, row.balance, row.to) == (2, 2, "late")
    assert update(3) == 1
