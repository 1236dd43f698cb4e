"""The picture of a job's plan: what it shows, and that nothing lies on something else."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moe.plan import Cluster, Plan, plan_job, read_plan_request
from moe.plan.picture import draw_svg
from moe.plan.svg import WIDTH, text_width

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def kept(name: str) -> Plan:
    return Plan.model_validate_json((ROOT / "tests" / "golden" / f"{name}.json").read_text())


def fresh(memory_bytes: int = 8 << 30) -> Plan:
    request = read_plan_request(ROOT / "examples" / "translate-100-to-english.yaml")
    cluster = Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=memory_bytes)
    return plan_job(request.spec, cluster, 2)


PLANS = {
    "new": fresh,
    "little memory": lambda: fresh(1 << 30),
    "old": lambda: kept("version-3/deepseek-v3-1024-h100"),
    "alone": lambda: fresh().model_copy(update={"runners_up": ()}),
}


def parts(root: ElementTree.Element, title: str) -> list[list[ElementTree.Element]]:
    """Rectangles of the bars of one sort, by row from the top."""
    found: dict[float, list[ElementTree.Element]] = {}
    for each in root.iter(f"{SVG}rect"):
        if each.get("class") == f"part {title}":
            found.setdefault(float(each.get("y", "")), []).append(each)
    return [found[y] for y in sorted(found)]


def test_bars_show_each_kind_of_each_layout_to_one_scale() -> None:
    plan = fresh()
    root = ElementTree.fromstring(draw_svg(plan))
    every = [(plan.predicted, plan.memory), *((each.predicted, each.memory) for each in plan.runners_up)]
    for title, amounts in (
        ("step", [time.by_kind() for time, _ in every if time]),
        ("memory", [{**memory.by_kind(), "allowance": 0} for _, memory in every if memory]),
    ):
        bars = parts(root, title)
        assert [len(bar) for bar in bars] == [sum(1 for each in of.values() if each) for of in amounts]
        scales = {
            round(float(part.get("width", "")) / float(part.get("data-amount", "")) / bar_scale, 1)
            for bar in bars
            for part in bar
            for bar_scale in [float(bars[0][0].get("width", "")) / float(bars[0][0].get("data-amount", ""))]
            if float(part.get("width", "")) > 1
        }
        assert scales == {1.0}
    limits = [each for each in root.iter(f"{SVG}line") if each.get("class") == "limit"]
    assert len(limits) == len(every)


@pytest.mark.parametrize("name", PLANS)
def test_no_words_leave_the_paper_or_lie_on_others(name: str) -> None:
    root = ElementTree.fromstring(draw_svg(PLANS[name]()))
    boxes = []
    for each in root.iter(f"{SVG}text"):
        size, text = float(each.get("font-size", "")), each.text or ""
        width = text_width(text, size) * (0.97 if each.get("font-weight") else 1)
        x, y = float(each.get("x", "")), float(each.get("y", ""))
        x -= {"middle": width / 2, "end": width}.get(each.get("text-anchor", ""), 0)
        boxes.append((x, y - 0.8 * size, x + width, y + 0.2 * size, text))
    height = float(root.get("height", ""))
    for at, (left, top, right, bottom, text) in enumerate(boxes):
        assert 0 <= left <= right <= WIDTH, text
        assert 0 <= top <= bottom <= height, text
        for other in boxes[:at]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart, (text, other[4])


def test_the_same_plan_is_the_same_picture_also_when_it_was_kept() -> None:
    plan = fresh()
    text = json.dumps(plan.model_dump(mode="json"), sort_keys=True)
    assert draw_svg(plan) == draw_svg(fresh()) == draw_svg(Plan.model_validate_json(text))


def test_a_plan_of_an_earlier_release_shows_sums() -> None:
    plan = kept("version-3/deepseek-v3-1024-h100")
    root = ElementTree.fromstring(draw_svg(plan))
    assert [[part.get("data-kind") for part in bar] for bar in parts(root, "step")[1:]] == [["all"]] * len(
        plan.runners_up
    )
    assert "kinds not told" in {each.text for each in root.iter(f"{SVG}text")}
