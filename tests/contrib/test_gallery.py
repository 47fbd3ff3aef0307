"""The gallery: the second press collapses into the first, in a request and in a browser."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from contrib.program import PATIENCE
from contrib.servers import Server
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.runtime import Runtime
from tako_sync.testing import occupy

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


class Gallery:
    def __init__(self, folder: Path, module: str) -> None:
        self.leases = SqliteLease(folder / "leases.sqlite3")
        self.runtime = Runtime(self.leases, app="gallery", env="test")
        self.server = Server(
            [sys.executable, "-m", f"gallery.{module}", "{port}"],
            {
                "TAKO_ENV": "test",
                "TAKO_BACKEND": f"sqlite:///{folder}/leases.sqlite3",
                "GALLERY_LEDGER": str(folder / "ledger"),
                "GALLERY_SECONDS": "2",
            },
            alive="/ledger",
        )

    @property
    def rebuilds(self) -> int:
        return int(self.server.get("/ledger").json["rebuilds"])


@pytest.fixture(params=["with_flask", "with_django"])
def gallery(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gallery]:
    gallery = Gallery(tmp_path, request.param)
    with gallery.server:
        yield gallery
    gallery.leases.close()


class TestReindexCollapsesWhileHeld:
    def test_it_is_not_started_and_the_ledger_is_unchanged(self, gallery: Gallery) -> None:
        with occupy("reindex", runtime=gallery.runtime):
            told = gallery.server.post("/reindex").json
            assert told["started"] is False and gallery.rebuilds == 0
        told = gallery.server.post("/reindex").json
        assert told["started"] is True and gallery.rebuilds == told["rebuilds"] == 1

    def test_of_presses_at_once_one_is_started(self, gallery: Gallery) -> None:
        told = [answer.json["started"] for answer in gallery.server.post_at_once("/reindex", 4)]
        assert sorted(told) == [False, False, False, True] and gallery.rebuilds == 1


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--window-size=800,600", f"--user-data-dir={tmp_path / 'profile'}",
    ):  # fmt: skip
        options.add_argument(flag)
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


def test_a_person_presses_twice_and_sees_the_second_press_collapse(
    browser: webdriver.Chrome, gallery: Gallery, tmp_path: Path
) -> None:
    browser.get(gallery.server.url)
    button = browser.find_element(By.ID, "reindex")
    button.click()
    button.click()
    WebDriverWait(browser, PATIENCE).until(
        lambda _: len(browser.find_elements(By.CSS_SELECTOR, "li.rebuilt, li.collapsed")) == 2
    )
    lines = [line.text for line in browser.find_elements(By.TAG_NAME, "li")]
    assert sorted(lines) == [
        "collapsed into the one that is at work",
        "rebuilt, with 20 pictures",
    ]
    assert browser.find_element(By.ID, "rebuilds").text == "1" and gallery.rebuilds == 1
    browser.save_screenshot(str(tmp_path / "gallery.png"))
