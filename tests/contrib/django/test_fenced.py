"""Rows that refuse an older fence."""

from __future__ import annotations

import pytest
from django.db.models import F
from django.test import TestCase

from contrib.django.shop.models import Account
from tako_sync.contrib.django.fenced import FencedOutError
from tako_sync.contrib.django.testing import TakoTestMixin
from tako_sync.ctx import Ctx
from tako_sync.errors import UsageError
from tako_sync.lock import Lock


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
        with pytest.raises(FencedOutError, match="larger fence than 6"):
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
