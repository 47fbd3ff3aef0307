"""The gallery behind Django, in one file: ``python -m gallery.with_django [PORT]``."""

from __future__ import annotations

import sys

from django.conf import settings
from django.core.management import execute_from_command_line
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.http import require_GET, require_POST

from gallery.reindex import PAGE, rebuilds, reindex


@require_GET
def page(request: HttpRequest) -> HttpResponse:
    return HttpResponse(PAGE)


@require_GET
def ledger(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"rebuilds": rebuilds()})


@require_POST
def press(request: HttpRequest) -> HttpResponse:
    return JsonResponse(reindex())


urlpatterns = [path("", page), path("ledger", ledger), path("reindex", press)]

if __name__ == "__main__":
    settings.configure(
        ALLOWED_HOSTS=["127.0.0.1", "localhost"],
        INSTALLED_APPS=["tako_sync.contrib.django"],
        ROOT_URLCONF="gallery.with_django",
        SECRET_KEY="of an example that keeps no secrets",  # noqa: S106
        TAKO={"APP": "gallery"},
    )
    port = sys.argv[1] if len(sys.argv) > 1 else "8000"
    execute_from_command_line(["gallery", "runserver", "--noreload", f"127.0.0.1:{port}"])
