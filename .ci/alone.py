# ruff: noqa: INP001 - a script
"""In a virtual environment with one framework: its integration works, and loads no other."""

import importlib
import pkgutil
import sys

FRAMEWORKS = {"flask", "django", "celery"}
framework = sys.argv[1]
home = f"tako_sync.contrib.{framework}"


def flask() -> None:
    import flask

    from tako_sync.contrib.flask import Tako

    app = flask.Flask("shop")
    app.config.update(TAKO_APP="shop", TAKO_BACKEND="memory:")
    tako = Tako(app)

    @app.post("/reindex")
    @tako.guard("reindex")
    def reindex() -> str:
        return "done"

    answer = app.test_client().post("/reindex")
    assert (answer.status_code, answer.text) == (200, "done"), answer.text


def django() -> None:
    import django
    from django.conf import settings

    settings.configure(
        INSTALLED_APPS=[home], TAKO={"APP": "shop", "BACKEND": "memory:"}, ALLOWED_HOSTS=["*"]
    )
    django.setup()
    from django.http import HttpResponse
    from django.test import RequestFactory

    from tako_sync.contrib.django.views import guard

    answer = guard("reindex")(lambda request: HttpResponse("done"))(RequestFactory().post("/"))
    assert (answer.status_code, answer.content) == (200, b"done"), answer.content


def celery() -> None:
    from celery import Celery

    import tako_sync
    from tako_sync.contrib.celery import leased

    tako_sync.configure(app="shop", backend="memory:")

    @Celery("shop").task(name="reindex")
    @leased("reindex")
    def task() -> str:
        return "done"

    assert task.apply(throw=True).get() == "done"


{"flask": flask, "django": django, "celery": celery}[framework]()
FOR_MORE = {
    "tako_sync.contrib.django.testing",  # with the extra testing
    "tako_sync.contrib.django.admin",  # loaded by the admin, if that is installed
}
package = importlib.import_module(home)
for module in pkgutil.walk_packages(package.__path__, f"{home}."):
    if module.name not in FOR_MORE:
        importlib.import_module(module.name)
loaded = (FRAMEWORKS - {framework}).intersection(sys.modules)
assert not loaded, f"{home} loads {sorted(loaded)}"
sys.stdout.write(f"{framework}: alone, and at work\n")
