"""Views under a lease: what they answer, and where their transaction ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection, transaction
from django.http import FileResponse, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.test import RequestFactory, SimpleTestCase, TransactionTestCase
from django.urls import ResolverMatch
from django.utils.decorators import method_decorator
from django.views import View
from typing_extensions import assert_type

import tako_sync
from contrib.django.shop.models import Entry
from tako_sync.contrib.django.testing import TakoTestMixin
from tako_sync.contrib.django.views import guard
from tako_sync.errors import ConfigurationError, LossReason, UsageError
from tako_sync.lock import Lock

request = RequestFactory().post("/reindex")


def wrapped_as_django_does(view: Any) -> Any:
    from django.core.handlers.base import BaseHandler

    return BaseHandler().make_view_atomic(view)


def is_not_atomic(request: HttpRequest) -> HttpResponse:
    assert not connection.in_atomic_block
    return HttpResponse()


class Guard(TakoTestMixin, TransactionTestCase):
    def test_a_view_runs_under_its_lease(self) -> None:
        @guard("reindex")
        def view(request: HttpRequest, number: int) -> HttpResponse:
            assert tako_sync.current_ctx().lease.name == "reindex"
            return HttpResponse(f"done {number}", status=201)

        answer = view(request, 3)
        assert (answer.status_code, getattr(answer, "content", b"")) == (201, b"done 3")
        assert Lock("reindex").holder() is None

    def test_type_checkers_know_the_request_and_the_answer(self) -> None:
        class OfATenant(HttpRequest):
            tenant = "acme"

        @guard("reindex")
        def view(request: OfATenant, number: int) -> JsonResponse:
            return JsonResponse({request.tenant: number})

        answer = view(OfATenant(), 3)
        assert_type(answer, "JsonResponse | HttpResponse")
        assert answer.content == b'{"acme": 3}'

    def test_while_someone_else_holds_it_it_answers_409_with_the_holder(self) -> None:
        @guard(Lock("reindex"))
        def view(request: HttpRequest) -> HttpResponse:
            raise AssertionError

        self.occupy("reindex")
        answer: Any = view(request)
        assert answer.status_code == 409 and answer["Retry-After"] == "2"
        holder = Lock("reindex").holder()
        assert holder is not None and holder.owner in answer.content.decode()

    def test_or_what_it_was_told_to_answer(self) -> None:
        @guard("reindex", busy=lambda request, holder: HttpResponse(f"{request.path}", status=202))
        def view(request: HttpRequest) -> HttpResponse:
            raise AssertionError

        self.occupy("reindex")
        answer: Any = view(request)
        assert (answer.status_code, answer.content) == (202, b"/reindex")

    def test_a_view_that_loses_its_lease_answers_503_and_is_rolled_back(self) -> None:
        @guard("reindex")
        def view(request: HttpRequest) -> HttpResponse:
            Entry.objects.create(text="x")
            tako_sync.current_ctx().lease.lose(LossReason.TAKEN)
            return HttpResponse("all is well")

        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            answer = view(request)
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False
        assert answer.status_code == 503
        assert Entry.objects.count() == 0

    def test_the_transaction_of_atomic_requests_is_inside_the_lease(self) -> None:
        seen: list[object] = []

        @guard("reindex")
        def view(request: HttpRequest) -> HttpResponse:
            seen.append(connection.in_atomic_block)
            transaction.on_commit(lambda: seen.append(Lock("reindex").holder() is not None))
            return HttpResponse()

        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            assert wrapped_as_django_does(view) is view
            view(request)
            bare = transaction.non_atomic_requests(lambda request: HttpResponse())
            seen.append(wrapped_as_django_does(bare) is bare)
            guard("other")(transaction.non_atomic_requests(is_not_atomic))(request)
            transaction.non_atomic_requests(guard("above")(is_not_atomic))(request)
            other = transaction.non_atomic_requests(using="other")(view)
            assert wrapped_as_django_does(other) is other
            other(request)
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False
        assert seen == [True, True, True, True, True]

    def test_of_two_guards_both_leases_are_held_until_the_commit(self) -> None:
        seen: list[object] = []

        @guard("outer")
        @guard("inner")
        def view(request: HttpRequest) -> HttpResponse:
            seen.append(len(connection.savepoint_ids))
            transaction.on_commit(
                lambda: seen.extend(Lock(name).holder() is not None for name in ("outer", "inner"))
            )
            return HttpResponse()

        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            view(request)
            transaction.non_atomic_requests(guard("outer")(guard("inner")(is_not_atomic)))(request)
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False
        assert seen == [0, True, True]

    def test_a_class_that_is_to_have_no_transaction_has_none_whatever_the_order(self) -> None:
        class Bare(View):
            def get(self, request: HttpRequest) -> HttpResponse:
                return is_not_atomic(request)

        @method_decorator(transaction.non_atomic_requests, name="dispatch")
        @method_decorator(guard("above"), name="dispatch")
        class Above(Bare):
            pass

        @method_decorator(guard("below"), name="dispatch")
        @method_decorator(transaction.non_atomic_requests, name="dispatch")
        class Below(Bare):
            pass

        @method_decorator(guard("view"), name="dispatch")
        class Marked(Bare):
            pass

        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            for view in (
                Above.as_view(),
                Below.as_view(),
                transaction.non_atomic_requests(Marked.as_view()),
            ):
                asked = RequestFactory().get("/")
                asked.resolver_match = ResolverMatch(view, (), {})
                answer: Any = view(asked)
                assert answer.status_code == 200
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False

    def test_what_a_view_raises_rolls_back_and_goes_on(self) -> None:
        @guard("reindex")
        def view(request: HttpRequest) -> HttpResponse:
            Entry.objects.create(text="x")
            raise ZeroDivisionError

        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            with pytest.raises(ZeroDivisionError):
                view(request)
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False
        assert Entry.objects.count() == 0 and Lock("reindex").holder() is None

    def test_a_class_is_decorated_by_its_dispatch(self) -> None:
        @method_decorator(guard("reindex"), name="dispatch")
        class Reindex(View):
            def post(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse(tako_sync.current_ctx().lease.name)

        view: Any = Reindex.as_view()
        assert view(request).content == b"reindex"
        with self.occupy("reindex"):
            assert view(request).status_code == 409

    def test_a_stream_is_refused_and_a_file_is_not(self) -> None:
        def answering(made: HttpResponseBase) -> Any:
            return guard("reindex")(lambda request: made)

        for stream in (StreamingHttpResponse(iter([b"a"])), FileResponse(iter([b"a"]))):
            with pytest.raises(UsageError, match="after its lease was given back"):
                answering(stream)(request)
        import io

        answer = answering(FileResponse(io.BytesIO(b"indexed")))(request)
        assert b"".join(answer) == b"indexed"
        answer.close()

    def test_of_two_threads_the_second_collapses_into_the_first(self) -> None:
        inside, go_on = threading.Event(), threading.Event()

        @guard("reindex")
        def view(request: HttpRequest) -> HttpResponse:
            inside.set()
            assert go_on.wait(20)
            return HttpResponse()

        first: list[int] = []
        thread = threading.Thread(target=lambda: first.append(view(request).status_code))
        thread.start()
        assert inside.wait(20)
        assert view(request).status_code == 409
        go_on.set()
        thread.join(20)
        assert first == [200]


class Misuse(SimpleTestCase):
    def test_is_told_where_it_is_written(self) -> None:
        async def view(request: HttpRequest) -> HttpResponse:
            return HttpResponse()

        class AsyncView(View):
            async def get(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse()

        with pytest.raises(UsageError, match="asynchronous"):
            guard("reindex")(view)  # type: ignore[type-var]
        with pytest.raises(UsageError, match="asynchronous"):
            guard("reindex")(AsyncView.as_view())
        with pytest.raises(ConfigurationError):
            guard("Re Index")
        with pytest.raises(UsageError, match="or its name"):
            guard(None)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="timeout"):
            guard("reindex", timeout=-1)
