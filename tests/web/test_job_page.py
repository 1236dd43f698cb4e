"""The page of a job: it grows with the job, catches up after a cut, and shows anything that a job may contain."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from moe.records import LayerRecord, StepRecord
from moe.train.checkpoint import marker as markers
from service.control.report.curves import MAX_NAMES
from service.control.report.log_pages import PAGE_BYTES
from tests.processes import DEADLINE_S
from tests.service.checkpoints import commit
from tests.service.control_plane import ControlPlane
from tests.service.databases import BOTH_DATABASES
from tests.service.silent_run import Run, checkpoint, metric, record
from tests.service.test_log_choice import time_at
from tests.service.test_streams import write_log
from tests.web.browser import open_page, violations
from tests.web.test_pages import Markup, page_of

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[31m"
DEADLINE_MS = 1000 * DEADLINE_S


def hold(page: Any, url: str) -> list[Any]:
    """Requests of the page to URLs of this pattern, which wait until they are continued."""
    held: list[Any] = []

    def keep(route: Any) -> None:
        held.append(route)

    page.route(url, keep)
    return held


def loss_label(number: int) -> str:
    return f'[data-chart="Loss"] [aria-label*="loss: {number} values"]'


def test_a_running_jobs_curve_grows_and_catches_up_after_a_cut(browser: Any, own_plane: ControlPlane) -> None:
    run = Run(own_plane.start())
    run.send(0, *(metric(step, loss=5 - step / 10, step_s=0.5) for step in range(1, 11)))
    with open_page(browser) as page:
        page.set_default_timeout(DEADLINE_MS)
        page.goto(f"{own_plane.url}/jobs/{run.id}")
        page.wait_for_selector(loss_label(10))
        page.wait_for_selector("#live[data-live=on]")
        run.send(10, *(metric(step, loss=3.5) for step in range(11, 16)))
        page.wait_for_selector(loss_label(15))
        assert page.text_content("[data-figure=loss]") == "3.5"
        own_plane.kill()
        page.wait_for_selector("#live[data-live=lost]")
        own_plane.start()
        run.send(15, *(metric(step, loss=2.5) for step in range(16, 21)))
        page.wait_for_selector(loss_label(20))
        page.wait_for_selector("#live[data-live=on]")
    run.end()


def test_curves_of_more_names_than_a_request_takes_are_drawn(browser: Any, plane: ControlPlane) -> None:
    """Of those, the first 128 of a chart, which says how many it leaves out."""
    run = Run(plane)
    run.send(0, *(metric(step, source_tokens={f"s{n}": n for n in range(300)}) for step in range(1, 4)))
    with open_page(browser) as page:
        page.set_default_timeout(DEADLINE_MS)
        page.goto(f"{plane.url}/jobs/{run.id}")
        page.wait_for_selector(loss_label(3))
        page.wait_for_selector('[data-chart="Tokens by source"] [aria-label*="s0: 3 values"]')
        assert page.is_hidden('[data-chart="Loss"] [data-hidden]')
        assert page.get_attribute('[data-chart="Tokens by source"] [data-hidden]', "data-hidden") == "172"
        run.send(3, metric(4, source_tokens={"s0": 1, "s99": 1, "later": 1}))
        page.wait_for_selector(loss_label(4))
        page.wait_for_selector('[data-chart="Tokens by source"] [data-hidden="173"]')
        assert "128 of 301" in page.text_content('[data-chart="Tokens by source"] [data-hidden]')
        assert page.is_hidden("#curves-note")
        run.send(4, metric(5, source_tokens={f"t{n}": n for n in range(MAX_NAMES)}))
        page.wait_for_selector(loss_label(5))
        page.reload()
        page.wait_for_selector(loss_label(5))
        assert str(MAX_NAMES) in page.text_content("#curves-note")
        assert page.is_visible("#curves-note")
    run.end()


def test_a_log_line_of_ten_megabytes_does_not_fill_the_page(browser: Any, plane: ControlPlane) -> None:
    run, long = Run(plane), "x" * 10_000_000
    write_log(run.storage, "a1.g0.rank-0", 0, f"{time_at(0)} info    {long}needle\n{time_at(1)} info    next\n")
    with open_page(browser) as page:
        page.set_default_timeout(DEADLINE_MS)
        page.goto(f"{plane.url}/jobs/{run.id}")
        page.locator("#logs").scroll_into_view_if_needed()
        page.wait_for_selector(".log-line")
        assert page.locator(".log-line").last.text_content().endswith("next")
        assert page.evaluate("document.getElementById('log-lines').textContent.length") < 500_000
        page.fill("#log-search", "needle")
        page.keyboard.press("Enter")
        page.wait_for_selector("mark")
        assert page.evaluate("document.getElementById('log-lines').textContent.length") < 500_000
    run.end()


@pytest.fixture
def hostile_run(plane: ControlPlane) -> Iterator[Run]:
    """A run whose every text is markup, escape codes and changes of direction."""
    run = Run(plane)
    run.send(
        0,
        record("waiting", reason=HOSTILE),
        record("log", level=HOSTILE, message=HOSTILE),
        record("log"),
        record("log", message=[1], level=None),
        metric(1, loss=None, lr="text", step_s=[1], numbers={HOSTILE: 1.0}, held_out={HOSTILE: None}),
        metric(2, loss=None, samples=[{"prompt": HOSTILE, "completion": HOSTILE}, "text", {}], tokens_per_s="text"),
        checkpoint(2),
    )
    write_log(run.storage, "a1.driver", 0, f"{time_at(0)} error   {HOSTILE}\n{HOSTILE}\n\n\x00\xff\n")
    yield run
    run.end()


@BOTH_DATABASES
@pytest.mark.parametrize(("path", "num_texts"), [("", 4), ("/samples", 2)])
def test_a_hostile_job_is_text_on_its_page(hostile_run: Run, path: str, num_texts: int) -> None:
    answer = page_of(hostile_run.plane, f"/jobs/{hostile_run.id}{path}")
    assert answer.status_code == 200
    markup = Markup(answer.text)
    assert markup.inline == []
    assert "img" not in {tag for tag, _ in markup.elements}
    assert answer.text.count("&lt;script&gt;alert(1)") >= num_texts


def test_a_checkpoint_is_verified_in_its_dialog(browser: Any, plane: ControlPlane) -> None:
    run = Run(plane)
    name = commit(run.storage, 2)
    with open_page(browser) as page:
        page.set_default_timeout(DEADLINE_MS)
        page.goto(f"{plane.url}/jobs/{run.id}")
        held = hold(page, "**/verification")
        size = page.text_content("#checkpoints [data-name=Size]")
        page.click(f'[data-verify="{name}"]')
        page.wait_for_selector("#files[open] #verification progress")
        assert size in page.text_content("#verification")
        assert violations(page) == []
        held[0].continue_()
        page.wait_for_selector("#files[open] #verification [data-kind=success]")
        page.unroute("**/verification")
        page.keyboard.press("Escape")
        (run.storage / "checkpoints" / name / "run.json").unlink()
        page.click(f'[data-verify="{name}"]')
        page.wait_for_selector("#verification [data-kind=error]")
        assert f"checkpoints/{name}/run.json" in page.text_content("#verification li")
        assert violations(page) == []
    run.end()


@BOTH_DATABASES
def test_checkpoints_are_listed_whole_or_not(plane: ControlPlane) -> None:
    run = Run(plane)
    folder = run.storage / markers.FOLDER
    folder.mkdir(exist_ok=True)
    marker = markers.Marker(step=2, attempt=1, group=0, num_workers=1, created_at=time_at(0), files={})
    for name, content in ((marker.name, marker.to_bytes()), (markers.name_of(3, 1, 0), b"not JSON")):
        (folder / f"{name}{markers.SUFFIX}").write_bytes(content)
    answer = page_of(plane, f"/jobs/{run.id}")
    assert answer.status_code == 200
    markup = Markup(answer.text)
    assert len(markup.attributes("tr", "data-checkpoint")) == 2
    assert markup.attributes("button", "data-files") == [marker.name]
    run.end()


def test_a_job_that_does_not_exist_has_a_page_that_says_so(plane: ControlPlane) -> None:
    answer = page_of(plane, "/jobs/job-aaaaaaaaaaaa")
    assert answer.status_code == 404
    assert "<h1>" in answer.text


@pytest.mark.slow
def test_hostile_texts_in_the_browser(browser: Any, hostile_run: Run) -> None:
    dialogs: list[Any] = []
    with open_page(browser) as page:
        page.set_default_timeout(DEADLINE_MS)
        page.on("dialog", lambda dialog: (dialogs.append(dialog), dialog.dismiss()))
        page.goto(f"{hostile_run.plane.url}/jobs/{hostile_run.id}")
        page.wait_for_selector('[data-chart="Loss"]')
        assert "not finite" in page.text_content('[data-chart="Loss"] p.chart-note:not([data-hidden])')
        page.locator("#logs").scroll_into_view_if_needed()
        page.wait_for_selector(".log-line")
        assert "<script>alert(1)</script>" in page.text_content("#log-lines")
        assert "\x1b" not in page.text_content("#log-lines")
        assert page.locator("main img, main script").count() == 0
        assert violations(page) == []
    assert dialogs == []


@pytest.mark.slow
def test_a_job_without_metrics_says_so(browser: Any, plane: ControlPlane) -> None:
    job = plane.post(resources={"num_workers": 900})
    with open_page(browser, viewport={"width": 360, "height": 700}, color_scheme="dark") as page:
        page.set_default_timeout(DEADLINE_MS)
        page.goto(f"{plane.url}/jobs/{job['id']}")
        page.locator("#curves-note", has_text="No step").wait_for()
        page.locator("#experts").scroll_into_view_if_needed()
        page.locator("#experts-note", has_text="No expert loads").wait_for()
        page.locator("#logs").scroll_into_view_if_needed()
        page.locator("#log-note", has_text="There are no").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert violations(page) == []
        # By keyboard alone: cancelling asks first, and the safe answer has the focus.
        page.focus("[data-action=cancel]")
        page.keyboard.press("Enter")
        page.wait_for_selector("#question[open]")
        assert page.evaluate("document.activeElement.value") == "no"
        page.keyboard.press("Escape")
        assert plane.job(job["id"])["state"] == "queued"
        page.keyboard.press("Enter")
        page.wait_for_selector("#question[open]")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector('#state [data-state="cancelled"]')
        assert plane.job(job["id"])["state"] == "cancelled"


def test_a_search_reads_on_until_it_finds_or_is_stopped(browser: Any, plane: ControlPlane) -> None:
    run = Run(plane)
    text = "".join(f"{time_at(number % 60)} info    line {number}\n" for number in range(100_000))
    write_log(run.storage, "a1.g0.rank-0", 0, f"{time_at(0)} info    needle\n{text}")
    for segment in range(1, 5 * PAGE_BYTES // (2 * len(text))):
        write_log(run.storage, "a1.g0.rank-0", segment, text)
    with open_page(browser) as page:
        page.set_default_timeout(DEADLINE_MS)
        page.goto(f"{plane.url}/jobs/{run.id}")
        page.locator("#logs").scroll_into_view_if_needed()
        page.wait_for_selector(".log-line")
        held = hold(page, "**/logs/lines?*cursor=*")
        page.fill("#log-search", "needle")
        page.keyboard.press("Enter")
        page.click("text=Stop searching")
        page.locator("#log-note", has_text="Searched back to").wait_for()
        held[0].continue_()
        page.unroute("**/logs/lines?*cursor=*")
        page.fill("#log-search", "not submitted")
        page.click("text=Search further back")
        page.locator("#log-note", has_text="1 line.").wait_for()
        assert page.text_content("mark") == "needle"
    run.end()


@pytest.mark.slow
def test_4096_experts_and_a_log_of_a_hundred_thousand_lines(browser: Any, plane: ControlPlane) -> None:
    run, load = Run(plane), [100] * 4096
    load[4000] = 90_000
    layers = (LayerRecord(1, (100,) * 4096, 1.0), LayerRecord(9, tuple(load), 700.0))
    for step in range(1, 4):
        plain = StepRecord(step=step, loss=1.0, layers=layers).to_plain()
        assert run.send(step - 1, record("metric", **json.loads(json.dumps(plain)))).status_code == 200
    lines = (
        f"{time_at(number)} info    line {number}{' needle' if number == 7 else ''}\n" for number in range(100_000)
    )
    write_log(run.storage, "a1.g0.rank-0", 0, "".join(lines))
    with open_page(browser, viewport={"width": 2560, "height": 1400}) as page:
        page.set_default_timeout(DEADLINE_MS)
        page.goto(f"{plane.url}/jobs/{run.id}")
        page.locator("#experts").scroll_into_view_if_needed()
        page.wait_for_selector("#heat-map canvas")
        assert page.input_value("#layer") == "9"
        assert "experts 4000 to 4031" in page.get_attribute("#heat-map > canvas", "aria-label")
        assert page.evaluate("document.querySelector('#heat-map > canvas').height") == 128
        page.focus("#heat-map > canvas")
        page.keyboard.press("ArrowDown")
        assert "experts 32 to 63" in page.text_content("#heat-words")
        page.locator("#logs").scroll_into_view_if_needed()
        page.wait_for_selector(".log-line")
        assert page.locator(".log-line").last.text_content().endswith("line 99999")
        page.fill("#log-search", "needle")
        page.keyboard.press("Enter")
        page.locator("#log-note", has_text="1 line.").wait_for()
        assert page.text_content("mark") == "needle"
        assert violations(page) == []
    run.end()
