"""A lease and a transaction: which of them ends first, and what the next holder sees."""

from __future__ import annotations

import gc
import warnings

import pytest
from django.db import transaction
from django.test import TestCase, TransactionTestCase, override_settings

import tako_sync
from contrib.django.shop.models import Entry
from tako_sync.backends.memory import MemoryLease
from tako_sync.contrib.django.conf import TransactionWarning
from tako_sync.contrib.django.testing import TakoTestMixin
from tako_sync.contrib.django.transactions import hold
from tako_sync.errors import CampaignTimeoutError, LeaseLostError, UsageError
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime


def held(name: str = "ledger") -> bool:
    return Lock(name).holder() is not None


class UntilCommit(TakoTestMixin, TransactionTestCase):
    databases = {"default", "other"}

    def test_it_is_held_until_the_commit(self) -> None:
        seen = []
        with transaction.atomic():
            with hold("ledger", until_commit=True) as ctx:
                Entry.objects.create(text="x")
                assert ctx.fence
            assert held()
            transaction.on_commit(lambda: seen.append(held()))
        assert not held() and Entry.objects.count() == 1
        assert seen == [False]

    def test_or_until_the_rollback(self) -> None:
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            with hold("ledger", until_commit=True):
                Entry.objects.create(text="x")
            assert held()
            raise ZeroDivisionError
        assert not held() and Entry.objects.count() == 0

    def test_so_it_is_when_the_block_itself_fails(self) -> None:
        gc.disable()  # nobody is to need it
        try:
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                with hold("ledger", until_commit=True):
                    Entry.objects.create(text="x")
                    raise ZeroDivisionError
            assert not held()
        finally:
            gc.enable()

    def test_the_outermost_transaction_counts_not_the_savepoint(self) -> None:
        with transaction.atomic():
            with transaction.atomic():
                with hold("ledger", until_commit=True):
                    pass
                assert held()
            assert held()
        assert not held()

    def test_a_savepoint_that_is_rolled_back_ends_it(self) -> None:
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                with hold("ledger", until_commit=True):
                    Entry.objects.create(text="x")
                raise ZeroDivisionError
            assert not held(), "what was done under it is undone"
            with hold("ledger", until_commit=True):
                pass
        assert not held()

    def test_outside_of_a_transaction_it_ends_with_its_block(self) -> None:
        with hold("ledger", until_commit=True):
            assert held()
        assert not held()
        with hold("ledger", until_commit=True), transaction.atomic():
            Entry.objects.create(text="x")
        assert not held() and Entry.objects.count() == 1

    def test_it_is_the_transaction_of_the_database_that_was_named(self) -> None:
        with transaction.atomic():
            with hold("ledger", until_commit=True, using="other"):
                pass
            assert not held()
        with transaction.atomic(using="other"):
            with hold("ledger", until_commit=True, using="other"):
                pass
            assert held()
        assert not held()

    def test_without_until_commit_it_ends_with_its_block(self) -> None:
        with transaction.atomic():
            with hold("ledger"):
                assert held()
            assert not held()

    def test_lost_in_its_block_it_rolls_back_and_says_so(self) -> None:
        with pytest.raises(LeaseLostError), transaction.atomic():
            with hold("ledger", until_commit=True) as ctx:
                Entry.objects.create(text="x")
                holder = Lock("ledger").holder()
                assert holder is not None
                ctx.lease.lose(tako_sync.LossReason.BROKEN)
        assert Entry.objects.count() == 0

    def test_lost_after_its_block_it_says_so_after_the_commit(self) -> None:
        with pytest.raises(LeaseLostError), transaction.atomic():
            with hold("ledger", until_commit=True) as ctx:
                Entry.objects.create(text="x")
            ctx.lease.lose(tako_sync.LossReason.BROKEN)
        assert Entry.objects.count() == 1

    def test_a_hook_that_fails_before_it_does_not_keep_it_whoever_keeps_the_traceback(self) -> None:
        with pytest.raises(ZeroDivisionError) as kept, transaction.atomic():
            transaction.on_commit(lambda: 1 / 0)
            with hold("ledger", until_commit=True, timeout=0):
                Entry.objects.create(text="x")
        assert kept.value.__traceback__ is not None and Entry.objects.count() == 1
        Lock("ledger").do(lambda ctx: None, timeout=20)  # within a poll

    def test_a_long_transaction_keeps_it_over_many_looks(self) -> None:
        fast = Runtime(MemoryLease(), app="test", policy=LeasePolicy(ttl=3, poll=0.02))
        lock, seen = Lock("ledger").bound_to(fast), []
        with transaction.atomic():
            with hold(lock, until_commit=True):
                pass
            for _ in range(10):
                fast.clock.wait(Flag(), 0.02)
                seen.append(lock.holder() is not None)
        assert seen == [True] * 10 and lock.holder() is None

    def test_hooks_that_are_registered_inside_run_under_the_lease(self) -> None:
        seen: list[bool] = []
        with transaction.atomic(), hold("ledger", until_commit=True):
            transaction.on_commit(lambda: seen.append(held()))
        assert seen == [True] and not held()

    def test_where_transactions_are_managed_by_hand_it_says_that_it_cannot(self) -> None:
        transaction.set_autocommit(False)
        try:
            with pytest.raises(UsageError, match="by hand"), hold("ledger", until_commit=True):
                raise AssertionError
            with hold("ledger"):
                Entry.objects.create(text="x")
                transaction.commit()
        finally:
            transaction.rollback()
            transaction.set_autocommit(True)
        assert not held() and Entry.objects.count() == 1

    def test_someone_elses_is_waited_for_as_long_as_was_said(self) -> None:
        self.occupy("ledger")
        with pytest.raises(CampaignTimeoutError):
            with hold("ledger", until_commit=True, timeout=0):
                raise AssertionError
        with pytest.raises(CampaignTimeoutError):
            hold("ledger", timeout=0.2).__enter__()

    def test_two_holds_in_one_transaction_both_end_with_it(self) -> None:
        with transaction.atomic():
            with hold("ledger", until_commit=True), hold("other", until_commit=True):
                pass
            assert held() and held("other")
        assert not held() and not held("other")

    def test_misuse_is_told(self) -> None:
        with pytest.raises(UsageError, match="no database"):
            hold("ledger", using="nowhere")
        with pytest.raises(UsageError, match="or its name"):
            hold(3)  # type: ignore[arg-type]
        block = hold("ledger")
        with block:
            pass
        with pytest.raises(UsageError, match="call hold"):
            block.__enter__()
        with pytest.raises(UsageError, match="not entered"):
            block.__exit__(None, None, None)


