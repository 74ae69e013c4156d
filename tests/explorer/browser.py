"""A headless Chromium that may reach nothing but the page."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser, or a skip that says what is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium found; install it or set CHROMIUM")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser: Any, address: str, *, allowed: str, width: int = 1280, height: int = 900) -> "Page":
    """A page whose requests outside `allowed` are refused and listed in `page.refused`; errors are in `page.errors`."""
    context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
    page = context.new_page()
    page.errors, page.refused = [], []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)

    def route(request: Any) -> None:
        if request.request.url.startswith(allowed):
            request.continue_()
        else:
            page.refused.append(request.request.url)
            request.abort()

    page.route("**/*", route)
    page.goto(address)
    page.wait_for_selector("#stage[data-drawn]")
    return page
