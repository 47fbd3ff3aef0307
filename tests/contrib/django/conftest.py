"""A Django project in this process, with two databases in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import django
import pytest
from django.test.utils import setup_databases, setup_test_environment, teardown_databases

from tako_sync.runtime import by_default

os.environ["DJANGO_SETTINGS_MODULE"] = "contrib.django.shop.settings"
django.setup()
by_default(None)  # the tests of other folders run in this process, too


@pytest.fixture(scope="session")
def databases() -> Iterator[None]:
    setup_test_environment()
    made = setup_databases(verbosity=0, interactive=False)
    yield
    teardown_databases(made, verbosity=0)


@pytest.fixture(autouse=True)
def settings_bind_this_process(databases: None) -> Iterator[None]:
    from tako_sync.contrib.django import conf

    by_default(conf.binding)
    yield
    by_default(None)
