"""Pictures of plans of modules: rows, bars to scale, and the same bytes for the same plan."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from moe import sharding
from moe.sharding.explain.cards import OUTSIDE, cards_of
from moe.sharding.explain.draw import draw_svg, figure_of
from tests.sharding.explained_plans import PLANS, stack


def panels(name: str) -> tuple[Any, Any, Any]:
    """Axes of parameters, exchanges and memory."""
    parameters, exchanges, memory = figure_of(PLANS[name]()).axes
    return parameters, exchanges, memory


def total(axes: Any) -> float:
    return sum(bar.get_width() for bars in axes.containers for bar in bars)


@pytest.mark.slow
def test_repeated_layers_are_one_card_in_the_order_of_use() -> None:
    titles = [(card.title, card.count) for card in cards_of(stack())]
    assert titles == [("words", 1), ("layers.*", 5), ("output", 1), (OUTSIDE, 1)]
    assert [parameter.name for parameter in cards_of(stack())[1].parameters] == [
        "norm.weight", "norm.bias", "wi", "wo",
    ]  # fmt: skip
    parameters, _, _ = panels("stack")
    labels = [label.get_text() for label in parameters.get_yticklabels()]
    assert labels == ["words", "layers.* x 5", "output", OUTSIDE]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_byte_is_in_a_bar(plan: str) -> None:
    sharding_plan = PLANS[plan]()
    parameters, exchanges, memory = panels(plan)
    assert total(parameters) == sum(
        parameter.num_bytes for card in cards_of(sharding_plan) for parameter in card.parameters
    )
    assert total(exchanges) == sum(collective.num_bytes for collective in sharding_plan.collectives)
    assert [bars[0].get_width() for bars in memory.containers] == [
        size for size in vars(sharding_plan.memory).values() if size
    ]


def test_bars_are_coloured_by_placement() -> None:
    parameters, _, _ = panels("stack")
    colours = {bars.get_label(): bars[0].get_facecolor() for bars in parameters.containers}
    assert "dimension 0 over model" in colours
    assert len(set(colours.values())) == len(colours)


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", PLANS)
def test_the_picture_is_the_same_byte_for_byte_also_after_the_plan_was_saved(plan: str, tmp_path: Path) -> None:
    sharding_plan = PLANS[plan]()
    sharding_plan.draw(tmp_path / "plan.svg")
    sharding_plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.svg").read_text()
    assert text == draw_svg(sharding.ShardingPlan.load(tmp_path / "plan.json"))
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "nan" not in text.lower()
