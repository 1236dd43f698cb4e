"""A job's page in several tabs, after its session has ended, and without JavaScript."""

from typing import Any

from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import TOKEN, ControlPlane
from tests.service.silent_run import Run, metric
from tests.service.test_streams import num_streams
from tests.web.browser import open_page

DEADLINE_MS = 1000 * DEADLINE_S
SHOW = """state => {
    Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_hidden_tab_has_no_stream_and_catches_up_when_it_is_shown(browser: Any, own_plane: ControlPlane) -> None:
    """Browsers open six connections to a service: streams of hidden tabs would leave none to the tab in front."""
    run = Run(own_plane.start())
    run.send(0, metric(1))
    loss = '[data-chart="Loss"] [aria-label*="loss: {} values"]'.format
    with open_page(browser) as page:
        page.set_default_timeout(DEADLINE_MS)
        page.goto(f"{own_plane.url}/jobs/{run.id}")
        page.wait_for_selector("#live[data-live=on]")
        page.evaluate(SHOW, "hidden")
        await_that(lambda: num_streams(own_plane) == 0)
        run.send(1, metric(2), metric(3))
        page.evaluate(SHOW, "visible")
        page.wait_for_selector(loss(3))
        assert num_streams(own_plane) == 1
    run.end()


def test_two_tabs_show_what_one_of_them_does(browser: Any, plane: ControlPlane) -> None:
    run = Run(plane)
    with open_page(browser) as page:
        other = page.context.new_page()
        for tab in (page, other):
            tab.set_default_timeout(DEADLINE_MS)
            tab.goto(f"{plane.url}/jobs/{run.id}")
            tab.wait_for_selector("#live[data-live=on]")
        page.click("[data-action=cancel]")
        page.click("#question-yes")
        for tab in (page, other):
            tab.wait_for_selector('#state [data-state="cancelled"]')
            tab.wait_for_selector("[data-action=resume]")
    plane.await_state(run.id, "cancelled")


def test_an_ended_session_leads_to_the_login_and_back_to_the_job(browser: Any, token_plane: ControlPlane) -> None:
    job = token_plane.post(resources={"num_workers": 900})
    with open_page(browser, base_url=token_plane.url) as page:
        page.set_default_timeout(DEADLINE_MS)
        page.goto(f"/jobs/{job['id']}")
        log_in(page)
        page.wait_for_selector("#live[data-live=on]")
        page.context.clear_cookies()
        page.fill("#other", job["id"])
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/login?next=%2Fjobs%2F{job['id']}")
        log_in(page)
        page.wait_for_url(f"**/jobs/{job['id']}")
        assert page.text_content("h1") == job["name"]


def log_in(page: Any) -> None:
    page.wait_for_selector("#token")
    page.fill("#token", TOKEN)
    page.keyboard.press("Enter")


def test_without_javascript_pages_have_their_facts_and_say_what_to_type(browser: Any, plane: ControlPlane) -> None:
    job, second = (plane.post(resources={"num_workers": 900}) for _ in range(2))
    commands = {
        "/": "shardyard cancel", f"/jobs/{job['id']}": "the commands at the end", "/submit": "shardyard submit",
        "/plan": "shardyard plan", f"/compare?job={job['id']}&job={second['id']}": "shardyard compare",
    }  # fmt: skip
    with open_page(browser, base_url=plane.url, java_script_enabled=False) as page:
        for path, command in commands.items():
            page.goto(path)
            assert command in page.locator("main .notice").first.inner_text()
        page.goto(f"/jobs/{job['id']}")
        assert page.locator("#state").inner_text() == "queued"
        assert f"shardyard logs {job['id']}" in page.locator("#commands").inner_text()
