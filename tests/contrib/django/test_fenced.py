"""Rows that refuse an older fence."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import IntegrityError, connection
from django.db.models import F
from django.test import TestCase, override_settings
from typing_extensions import assert_type

from contrib.django.shop.models import Account, Entry, Letter, Rate
from tako_sync.contrib.django import fenced
from tako_sync.contrib.django.fenced import FencedOutError
from tako_sync.contrib.django.testing import TakoTestMixin
from tako_sync.ctx import Ctx
from tako_sync.errors import UsageError
from tako_sync.lock import Lock


@contextmanager
def after(kind: str, do: Callable[[], object]) -> Iterator[None]:
    """Do something once, after the next statement of a kind, as another connection would."""
    left = [do]

    def wrapper(execute: Any, sql: str, *rest: Any) -> object:
        result = execute(sql, *rest)
        if left and sql.startswith(kind):
            left.pop()()
        return result

    with connection.execute_wrapper(wrapper):
        yield
    assert not left


class Fenced(TakoTestMixin, TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.account = Account.objects.create(name="a", balance=1)

    def stored(self) -> tuple[int, int]:
        row = Account.objects.get(pk=self.account.pk)
        return row.balance, row.fence

    def test_a_row_is_written_under_a_fence_that_is_not_older(self) -> None:
        for fence in (5, 5, 7):
            self.account.balance += 1
            self.account.save_fenced(fence)
            assert self.stored() == (self.account.balance, fence)
        assert self.account.fence == 7

    def test_an_older_one_writes_nothing_and_says_so(self) -> None:
        stale = Account.objects.get(pk=self.account.pk)
        self.account.save_fenced(7)
        stale.balance = 99
        with pytest.raises(FencedOutError, match=r"not written under fence 6: .* larger"):
            stale.save_fenced(6)
        assert self.stored() == (1, 7) and stale.fence == 0

    def test_a_holders_ctx_is_its_fence(self) -> None:
        def deposit(ctx: Ctx) -> int:
            self.account.balance = 10
            self.account.save_fenced(ctx)
            return ctx.fence

        assert self.stored() == (1, 0)
        fence = Lock("ledger").do(deposit)
        assert self.stored() == (10, fence)

    def test_an_update_leaves_rows_alone_that_are_ahead(self) -> None:
        ahead = Account.objects.create(name="b", balance=1, fence=9)
        assert Account.objects.update_fenced(8, balance=F("balance") + 1) == 1
        assert self.stored() == (2, 8)
        ahead.refresh_from_db()
        assert (ahead.balance, ahead.fence) == (1, 9)
        assert Account.objects.filter(name="b").update_fenced(10, balance=0) == 1

    def test_a_new_row_is_made_with_its_fence(self) -> None:
        made = Account(name="c")
        made.save_fenced(4)
        assert Account.objects.get(pk=made.pk).fence == 4

    def test_a_row_that_is_written_by_its_key_alone_keeps_its_fence(self) -> None:
        Rate(key="eur", value=1).save_fenced(9)
        late = Rate(key="eur", value=666)
        with pytest.raises(FencedOutError, match="larger"):
            late.save_fenced(5)
        assert late.fence == 0 and late._state.adding
        with pytest.raises(FencedOutError):
            Account(pk=self.make(9).pk, name="x").save_fenced(5)
        Rate(key="eur", value=2).save_fenced(9)
        row = Rate.objects.get()
        assert (row.value, row.fence) == (2, 9)

    def test_a_row_that_another_has_inserted_meanwhile_is_met(self) -> None:
        class Late(Rate):
            class Meta:
                proxy = True
                app_label = "shop"

            def _claim(self, number: int, alias: str) -> bool:
                found = super()._claim(number, alias)
                if not Rate.objects.exists():  # in this test's transaction, rolled back with it
                    Rate.objects.create(key="eur", value=1, fence=9)
                return found

        with pytest.raises(FencedOutError, match="larger"):
            Late(key="eur", value=2).save_fenced(7)
        Late(key="eur", value=2).save_fenced(11)
        row = Rate.objects.get()
        assert (row.value, row.fence) == (2, 11)

    def test_a_row_that_a_smaller_fence_has_inserted_meanwhile_is_claimed_all_the_same(
        self,
    ) -> None:
        with after("UPDATE", lambda: Rate.objects.create(key="eur", value=1, fence=1)):
            Rate(key="eur", value=2).save_fenced(3)
        row = Rate.objects.get()
        assert (row.value, row.fence) == (2, 3)

    def test_no_update_writes_what_a_larger_fence_has_written_since_it_was_chosen(self) -> None:
        """A choice by another table, and rows of two tables, are a SELECT and an UPDATE."""
        self.account.entry = Entry.objects.create(text="x")
        self.account.save_fenced(1)
        letter = Letter(name="l", to="b", balance=1)
        letter.save_fenced(1)

        def ahead() -> None:
            Account.objects.all().update(fence=2, balance=2)

        choices = (
            lambda: Account.objects.filter(entry__text="x").update_fenced(1, balance=9),
            lambda: Letter.objects.filter(to="b").update_fenced(1, balance=9),
            lambda: Letter.objects.filter(to="b").update_fenced(1, to="z"),
            lambda: Letter.objects.update_fenced(1),
        )
        for choose in choices:
            Account.objects.all().update(fence=1)
            with after("SELECT", ahead):
                assert choose() == 0
            assert set(Account.objects.values_list("fence", "balance")) == {(2, 2)}
            assert Letter.objects.get().to == "b"
        Account.objects.all().update(fence=1)
        assert [choose() for choose in choices] == [1, 1, 1, 1]
        assert set(Account.objects.values_list("fence", "balance")) == {(1, 9)}

    def test_rows_may_be_chosen_by_the_fence_itself(self) -> None:
        self.account.entry = Entry.objects.create(text="x")
        self.account.save()
        Letter.objects.create(name="l", to="b")
        assert Account.objects.filter(entry__text="x", fence=0).update_fenced(5, balance=9) == 1
        assert Letter.objects.filter(fence__lt=5).update_fenced(5, to="c") == 1
        assert Letter.objects.filter(fence__lt=5).update_fenced(5, to="d") == 0
        assert self.stored() == (9, 5) and Letter.objects.get().to == "c"

    def test_what_a_queryset_has_read_before_is_read_anew(self) -> None:
        rows = Account.objects.filter(balance=9)
        assert len(rows) == 0
        Account.objects.update(balance=9)
        assert rows.update_fenced(5, name="z") == 1 and [row.name for row in rows] == ["z"]

    def test_many_rows_of_two_tables_are_claimed_some_at_a_time(self) -> None:
        for number in range(7):
            Letter(name=f"l{number}", to="b").save_fenced(9 if number == 3 else 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fenced, "_AT_ONCE", 2)
            assert Letter.objects.order_by("-name").update_fenced(5, to="c") == 6
        assert sorted(Letter.objects.values_list("fence", "to")) == [(5, "c")] * 6 + [(9, "b")]

    def test_what_an_insert_cannot_is_told_and_nothing_is_changed(self) -> None:
        account = Account(name=None)
        with pytest.raises(IntegrityError):
            account.save_fenced(4)
        assert account.fence == 0 and account._state.adding
        letter = Letter(name="a", to="b")  # such a name is there
        with pytest.raises(IntegrityError):
            letter.save_fenced(4)
        assert letter.pk is None and letter._state.adding and letter.fence == 0

    def test_a_row_that_is_gone_is_not_made_again_by_who_has_read_it(self) -> None:
        late = Account.objects.get(pk=self.account.pk)
        deferring = Account.objects.defer("fence").get(pk=self.account.pk)
        Account.objects.filter(pk=late.pk).delete()
        with pytest.raises(FencedOutError, match="is gone"):
            late.save_fenced(3)
        with pytest.raises(FencedOutError, match="is gone"):
            deferring.save_fenced(3)
        assert not Account.objects.exists() and "fence" not in deferring.__dict__

    def test_the_fence_of_a_parents_table_counts(self) -> None:
        letter = Letter(name="m", to="b")
        letter.save_fenced(5)
        letter.to = "c"
        letter.save_fenced(6)
        with pytest.raises(FencedOutError):
            Letter.objects.get().save_fenced(5)
        base = self.make(9)
        with pytest.raises(FencedOutError):
            Letter(account_ptr=base, name="late", to="x").save_fenced(8)
        with pytest.raises(FencedOutError):
            Letter(pk=base.pk, name="late", to="x").save_fenced(8)
        Letter(account_ptr=base, name="now", to="x").save_fenced(9)
        assert [(row.name, row.to, row.fence) for row in Letter.objects.order_by("pk")] == [
            ("m", "c", 6),
            ("now", "x", 9),
        ]

    def make(self, fence: int) -> Account:
        made = Account(name="b")
        made.save_fenced(fence)
        return made

    def test_only_the_fields_that_were_named_are_written(self) -> None:
        self.account.name, self.account.balance = "z", 50
        self.account.save_fenced(3, update_fields=["balance"])
        row = Account.objects.get(pk=self.account.pk)
        assert (row.name, row.balance, row.fence) == ("a", 50, 3)

    def test_what_is_no_fence_is_refused(self) -> None:
        for wrong in (True, "7", None, 7.0):
            with pytest.raises(UsageError, match="fence"):
                self.account.save_fenced(wrong)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="fence"):
                Account.objects.update_fenced(wrong, balance=0)  # type: ignore[arg-type]

    def test_type_checkers_know_the_model_and_its_meta(self) -> None:
        """Rate has a Meta of its own, which is no heir of FencedModel's."""
        assert_type(Account.objects.get(), Account)
        assert_type(Account.objects.update_fenced(7, balance=1), int)
        assert_type(Rate.objects.first(), "Rate | None")
        assert_type(self.account.fence, int)
        assert Rate._meta.ordering == ("key",) and not Rate._meta.abstract

    def test_being_fenced_out_reaches_another_process(self) -> None:
        error = FencedOutError("shop.Rate 'eur'", 7)
        for same in (pickle.loads(pickle.dumps(error)), FencedOutError(*error.args)):
            assert (str(same), same.fence) == (str(error), 7)


class ToTheReplica:
    """Reads from one database, writes to another."""

    def db_for_read(self, model: type, **hints: object) -> str:
        return "other"

    def db_for_write(self, model: type, **hints: object) -> str:
        return "default"


class WithAReplica(TestCase):
    databases = {"default", "other"}

    def test_it_is_the_database_that_is_written_to_whose_fence_counts(self) -> None:
        for alias, fence in (("default", 9), ("other", 0)):
            Account.objects.using(alias).create(pk=1, name="a", balance=1, fence=fence)
        with override_settings(DATABASE_ROUTERS=[ToTheReplica()]):
            late = Account.objects.get(pk=1)
            late.balance = 777
            with pytest.raises(FencedOutError):
                late.save_fenced(5)
            late.save_fenced(10)
            late.save_fenced(11, using="other")
        rows = [Account.objects.using(alias).get(pk=1) for alias in ("default", "other")]
        assert [(row.balance, row.fence) for row in rows] == [(777, 10), (777, 11)]
