"""A browser, and pages that fail a test if a script of theirs fails or another host is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

# `make test` imports this file too, and only `make test-page` installs the library.
if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request, ViewportSize

Open = Callable[..., "Page"]
# How long a page may take for anything. It only bounds a wait: a browser on a busy machine is slow.
MOST_MS = 120_000
WIDE: ViewportSize = {"width": 1280, "height": 860}
PHONE: ViewportSize = {"width": 390, "height": 844}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", action="store_true", help="write the pictures of docs/page.md anew")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=MOST_MS)
    with sync_playwright() as driver:
        # Chromium's own sandbox needs rights that a container's root lacks. It loads our page alone here.
        started = driver.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"], timeout=MOST_MS
        )
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Return a function that opens an address in a new profile. At the end, no page may have failed."""
    failed: list[str] = []
    asked: list[str] = []
    contexts = []

    def opened(
        address: str, *, scheme: str = "light", size: ViewportSize = WIDE, first_script: str = ""
    ) -> Page:
        context = browser.new_context(color_scheme="dark" if scheme == "dark" else "light", viewport=size)
        contexts.append(context)
        context.set_default_timeout(MOST_MS)
        context.add_init_script(first_script)
        page = context.new_page()
        own = urlsplit(address).netloc

        def note(request: Request) -> None:
            if urlsplit(request.url).netloc != own:
                asked.append(request.url)

        def said(message: ConsoleMessage) -> None:
            # A refused request is said on the console too, and may be the subject of a test.
            if message.type == "error" and "Failed to load resource" not in message.text:
                failed.append(message.text)

        page.on("request", note)
        page.on("console", said)
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not failed
    assert not asked, "the page asked another host"


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def serious(page: Page) -> list[str]:
    """Return axe-core's findings that are serious or critical, each with its first element."""
    import axe_playwright_python

    page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0].get('failureSummary')}"
        for one in found
        if one["impact"] in {"serious", "critical"}
    ]
