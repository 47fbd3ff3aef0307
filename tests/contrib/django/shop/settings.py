"""Settings for a server under test; the tests in this process have some of their own."""

from __future__ import annotations

import os
from typing import Any

from tako_sync.policy import LeasePolicy

SECRET_KEY = "of the tests"
DEBUG = bool(os.environ.get("SHOP_DEBUG"))
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
USE_TZ = True
ROOT_URLCONF = "contrib.django.shop.urls"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "tako_sync.contrib.django",
    "contrib.django.shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES: dict[str, dict[str, Any]] = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", ":memory:"),
        "ATOMIC_REQUESTS": bool(os.environ.get("SHOP_ATOMIC")),
    },
    "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TAKO: dict[str, Any] = {
    "APP": "shop",
    "ENV": "test",
    "BACKEND": os.environ.get("SHOP_LEASES", "memory:"),
    "POLICY": LeasePolicy(ttl=float(os.environ.get("SHOP_TTL", "30")), poll=0.1, restart=0.2),
}
LOGGING_CONFIG = None
TIME_ZONE = "UTC"  # Django puts it into the environment, for all tests of this process
