"""A real Chromium, Debian's, driven by Playwright: one for all tests of a process."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.processes import await_that

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextmanager
def open_browser() -> Iterator[Any]:
    """Playwright's browser object. It and its driver end with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Skips where there is no Chromium; on Debian, `apt-get install chromium` brings it."""
    pytest.importorskip("playwright")
    if not CHROMIUM or not os.access(CHROMIUM, os.X_OK):
        pytest.skip("there is no Chromium on the path")
    with open_browser() as browser:
        yield browser


@contextmanager
def open_page(browser: Any, **context: Any) -> Iterator[Any]:
    """A page with its own cookies. Fails for errors of scripts, and for what the content security policy refuses."""
    errors: list[str] = []
    browser_context = browser.new_context(**context)
    try:
        page = browser_context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: _note(errors, message))
        yield page
    finally:
        browser_context.close()
    assert errors == []


def _note(errors: list[str], message: Any) -> None:
    # Refused requests are errors in the console too; what a page says of them is a test's business.
    if message.type == "error" and "Failed to load resource" not in message.text:
        errors.append(message.text)


def await_in(page: Any, expression: str) -> None:
    """Return once an expression holds in the page. Playwright's own `wait_for_function` needs `eval`, which the content
    security policy forbids."""
    await_that(lambda: bool(page.evaluate(expression)), lambda: expression)


def violations(page: Any) -> list[str]:
    """Serious and critical findings of axe-core in the page, with the elements concerned."""
    from axe_playwright_python.sync_playwright import Axe

    # Evaluated as by a debugger: the page's content security policy allows no script of a test.
    result = Axe().run(page)
    return [
        f"{finding['id']}: {node['html'][:200]} {node['failureSummary']}"
        for finding in result.response["violations"]
        if finding["impact"] in ("serious", "critical")
        for node in finding["nodes"]
    ]
