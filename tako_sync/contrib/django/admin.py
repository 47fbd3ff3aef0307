"""The admin's page of leases: read-only, but for a guarded break."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse

from tako_sync import breaking, names
from tako_sync.contrib.django.models import Lease
from tako_sync.errors import TakoError
from tako_sync.listing import leases
from tako_sync.runtime import current

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[Lease]
else:
    _Admin = admin.ModelAdmin  # which only its stubs know as generic


@admin.register(Lease)
class LeaseAdmin(_Admin):
    """Lists the leases of this application; breaks one exactly as it was shown."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Lease | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Lease | None = None) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        site = self.admin_site.admin_view
        return [
            path("", site(self.page), name="tako_sync_lease_changelist"),
            path("break/", site(self.break_page), name="tako_sync_lease_break"),
        ]

    def page(self, request: HttpRequest) -> HttpResponse:
        """List the leases."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        found: list[Any] = []
        try:
            runtime = current()
            where = f"{runtime.app}/{runtime.env} in {runtime.backend.describe()}"
            found.extend(leases(runtime))
        except TakoError as error:
            where = ""
            self.message_user(request, f"The leases cannot be listed: {error}", messages.ERROR)
        return self._render(request, "list.html", found=found, where=where)

    def break_page(self, request: HttpRequest) -> HttpResponseBase:
        """Ask, and on POST break the lease that was shown."""
        if not _may_break(request):
            raise PermissionDenied
        fields = request.POST if request.method == "POST" else request.GET
        name, version = fields.get("name", ""), fields.get("version", "")
        page = "tako_sync_lease_changelist" if self.has_view_permission(request) else "index"
        back = HttpResponseRedirect(reverse(f"{self.admin_site.name}:{page}"))
        try:
            runtime = current()
            identity = runtime.identity(names.part("a lease's name", name))
            if request.method == "POST":
                by = f"{request.user.get_username()} (admin)"[:200]
                breaking.break_lease(
                    runtime, identity, version=version, owner=None, now=False, by=by
                )
                told = (
                    f'Lease "{name}" is broken. It is free when its holder has ended, or in a ttl.'
                )
                self.message_user(request, told, messages.SUCCESS)
                return back
            holder = breaking.who(runtime, identity)
        except TakoError as error:
            self.message_user(request, f"Not broken: {error}", messages.ERROR)
            return back
        if holder is None:
            self.message_user(request, f'Lease "{name}" is free.', messages.INFO)
            return back
        return self._render(request, "break.html", name=name, holder=holder)

    def _render(self, request: HttpRequest, template: str, **context: Any) -> TemplateResponse:
        shown = {
            **self.admin_site.each_context(request),
            "title": "Leases",
            "opts": self.model._meta,
            "may_break": _may_break(request),
            **context,
        }
        return TemplateResponse(request, f"admin/tako_sync/lease/{template}", shown)


def _may_break(request: HttpRequest) -> bool:
    return bool(getattr(request.user, "has_perm", lambda _name: False)("tako_sync.break_lease"))
