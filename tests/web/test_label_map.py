"""Which labels go to which experts, on the page of a job: drawn, read by keyboard, layer by layer, and live."""

import json
from typing import Any

from moe.records import LabelLayerRecord, LabelLoads, LayerRecord, StepRecord
from tests.processes import DEADLINE_S
from tests.service.control_plane import ControlPlane
from tests.service.silent_run import Run, metric
from tests.web.browser import open_page, violations

HOSTILE = "<img src=x onerror=alert(2)>\u202e" + "long" * 30


def evaluated_step(step: int, loads: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """A step with an even layer 1, and these loads by label in layer 4."""
    even = LabelLayerRecord(1, ((2,) * 4, (3,) * 4))
    record = StepRecord(
        step=step, loss=1.0, layers=(LayerRecord(1, (5,) * 4, 1.0),), held_out={"seen": 1.0},
        label_loads=LabelLoads("role", ("de", HOSTILE), (even, LabelLayerRecord(4, loads))),
    )  # fmt: skip
    return metric(**json.loads(json.dumps(record.to_plain())))


def test_labels_by_experts(browser: Any, plane: ControlPlane) -> None:
    run = Run(plane)
    run.send(0, metric(1), evaluated_step(2, ((8, 0, 0, 0), (0, 3, 9, 0))))
    for color_scheme, width in (("light", 1280), ("dark", 360)):
        with open_page(browser, viewport={"width": width, "height": 800}, color_scheme=color_scheme) as page:
            page.set_default_timeout(1000 * DEADLINE_S)
            page.goto(f"{plane.url}/jobs/{run.id}")
            page.wait_for_selector("#live[data-live=on]")
            page.locator("#experts").scroll_into_view_if_needed()
            page.wait_for_selector("#label-map canvas")
            assert page.input_value("#label-layer") == "4", "the most specialized layer"
            assert page.text_content("#labels-title") == "Experts by role"
            canvas = page.locator(".label-cells canvas")
            assert canvas.evaluate("canvas => [canvas.width, canvas.height]") == [4, 2]
            assert page.locator(".label-names li").all_text_contents() == ["de", HOSTILE]
            assert page.locator("#label-map img").count() == 0
            canvas.focus()
            for key in ("ArrowDown", "ArrowLeft"):
                page.keyboard.press(key)
            words = page.text_content("#label-words")
            assert words == f"\u2068{HOSTILE}\u2069, expert 2: 75% of its choices."
            cells = page.locator("#label-map tbody tr").first.locator("td").all_text_contents()
            assert cells == ["8", "expert 0 (100%)"]
            page.select_option("#label-layer", "1")
            page.locator("#label-map tbody td", has_text="25%").first.wait_for()
            assert violations(page) == []
            assert page.evaluate("document.documentElement.scrollWidth") == width
            if color_scheme == "dark":
                run.send(2, evaluated_step(3, ((0, 8, 0, 0), (0, 3, 9, 0))))
                page.locator("#labels-note", has_text="at step 3").wait_for()
                assert page.input_value("#label-layer") == "1", "the layer that was chosen"
    run.end()


def test_a_job_without_labels_has_no_picture_of_them(browser: Any, plane: ControlPlane) -> None:
    run = Run(plane)
    run.send(0, metric(1, layers=[{"layer": 1, "load": [1, 2], "max_over_mean": 1.3}]))
    with open_page(browser) as page:
        page.set_default_timeout(1000 * DEADLINE_S)
        with page.expect_response("**/experts/labels?**") as response:
            page.goto(f"{plane.url}/jobs/{run.id}")
            page.locator("#experts").scroll_into_view_if_needed()
        assert response.value.json()["step"] is None
        page.wait_for_selector("#heat-map canvas")
        assert page.is_hidden("#labels")
    run.end()
