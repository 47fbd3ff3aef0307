"""Views under leases."""

from __future__ import annotations

import os
import time
from typing import Any

from django.contrib import admin
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

import tako_sync
from contrib.django.shop.models import Entry
from contrib.journal import Journal
from tako_sync.contrib.django.transactions import hold
from tako_sync.contrib.django.views import guard

relock = tako_sync.Lock("reindex")


def alive(_request: HttpRequest) -> HttpResponse:
    return JsonResponse({"pid": os.getpid()})


def _work(request: HttpRequest) -> HttpResponse:
    with Journal(os.environ["SHOP_JOURNAL"]).body():
        until = time.monotonic() + float(request.POST.get("seconds", "0.05"))
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))
    return JsonResponse({"pid": os.getpid()})


@csrf_exempt
@guard(relock)
def reindex(request: HttpRequest) -> HttpResponse:
    return _work(request)


@csrf_exempt
@guard(relock, timeout=30)
def patient(request: HttpRequest) -> HttpResponse:
    return _work(request)


@csrf_exempt
@guard("ledger", timeout=5)
def count(request: HttpRequest) -> HttpResponse:
    """Write the next number after the largest: lost or doubled unless alone to its commit."""
    number = Entry.objects.count() + 1
    time.sleep(0.02)
    Entry.objects.create(text=str(number))
    return JsonResponse({"number": number, "atomic": transaction.get_connection().in_atomic_block})


@csrf_exempt
def count_until_commit(_request: HttpRequest) -> HttpResponse:
    with transaction.atomic(), hold("ledger", until_commit=True, timeout=20):
        number = Entry.objects.count() + 1
        Entry.objects.create(text=str(number))
        time.sleep(0.02)
    return JsonResponse({"number": number})


def entries(_request: HttpRequest) -> HttpResponse:
    found: list[Any] = list(Entry.objects.order_by("pk").values_list("text", flat=True))
    return JsonResponse({"entries": found})


urlpatterns = [
    path("admin/", admin.site.urls),
    path("alive", alive),
    path("reindex", reindex),
    path("patient", patient),
    path("count", count),
    path("count-until-commit", count_until_commit),
    path("entries", entries),
]
