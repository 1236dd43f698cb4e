"""The list of jobs in a real browser, by keyboard alone."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from service.control.store.database import Database
from tests.processes import await_that
from tests.service.control_plane import TOKEN, ControlPlane
from tests.web.browser import open_page, violations
from tests.web.stored_jobs import store_jobs

NUM_JOBS = 60


@pytest.fixture(scope="module")
def filled_plane(plane: ControlPlane) -> ControlPlane:
    with closing(Database(f"sqlite:///{plane.database}")) as database:
        store_jobs(database, NUM_JOBS, root=plane.folder / "state" / "storage")
    plane.post(name="waits-for-room", resources={"num_workers": 900})
    return plane


@pytest.fixture
def page(browser: Any, filled_plane: ControlPlane) -> Iterator[Any]:
    with open_page(browser, base_url=filled_plane.url) as page:
        page.goto("/")
        yield page


def names(page: Any) -> list[str]:
    return list(page.locator(".job-name").all_inner_texts())


def tab_to(page: Any, selector: str) -> None:
    """Press Tab until the element has the focus, as those do who have no mouse."""
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} cannot be reached by keyboard")


def test_sort_and_search_by_keyboard(page: Any) -> None:
    assert len(names(page)) == 50
    tab_to(page, "th a[href*='sort=name']")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?sort=name")
    assert names(page) == sorted(names(page))
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Name")
    tab_to(page, "#search")
    page.keyboard.type("SWITCH")
    page.keyboard.press("Enter")
    page.wait_for_url("**search=SWITCH**")
    assert set(names(page)) == {"switch-base-8"}
    assert "sort=name" in page.url  # the order stays
    assert violations(page) == []


@pytest.mark.slow
def test_select_with_arrow_keys_and_delete(page: Any, filled_plane: ControlPlane) -> None:
    tab_to(page, "input[name=job]")  # the newest, which waits
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+Space")
    chosen = page.locator("input[name=job]:checked").evaluate_all("boxes => boxes.map(box => box.value)")
    assert len(chosen) == 2
    tab_to(page, "[data-action=delete]")
    page.keyboard.press("Enter")
    assert page.locator("#question[open] li").count() == 2
    assert violations(page) == []
    page.keyboard.press("Escape")  # nothing was done
    assert page.locator("input[name=job]:checked").count() == 2
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    await_that(lambda: all(filled_plane.job(job_id).get("state") in (None, "deleted", "deleting") for job_id in chosen))


@pytest.mark.slow
def test_cancel_a_job_and_read_what_was_refused(page: Any, filled_plane: ControlPlane) -> None:
    page.goto("/?search=waits-for-room")
    page.locator("input[name=job]").check()
    page.locator("[data-action=resume]").click()
    message = page.locator(".toast[role=alert]")
    assert "waits-for-room" in message.inner_text()  # a queued job cannot be resumed, in the API's words
    assert violations(page) == []
    message.get_by_role("button").click()
    page.locator("input[name=job]").check()
    page.locator("[data-action=cancel]").click()
    page.locator("#question-yes").click()
    page.locator(".badge[data-state=cancelled]").wait_for()


@pytest.mark.slow
def test_a_list_goes_on_after_the_network_was_cut(page: Any, filled_plane: ControlPlane) -> None:
    page.context.set_offline(True)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.locator("#live[data-live=lost]").wait_for()
    filled_plane.post(name="came-later", resources={"num_workers": 900})
    page.context.set_offline(False)
    page.locator(".job-name", has_text="came-later").wait_for()
    page.locator("#live[data-live=on]").wait_for()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280, 2560])
def test_every_page_fits_and_has_no_serious_findings(
    browser: Any, filled_plane: ControlPlane, token_plane: ControlPlane, scheme: str, width: int
) -> None:
    with open_page(browser, viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
        for url in ("/", "/?state=failed&sort=-loss", "/?search=nothing-like-it", "/nowhere"):
            page.goto(f"{filled_plane.url}{url}")
            assert violations(page) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.goto(token_plane.url)
        assert page.url.endswith("/login")
        assert violations(page) == []


def test_the_way_back_from_a_comparison_keeps_filters_and_selection(page: Any) -> None:
    page.goto("/?state=failed&sort=-loss&search=e")
    boxes = page.locator('input[name="job"]')
    for place in (0, 2):
        boxes.nth(place).check()
    page.click("#compare")
    page.wait_for_url("**/compare?**")
    page.go_back()
    page.wait_for_url("**/?state=failed&sort=-loss&search=e")
    assert (page.input_value("#search"), page.input_value("#sort")) == ("e", "-loss")
    assert page.is_enabled("#search")
    page.locator("#selection-words", has_text="2 jobs").wait_for()
    assert page.locator('input[name="job"]:checked').count() == 2


def test_log_in_and_out(browser: Any, token_plane: ControlPlane) -> None:
    with open_page(browser, base_url=token_plane.url) as page:
        page.goto("/?state=failed")
        page.wait_for_url("**/login?next=**")
        page.keyboard.type("not the token, for sure")  # the field has the focus
        page.keyboard.press("Enter")
        page.locator("#problem:not(:empty)").wait_for()
        assert page.locator("#token").get_attribute("aria-invalid") == "true"
        page.keyboard.type(TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_url("**/?state=failed")
        [cookie] = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
        page.locator("#log-out").click()
        page.wait_for_url("**/login")
        assert page.context.cookies() == []
