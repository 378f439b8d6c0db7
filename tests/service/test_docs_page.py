"""The page at /docs, in a real browser."""

from __future__ import annotations

import os
import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

pytestmark = pytest.mark.slow

# A browser that wants nothing of the network but the page.
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture
def page():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        assert "CI" not in os.environ, "CI must have Chromium"
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=QUIET)
        made = browser.new_page()
        yield made
        browser.close()


def test_docs_page_shows_every_route_and_sends_an_example(live_server, page):
    """A person opens the page, unfolds a route, sends its example and sees the answer."""
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("requestfailed", lambda request: faults.append(request.url))
    page.goto(f"{live_server}/docs")
    described = page.request.get(f"{live_server}/openapi.json").json()["paths"]
    for path in described:
        expect(page.locator("summary", has_text=path).first).to_be_visible()
    route = page.locator("details", has=page.locator("summary", has_text="/v1/embeddings"))
    route.locator("summary").click()
    route.get_by_role("button", name="Send").click()
    expect(route.locator("pre").last).to_contain_text('"embedding"', timeout=30_000)
    assert not faults
