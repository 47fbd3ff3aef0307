"""A lease and a transaction: which of them ends first, and what the next holder sees."""

from __future__ import annotations

import gc
import warnings
from contextlib import ExitStack

import pytest
from django.db import connections, transaction
from django.test import TestCase, TransactionTestCase, override_settings

import tako_sync
from contrib.django.shop.models import Entry
from tako_sync.contrib.django.conf import TransactionWarning
from tako_sync.contrib.django.testing import TakoTestMixin
from tako_sync.contrib.django.transactions import hold
from tako_sync.errors import CampaignTimeoutError, LeaseLostError, NotReentrantError, UsageError
from tako_sync.lock import Lock


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

    def test_no_hook_on_commit_runs_under_it_and_none_keeps_it(self) -> None:
        seen: list[bool] = []
        with pytest.raises(ZeroDivisionError) as kept, transaction.atomic():
            transaction.on_commit(lambda: seen.append(held()))
            transaction.on_commit(lambda: 1 / 0)
            with hold("ledger", until_commit=True):
                transaction.on_commit(lambda: seen.append(held()))
        assert seen == [False] and not held(), "whoever keeps the traceback"
        assert kept.value.__traceback__ is not None

    def test_its_loss_does_not_cost_the_other_hooks_and_is_a_note_on_their_error(self) -> None:
        seen: list[str] = []
        with pytest.raises(LeaseLostError), transaction.atomic():
            with hold("ledger", until_commit=True) as ctx:
                transaction.on_commit(lambda: seen.append("inside"))
            transaction.on_commit(lambda: seen.append("after"))
            ctx.lease.lose(tako_sync.LossReason.BROKEN)
        assert seen == ["inside", "after"]
        with pytest.raises(ZeroDivisionError) as failed, transaction.atomic():
            with hold("ledger", until_commit=True) as ctx:
                pass
            transaction.on_commit(lambda: 1 / 0)
            ctx.lease.lose(tako_sync.LossReason.BROKEN)
        assert "was lost while held" in failed.value.__notes__[0]  # type: ignore[attr-defined]

    def test_further_blocks_of_the_transaction_join_the_first(self) -> None:
        def post() -> int:
            with hold("ledger", until_commit=True, timeout=0) as ctx:
                assert tako_sync.current_ctx() is ctx
                return ctx.fence

        with transaction.atomic():
            first = post()
            assert post() == first
            with hold("ledger", timeout=0) as ctx:
                assert ctx.fence == first
            assert held()
            with pytest.raises(NotReentrantError):
                hold("ledger", until_commit=True, ctx=tako_sync.Ctx.background()).__enter__()
            with hold("other", until_commit=True) as ctx:
                assert ctx.lease.name == "other"
        assert not held() and not held("other")
        assert post() > first, "that transaction has ended"

    def test_a_block_that_joins_keeps_it_to_its_own_end_at_least(self) -> None:
        with transaction.atomic():
            with ExitStack() as blocks:
                with transaction.atomic():
                    with hold("ledger", until_commit=True):
                        pass
                    ctx = blocks.enter_context(hold("ledger", until_commit=True))
                    transaction.set_rollback(True)
                assert held() and not ctx.cancelled
            assert held()
        assert not held()
        with ExitStack() as blocks:
            with transaction.atomic():
                with hold("ledger", until_commit=True):
                    pass
                ctx = blocks.enter_context(hold("ledger", until_commit=True))
            assert held() and not ctx.cancelled
        assert not held()

    def test_a_block_that_may_not_join_does_not_keep_it_though_its_error_is_kept(self) -> None:
        with pytest.raises(NotReentrantError) as kept, transaction.atomic():
            with hold("ledger", until_commit=True):
                pass
            hold("ledger", until_commit=True, ctx=tako_sync.Ctx.background()).__enter__()
        assert kept.value.__traceback__ is not None and not held()

    def test_a_connection_that_is_closed_inside_ends_it_with_the_block(self) -> None:
        with transaction.atomic(using="other"):
            with hold("ledger", until_commit=True, using="other"):
                connections["other"].closed_in_transaction = True  # as close() of a real one has it
            connections["other"].closed_in_transaction = False
            assert not held()

    def test_where_autocommit_is_switched_off_inside_it_ends_with_the_block(self) -> None:
        with hold("ledger", until_commit=True):
            transaction.set_autocommit(False)
        try:
            assert not held()
        finally:
            transaction.set_autocommit(True)

    def test_of_two_that_are_lost_the_second_is_a_note_on_the_first(self) -> None:
        with pytest.raises(LeaseLostError) as lost, transaction.atomic():
            for name in ("ledger", "other"):
                with hold(name, until_commit=True) as ctx:
                    pass
                ctx.lease.lose(tako_sync.LossReason.TAKEN)
        assert lost.value.lease == "ledger" and len(lost.value.__notes__) == 1  # type: ignore[attr-defined]

    def test_a_block_that_joins_a_lost_one_does_not_begin(self) -> None:
        with pytest.raises(LeaseLostError), transaction.atomic():
            with hold("ledger", until_commit=True) as ctx:
                Entry.objects.create(text="x")
            ctx.lease.lose(tako_sync.LossReason.BROKEN)
            hold("ledger", until_commit=True).__enter__()
        assert Entry.objects.count() == 0

    def test_where_transactions_are_managed_by_hand_it_says_that_it_cannot(self) -> None:
        transaction.set_autocommit(False)
        try:
            with pytest.raises(UsageError, match="by hand"), hold("ledger", until_commit=True):
                raise AssertionError
            with transaction.atomic(), pytest.raises(UsageError, match="by hand"):
                hold("ledger", until_commit=True).__enter__()
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

    def test_what_was_given_back_there_is_joined_by_nobody(self) -> None:
        """Django runs the hooks there, and does not take them away."""
        fences: list[int] = []
        for _ in range(2):
            with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
                with hold("ledger", until_commit=True) as ctx:
                    fences.append(ctx.fence)
                    assert held() and not ctx.cancelled
                assert held()
            assert not held()
        assert fences[1] > fences[0]


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
