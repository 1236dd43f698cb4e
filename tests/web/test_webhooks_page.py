"""The pages of webhooks: added, with a secret shown once, tested, disabled and removed; deliveries with outcomes."""

from typing import Any

import pytest

from tests.processes import DEADLINE_S
from tests.service.control_plane import ControlPlane
from tests.service.receiver import receiver
from tests.service.test_webhooks import LOOPBACK, await_delivered
from tests.web.browser import await_in, open_page, violations
from tests.web.test_pages import page_of

DEADLINE_MS = 1000 * DEADLINE_S


@pytest.mark.parametrize("path", ["/webhooks/wh-aaaaaaaaaaaa", "/webhooks/a%3Fb"])
def test_a_webhook_that_does_not_exist_is_not_found(plane: ControlPlane, path: str) -> None:
    assert page_of(plane, path).status_code == 404


ONE_LINE = """[...document.querySelectorAll("#add-form label:has(> input[type=checkbox])")].map((label) => {
  const words = document.createRange();
  words.selectNodeContents(label);
  words.setStartAfter(label.firstElementChild);
  const [box, text] = [label.firstElementChild.getBoundingClientRect(), words.getBoundingClientRect()];
  return box.right <= text.left && box.top + box.height / 2 > text.top && box.top + box.height / 2 < text.bottom;
})"""
"""Whether each checkbox stands before its label's words, on the same line."""


@pytest.mark.parametrize("width", [360, 1440])
def test_a_checkbox_stands_before_its_words(browser: Any, plane: ControlPlane, width: int) -> None:
    with open_page(browser, viewport={"width": width, "height": 900}) as page:
        page.goto(f"{plane.url}/webhooks")
        are_on_one_line = page.evaluate(ONE_LINE)
    assert len(are_on_one_line) > 5
    assert all(are_on_one_line)


def test_a_webhook_is_added_tested_disabled_and_removed(browser: Any, own_plane: ControlPlane) -> None:
    own_plane.start(**LOOPBACK)
    with receiver() as to, open_page(browser) as page:
        page.set_default_timeout(DEADLINE_MS)
        page.goto(f"{own_plane.url}/webhooks")
        page.fill("#add-name", "a b")
        page.fill("#add-url", f"{to.url}?token=a-secret-of-the-url")
        page.click("#add-form [type=submit]")
        page.wait_for_selector("#add-name[aria-invalid=true]")
        assert page.text_content("#add-name-problem") != ""
        page.fill("#add-name", "hook")
        page.keyboard.press("Enter")
        page.wait_for_selector("#secret:not([hidden])")
        secret = page.text_content("#secret code")
        page.wait_for_selector("[data-webhook=hook]")
        assert "a-secret-of-the-url" not in page.content()
        page.click("[data-webhook=hook] [data-action=test]")
        page.wait_for_selector(".toast[data-kind=success]")
        assert [entry.content["type"] for entry in to.received] == ["test"]
        page.click("[data-webhook=hook] [data-action=disable]")
        page.click("[data-webhook=hook] [data-action=enable]")
        page.wait_for_selector("[data-webhook=hook] [data-action=disable]")
        assert violations(page) == []
        page.reload()
        assert secret not in page.content()
        page.click("[data-webhook=hook] a.job-name")
        page.wait_for_selector("[data-delivery]")
        page.click("[data-action=repeat]")
        await_delivered(own_plane, 1)
        assert violations(page) == []
        page.goto(f"{own_plane.url}/webhooks")
        page.click("[data-webhook=hook] [data-action=remove]")
        page.wait_for_selector("#question[open]")
        page.click("#question-yes")
        await_in(page, "!document.querySelector('[data-webhook]')")
