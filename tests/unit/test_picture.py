"""The picture of a job's plan: bars to scale, totals, and the same bytes for the same plan."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from moe.plan import Cluster, Plan, plan_job, read_plan_request
from moe.plan.picture import draw_svg, figure_of
from moe.plan.quantities import time_kind_name
from moe.plan.svg import require_matplotlib
from tests.refusals import expect_problem

ROOT = Path(__file__).parents[2]
TEXT = "{http://www.w3.org/2000/svg}text"


def golden(name: str) -> Plan:
    return Plan.model_validate_json((ROOT / "tests" / "golden" / f"{name}.json").read_text())


def fresh(memory_bytes: int = 8 << 30) -> Plan:
    request = read_plan_request(ROOT / "examples" / "translate-100-to-english.yaml")
    cluster = Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=memory_bytes)
    return plan_job(request.spec, cluster, 2)


PLANS = {
    "new": fresh,
    "little memory": lambda: fresh(1 << 30),
    "old": lambda: golden("version-3/deepseek-v3-1024-h100"),
    "alone": lambda: fresh().model_copy(update={"runners_up": ()}),
}


def widths_by_kind(axes: Any) -> dict[str, list[float]]:
    """Lengths of the bars of each kind, the first layout's first."""
    return {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}


def test_bars_show_each_kind_of_each_layout_to_scale() -> None:
    plan = fresh()
    time, memory = figure_of(plan).axes
    rows = [(plan.predicted, plan.memory), *((runner_up.predicted, runner_up.memory) for runner_up in plan.runners_up)]
    expected_s: dict[str, list[float]] = {}
    expected_bytes: dict[str, list[float]] = {}
    for time_estimate, memory_estimate in rows:
        for kind, seconds in time_estimate.by_kind().items():
            expected_s.setdefault(time_kind_name(kind), []).append(seconds)
        for kind, num_bytes in memory_estimate.by_kind().items():
            if kind != "allowance":
                expected_bytes.setdefault(kind, []).append(num_bytes)
    assert widths_by_kind(time) == {kind: pytest.approx(row) for kind, row in expected_s.items() if any(row)}
    assert widths_by_kind(memory) == {kind: pytest.approx(row) for kind, row in expected_bytes.items() if any(row)}
    (limits,) = memory.collections
    assert [line[0][0] for line in limits.get_segments()] == [plan.memory.limit] * len(rows)


@pytest.mark.parametrize("name", PLANS)
def test_each_layout_has_a_label_and_its_totals(name: str) -> None:
    plan = PLANS[name]()
    time, memory = figure_of(plan).axes
    labels = [label.get_text() for label in time.get_yticklabels()]
    assert len(labels) == len(time.texts) == len(memory.texts) == 1 + len(plan.runners_up)
    assert len(set(labels)) == len(labels)
    for axes in (time, memory):
        ends = [text.xy[0] for text in axes.texts]
        assert max(ends) < axes.get_xlim()[1], "bars end within the panel"


def test_the_same_plan_is_the_same_picture_also_after_it_was_saved() -> None:
    plan = fresh()
    copy = Plan.model_validate_json(json.dumps(plan.model_dump(mode="json"), sort_keys=True))
    picture = draw_svg(plan)
    assert picture == draw_svg(copy)
    texts = [element.text for element in ElementTree.fromstring(picture).iter(TEXT)]
    assert "2 x cpu: the 5 best layouts" in texts


def test_a_plan_of_an_earlier_release_shows_totals() -> None:
    plan = golden("version-3/deepseek-v3-1024-h100")
    time, _ = figure_of(plan).axes
    totals = widths_by_kind(time)["kinds not recorded"]
    assert totals == pytest.approx([0, *(runner_up.step_s for runner_up in plan.runners_up)])


def test_a_picture_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # Python refuses to import it, as if it were not installed
    with expect_problem("not_installed", "--draw", None):
        require_matplotlib("--draw")
