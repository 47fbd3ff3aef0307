"""Settings, checks, commands and the admin's page."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import BaseCommand, CommandError, call_command
from django.test import SimpleTestCase, TestCase, override_settings

import tako_sync
from tako_sync.contrib.django.checks import check
from tako_sync.contrib.django.leased import LeasedCommandMixin
from tako_sync.contrib.django.testing import TakoTestMixin
from tako_sync.errors import UsageError
from tako_sync.lock import Lock
from tako_sync.record import Record, read
from tako_sync.runtime import current


def ids(**settings: Any) -> list[str]:
    with override_settings(**settings):
        return sorted(str(message.id).removeprefix("tako_sync.") for message in check())


class Settings(SimpleTestCase):
    def test_make_the_binding_with_a_bounded_wait(self) -> None:
        with override_settings(TAKO={"APP": "one", "ENV": "x", "BACKEND": "memory:"}):
            assert (current().app, current().env, current().policy.wait) == ("one", "x", 10)
        with override_settings(TAKO={"APP": "two", "BACKEND": "memory:", "TIMEOUT": None}):
            assert (current().app, current().policy.wait) == ("two", None)

    def test_what_is_configured_by_hand_goes_before_them(self) -> None:
        mine = tako_sync.configure(backend="memory:", app="mine")
        assert current() is mine
        with override_settings(TAKO={"APP": "one", "BACKEND": "memory:"}):
            assert current() is mine

    def test_that_cannot_work_are_errors_of_the_check(self) -> None:
        for wrong in (
            {"BACKEND": "ftp://x"},
            {"Timeout": 3},
            {"TIMEOUT": "3"},
            {"POLICY": 30},
            {"APP": "My Shop"},
            {"WARN_IN_TRANSACTION": "no"},
            {"LISTENERS": None},
            {"LISTENERS": 5},
            {"LISTENERS": [5]},
            ["memory:"],
        ):
            assert ids(TAKO=wrong) == ["E001"], wrong


GOOD = {"APP": "shop", "ENV": "prod", "BACKEND": "sqlite:////tmp/x/leases.sqlite3"}


class TheOrderOfBases(SimpleTestCase):
    def test_that_would_leave_a_mixin_unasked_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"class Command\(LeasedCommandMixin, \.\.\.\)"):

            class Command(BaseCommand, LeasedCommandMixin):
                pass

        with pytest.raises(UsageError, match="TakoTestMixin"):

            class Late(TestCase, TakoTestMixin):
                pass


class InTheDataOfAClass(TakoTestMixin, TestCase):
    seen: ClassVar[int]

    @classmethod
    def setUpTestData(cls) -> None:
        assert current() is cls.tako
        Lock("reindex").do(lambda ctx: None)
        cls.seen = id(cls.tako)

    def test_there_is_a_storage_too_and_each_test_has_its_own(self) -> None:
        assert current() is self.tako
        assert id(self.tako) != self.seen and id(type(self).tako) == self.seen
        assert self.tako.backend.describe() == "memory:"


class Checks(SimpleTestCase):
    databases = "__all__"  # type: ignore[assignment]

    def test_bind_nothing_and_so_do_not_say_that_nobody_chose_a_storage(self) -> None:
        with self.assertNoLogs("tako_sync"):
            assert "W004" in ids(TAKO={"APP": "shop"}, DEBUG=False)
        with override_settings(TAKO={"APP": "shop"}), self.assertLogs("tako_sync") as said:
            current()
        assert "no backend is configured" in said.output[0]

    def test_find_nothing_where_all_is_said(self) -> None:
        assert ids(TAKO=GOOD, DEBUG=False) == []

    def test_tell_of_leases_in_memory_and_missing_names(self) -> None:
        assert ids(TAKO={**GOOD, "BACKEND": "memory:"}, DEBUG=False) == ["W001"]
        assert ids(TAKO={"BACKEND": GOOD["BACKEND"]}, DEBUG=False) == ["W002", "W002"]
        assert ids(TAKO={"APP": "shop", "ENV": "prod"}, DEBUG=False) == ["W004"]

    def test_leave_development_alone(self) -> None:
        assert ids(TAKO={"BACKEND": "memory:"}, DEBUG=True) == []

    def test_name_the_trap_of_atomic_requests(self) -> None:
        from django.db import connection

        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            assert ids(TAKO=GOOD, DEBUG=False) == ["W003"]
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False


def said(*arguments: str) -> str:
    out = io.StringIO()
    call_command("tako", *arguments, stdout=out, stderr=out)
    return out.getvalue()


class Commands(TakoTestMixin, SimpleTestCase):
    def test_list_names_every_lease_and_who_holds_it(self) -> None:
        self.occupy("reindex")
        self.occupy("singleton-invoicer")
        Lock("done").do(lambda ctx: None)
        lines = said("list").splitlines()
        assert lines[0] == "test/test in memory:"
        assert [line.partition(":")[0] for line in lines[1:]] == [
            "done", "reindex", "singleton-invoicer",
        ]  # fmt: skip
        assert lines[1] == "done: free" and "fence" in lines[2]

    def test_who_says_so_or_fails_if_nobody_does(self) -> None:
        with pytest.raises(CommandError, match="reindex is free"):
            said("who", "reindex")
        self.occupy("reindex")
        assert said("who", "reindex").startswith("reindex: ")
        with pytest.raises(CommandError, match="a-z"):
            said("who", "Re Index")

    def test_break_breaks_what_it_has_shown_and_only_if_that_is_confirmed(self) -> None:
        self.occupy("reindex")
        asked: list[str] = []

        def answering(text: str) -> Callable[[str], str]:
            def answer(prompt: str) -> str:
                asked.append(prompt)
                return text

            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.input", answering("y"))
            with pytest.raises(CommandError, match="not broken"):
                said("break", "reindex")
            assert Lock("reindex").holder().state == "held"  # type: ignore[union-attr]
            patch.setattr("builtins.input", answering("reindex"))
            assert "is broken" in said("break", "reindex")
        assert len(asked) == 2
        assert Lock("reindex").holder().state == "broken"  # type: ignore[union-attr]

    def test_break_says_how_to_where_there_is_nobody_to_ask(self) -> None:
        self.occupy("reindex")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO())
            with pytest.raises(CommandError, match="--version-shown"):
                said("break", "reindex")
        assert Lock("reindex").holder().state == "held"  # type: ignore[union-attr]

    def test_break_does_not_ask_where_it_is_told_what_was_shown(self) -> None:
        self.occupy("reindex")
        holder = Lock("reindex").holder()
        assert holder is not None
        with pytest.raises(CommandError, match="has changed"):
            said("break", "reindex", "--version-shown", "999")
        said("break", "reindex", "--version-shown", holder.version, "--now")
        assert Lock("reindex").holder() is None

    def test_handover_asks_the_holder(self) -> None:
        self.occupy("reindex")
        assert "is asked to hand over" in said("handover", "reindex")
        assert Lock("reindex").holder().handover == "manage.py"  # type: ignore[union-attr]

    def test_doctor_examines_the_storage(self) -> None:
        assert "ok" in said("doctor")

    def test_a_place_without_such_a_loop_is_told(self) -> None:
        with pytest.raises(CommandError, match="no Singleton"):
            said("singleton", "contrib.django.shop.loops:nothing")
        with pytest.raises(CommandError, match="is a Cron, not a Singleton"):
            said("singleton", "contrib.django.shop.loops:django_sweep")

    def test_a_leased_command_runs_once_at_a_time(self) -> None:
        out, err = io.StringIO(), io.StringIO()
        call_command("nightly", stdout=out, stderr=err)
        assert out.getvalue().strip() == "ran under nightly"
        held = self.occupy("nightly")
        call_command("nightly", stdout=out, stderr=err)
        assert out.getvalue().count("ran under") == 1
        assert "nightly runs already, and is left alone" in err.getvalue()
        holder = Lock("nightly").holder()
        assert holder is not None and holder.owner in err.getvalue()
        held.release()
        call_command("nightly", "--tako-wait", "5", stdout=out, stderr=err)
        assert out.getvalue().count("ran under") == 2

    def test_a_wait_that_is_none_is_refused_in_a_line(self) -> None:
        for wait in ("-1", "nan", "inf"):
            with pytest.raises(CommandError, match="--tako-wait"):
                call_command("nightly", "--tako-wait", wait)

    def test_what_it_raises_is_djangos(self) -> None:
        with pytest.raises(CommandError, match="it fails"):
            call_command("nightly", verbosity=3)
        assert Lock("nightly").holder() is None


class Admin(TakoTestMixin, TestCase):
    def log_in(self, *permissions: str) -> None:
        user = User.objects.create_user("alice", is_staff=True, password="x")
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        self.client.force_login(user)

    page = "/admin/tako_sync/lease/"

    def test_lists_leases_for_who_may_see_them(self) -> None:
        self.occupy("reindex")
        self.log_in("view_lease")
        text = self.client.get(self.page).content.decode()
        holder = Lock("reindex").holder()
        assert holder is not None and "reindex" in text and holder.owner in text
        assert "Break" not in text
        assert "Leases" in self.client.get("/admin/").content.decode()

    def test_nobody_else_sees_or_breaks_anything(self) -> None:
        self.occupy("reindex")
        for url in (self.page, self.page + "break/?name=reindex"):
            assert self.client.get(url).status_code == 302  # to log in
        self.log_in()
        assert self.client.get(self.page).status_code == 403
        self.log_in_again("view_lease")
        assert self.client.get(self.page + "break/?name=reindex").status_code == 403
        assert self.client.post(self.page + "break/", {"name": "reindex"}).status_code == 403
        assert Lock("reindex").holder().state == "held"  # type: ignore[union-attr]

    def log_in_again(self, *permissions: str) -> None:
        User.objects.all().delete()
        self.log_in(*permissions)

    def test_breaks_exactly_what_was_shown_and_says_by_whom(self) -> None:
        self.occupy("reindex")
        self.log_in("view_lease", "break_lease")
        assert "Break" in self.client.get(self.page).content.decode()
        shown = self.client.get(self.page + "break/?name=reindex")
        holder = Lock("reindex").holder()
        assert holder is not None and holder.owner in shown.content.decode()
        wrong = {"name": "reindex", "version": "999"}
        answer = self.client.post(self.page + "break/", wrong, follow=True)
        assert "Not broken" in answer.content.decode()
        right = {"name": "reindex", "version": holder.version}
        answer = self.client.post(self.page + "break/", right, follow=True)
        assert "is broken" in answer.content.decode()
        content = read(self.tako.backend.read("run-test-test-reindex", timeout=1))
        assert isinstance(content, Record) and content.broken_by == "alice (admin)"

    def test_who_may_break_but_not_list_hears_what_became_of_it(self) -> None:
        self.occupy("reindex")
        self.log_in("break_lease")
        holder = Lock("reindex").holder()
        assert holder is not None
        fields = {"name": "reindex", "version": holder.version}
        answer = self.client.post(self.page + "break/", fields, follow=True)
        assert answer.status_code == 200 and "is broken" in answer.content.decode()

    def test_a_break_needs_its_token_against_forgery(self) -> None:
        from django.test import Client

        self.occupy("reindex")
        self.log_in("view_lease", "break_lease")
        strict = Client(enforce_csrf_checks=True)
        strict.force_login(User.objects.get())
        holder = Lock("reindex").holder()
        assert holder is not None
        fields = {"name": "reindex", "version": holder.version}
        assert strict.post(self.page + "break/", fields).status_code == 403
        assert Lock("reindex").holder().state == "held"  # type: ignore[union-attr]

    def test_names_are_escaped_and_odd_ones_refused(self) -> None:
        self.log_in("view_lease", "break_lease")
        answer = self.client.get(self.page + "break/?name=<script>", follow=True)
        assert "<script>" not in answer.content.decode().partition("messagelist")[2][:400]
        assert "Not broken" in answer.content.decode()

    def test_a_storage_that_fails_is_told_on_the_page(self) -> None:
        self.log_in("view_lease")
        with override_settings(TAKO={"BACKEND": "ftp://x"}), pytest.MonkeyPatch.context() as patch:
            patch.setattr("tako_sync.runtime._bound", None)
            answer = self.client.get(self.page)
        assert answer.status_code == 200 and "cannot be listed" in answer.content.decode()
