"""The page that submits a job, in a real browser."""

from itertools import pairwise
from typing import Any

import pytest
import yaml

from tests.service.control_plane import ControlPlane, spec
from tests.web.browser import open_page, violations


def test_form_and_yaml_are_in_step_and_problems_are_beside_their_fields(browser: Any, plane: ControlPlane) -> None:
    with open_page(browser) as page:
        page.goto(f"{plane.url}/submit")
        page.select_option("#example", label="translate-100-to-english")
        page.locator(".plan-layout.chosen").wait_for()
        comment = page.input_value("#spec").splitlines()[1]
        page.fill("#spec-name", "of the form")
        page.press("#spec-name", "Tab")
        page.locator("#spec-name[aria-invalid]").wait_for()
        page.fill("#spec-name", "of-the-form")
        page.locator("#spec-train > summary").press("Enter")
        page.fill("#spec-train-num_steps", "7")
        page.press("#spec-train-num_steps", "Tab")
        assert page.evaluate("document.activeElement.id") == "spec-train-max_duration"
        page.locator("#spec-name:not([aria-invalid])").wait_for()
        form_spec = yaml.safe_load(page.input_value("#spec"))
        assert (form_spec["name"], form_spec["train"]["num_steps"], form_spec["train"]["batch_tokens"]) == (
            "of-the-form",
            7,
            1024,
        )
        assert comment in page.input_value("#spec")
        page.route("**/fragments/plan", lambda _: None)  # never answered: the old plan stays busy
        page.fill("#spec", page.input_value("#spec").replace("seed: 0", "").replace("batch_tokens: 1024", "seed: 5"))
        assert page.input_value("#spec-train-seed") == "5"
        assert page.input_value("#spec-train-batch_tokens") == ""
        page.locator("#plan[aria-busy=true]").wait_for()
        assert violations(page) == []
        page.unroute_all(behavior="ignoreErrors")
        page.fill(
            "#spec", page.input_value("#spec").replace("{expert: 2}", "auto").replace("seed: 5", "batch_tokens: 1024")
        )
        page.click("#submit")
        page.wait_for_url(f"{plane.url}/jobs/job-*")
        job_id = page.url.rpartition("/")[2]
    assert plane.job(job_id)["spec"]["train"]["num_steps"] == 7


@pytest.mark.slow
def test_any_yaml_has_its_problem_and_a_sweep_has_a_plan_and_survives_a_reload(
    browser: Any, plane: ControlPlane
) -> None:
    bomb = "a: &a [x, x]\n" + "".join(f"{y}: &{y} [{', '.join([f'*{x}'] * 10)}]\n" for x, y in pairwise("abcdefgh"))
    with open_page(browser) as page:
        page.goto(f"{plane.url}/submit?from={plane.post(resources={'num_workers': 900})['id']}")
        page.locator("#spec-name").wait_for()
        for text in ("a: *b", bomb, "- a", "x: [1"):
            page.fill("#spec", text)
            page.locator("#problems li").wait_for()
            page.fill("#spec", "")
            page.locator("#problems li").wait_for(state="detached")
        text = yaml.safe_dump(spec(sweep={"method": "grid", "fields": {"train.seed": {"values": [1, 2]}}}))
        page.fill("#spec", text)
        page.locator("#plan .plan-layout.chosen").wait_for()
        assert page.locator("#problems li").count() == 0
        page.reload()
        page.locator("#spec-name").wait_for()
        assert page.input_value("#spec") == text
        page.click("#submit")
        page.wait_for_url(f"{plane.url}/sweeps/sweep-*")


@pytest.mark.slow
def test_the_pages_of_the_cluster_and_the_planner_are_for_everybody(browser: Any, plane: ControlPlane) -> None:
    with open_page(browser, viewport={"width": 360, "height": 740}, color_scheme="dark") as page:
        page.goto(f"{plane.url}/cluster")
        assert violations(page) == []
        page.goto(f"{plane.url}/plan")
        page.select_option("#example", label="translate-100-to-english")
        page.wait_for_function("document.getElementById('spec').value !== ''")
        page.select_option("#device", "h100")
        page.click("button[type=submit]")
        page.locator(".plan-layout.chosen").wait_for()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