class InATestCase(TakoTestMixin, TestCase):
    def test_the_transaction_of_the_test_case_is_none(self) -> None:
        with hold("ledger", until_commit=True):
            assert held()
        assert not held()

    def test_one_of_the_code_ends_where_the_hooks_are_run(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            with transaction.atomic(), hold("ledger", until_commit=True):
                pass
            assert held()
        assert not held()


class TheTrap(TransactionTestCase):
    def test_a_lease_that_is_released_in_a_transaction_is_warned_of_once(self) -> None:
        with override_settings(TAKO={"BACKEND": "memory:"}), transaction.atomic():
            with pytest.warns(TransactionWarning, match=r'"ledger".*until_commit=True'):
                Lock("ledger").do(lambda ctx: None)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                Lock("ledger").do(lambda ctx: None)
            with pytest.warns(TransactionWarning, match='"reindex"'):
                Lock("reindex").do(lambda ctx: None)

    def test_not_where_it_outlasts_it_nor_outside_nor_if_it_was_switched_off(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with override_settings(TAKO={"BACKEND": "memory:"}):
                with transaction.atomic(), hold("ledger", until_commit=True):
                    pass
                with hold("ledger"), transaction.atomic():
                    pass
                Lock("ledger").do(lambda ctx: None)
            with override_settings(TAKO={"BACKEND": "memory:", "WARN_IN_TRANSACTION": False}):
                with transaction.atomic():
                    Lock("ledger").do(lambda ctx: None)
