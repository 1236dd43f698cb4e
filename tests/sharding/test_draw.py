"""Pictures of plans: what they show, and that nothing lies on something else."""

import itertools
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moe import sharding
from moe.sharding.explain.cards import OUTSIDE, cards_of
from moe.sharding.explain.draw import WIDTH, draw_svg
from tests.sharding.explained_plans import PLANS, stack

SVG = "{http://www.w3.org/2000/svg}"


def picture(name: str) -> ElementTree.Element:
    return ElementTree.fromstring(draw_svg(PLANS[name]()))


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [each for each in root.iter() if name in each.get("class", "").split()]


def numbers(element: ElementTree.Element, *names: str) -> list[float]:
    return [float(element.get(name, "")) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_each_kind_of_module_has_one_card(plan: str) -> None:
    cards = cards_of(PLANS[plan]())
    blocks = of_class(picture(plan), "block")
    assert [(each.get("data-block"), each.get("data-count")) for each in blocks] == [
        (card.title, str(card.count)) for card in cards
    ]
    assert len({card.title for card in cards}) == len(cards)


def test_layers_that_repeat_are_one_card_in_the_order_of_use():
    titles = [(card.title, card.count) for card in cards_of(stack())]
    assert titles == [("words", 1), ("layers.*", 5), ("output", 1), (OUTSIDE, 1)]
    assert [each.name for each in cards_of(stack())[1].parameters] == ["norm.weight", "norm.bias", "wi", "wo"]


def test_a_parameter_has_a_square_for_each_axis_with_the_dimension_that_it_cuts():
    layers = of_class(picture("stack"), "block")[1]
    squares = {}
    for row in of_class(layers, "parameter"):
        told = row.find(f"{SVG}title").text
        digits = [each.text for each in row.iter(f"{SVG}text") if each.get("text-anchor") == "middle"]
        squares[told] = digits
        assert len([each for each in row.iter(f"{SVG}rect") if each.get("width") == "14"]) == 2
    assert squares["wi [256/model, 64]"] == ["0"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_byte_is_in_an_arrow_and_arrows_are_as_thick_as_bytes(plan: str) -> None:
    made, root = PLANS[plan](), picture(plan)
    for phase in ("forward", "backward"):
        arrows = [each for each in of_class(root, "arrow") if phase in each.get("class", "")]
        told = sum(int(each.get("data-bytes", "")) for each in arrows)
        assert told == sum(each.num_bytes for each in made.collectives if each.phase == phase)
        x = [numbers(each, "x1", "x2") for each in arrows]
        assert all(begin < end if phase == "forward" else begin > end for begin, end in x)
    arrows = sorted(of_class(root, "arrow"), key=lambda each: int(each.get("data-bytes", "")))
    for thin, thick in itertools.pairwise(arrows):
        assert float(thin.get("stroke-width", "")) <= float(thick.get("stroke-width", ""))
    widths = {float(each.get("stroke-width", "")) for each in arrows}
    assert len(widths) > 3 or len(arrows) < 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", PLANS)
def test_nothing_lies_on_something_else_or_beyond_the_edge(plan: str) -> None:
    root = picture(plan)
    height = float(root.get("height", ""))
    boxes = [numbers(each, "x", "y", "width", "height") for each in of_class(root, "card")]
    for each in of_class(root, "arrow"):
        x1, x2, y, thick = numbers(each, "x1", "x2", "y1", "stroke-width")
        boxes.append([min(x1, x2), y - thick / 2, abs(x2 - x1), thick])
    for (x, y, w, h), (other_x, other_y, other_w, other_h) in itertools.combinations(boxes, 2):
        assert x + w <= other_x or other_x + other_w <= x or y + h <= other_y or other_y + other_h <= y
    assert all(min(x, y) >= 0 and x + w <= WIDTH and y + h <= height for x, y, w, h in boxes)
    for text in root.iter(f"{SVG}text"):
        x, y, size = numbers(text, "x", "y", "font-size")
        assert text.text
        assert 0 < y < height
        if text.get("text-anchor") is None:
            assert x + len(text.text) * size * 0.5 <= WIDTH, text.text


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", PLANS)
def test_memory_is_one_bar_by_kind(plan: str) -> None:
    bars = of_class(picture(plan), "memory")
    made = PLANS[plan]().memory
    assert [int(each.get("data-bytes", "")) for each in bars] == [
        size for size in vars(made).values() if size
    ]
    places = [numbers(each, "x", "width") for each in bars]
    for (x, width), (after, _) in itertools.pairwise(places):
        assert math.isclose(x + width, after, abs_tol=0.2)


@pytest.mark.parametrize("plan", PLANS)
def test_it_is_the_same_byte_for_byte_also_of_a_saved_plan(plan: str, tmp_path: Path) -> None:
    made = PLANS[plan]()
    made.draw(tmp_path / "plan.svg")
    made.save(tmp_path / "plan.json")
    again = sharding.ShardingPlan.load(tmp_path / "plan.json")
    assert (tmp_path / "plan.svg").read_text() == draw_svg(made) == draw_svg(again)
    assert "nan" not in draw_svg(made).lower()
