"""Pipeline stages compute the same as one process: losses, every gradient, the norm, routers' decisions and the next
weights, with every schedule and beside every other kind of parallelism."""

from dataclasses import replace
from itertools import cycle

import pytest

from moe.spec import LanguageModelSpec
from tests.grid import item_params
from tests.parity.combinations import ROUTERS, assert_same, run_on, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Shape, run

LAYOUTS = (
    Degrees(pipeline=2, schedule="gpipe"), Degrees(pipeline=2), Degrees(pipeline=2, virtual_stages=2),
    Degrees(pipeline=2, expert=2, schedule="gpipe"), Degrees(pipeline=2, data=2, fsdp=2, expert_fsdp=2),
    Degrees(pipeline=2, expert=2, fsdp=2, virtual_stages=2), Degrees(pipeline=2, data=2, fsdp=2, schedule="gpipe"),
    Degrees(pipeline=2, expert=2, tensor=2, fsdp=1), Degrees(pipeline=2, expert_tensor=2, tensor=2),
    Degrees(pipeline=2, data=2, context=2), Degrees(pipeline=4), Degrees(pipeline=4, schedule="gpipe"),
    Degrees(pipeline=2, stages=(3, 1)), Degrees(pipeline=4, stages=(1, 1, 1, 1)),
)  # fmt: skip
OPTIONS = (
    {"micro_batch_groups": 1}, {"micro_batch_groups": 1, "recompute": "full"}, {"micro_batch_groups": 3},
    {"micro_batch_groups": 2, "recompute": "selective"}, {},
)  # fmt: skip
"""With groups of 3, ranks have micro-batches of several sizes, and empty ones."""


def staged_model(attention: str, router: str) -> LanguageModelSpec:
    """A model of four layers."""
    return LanguageModelSpec(**{**language_model(attention, **ROUTERS[router]).model_dump(), "num_layers": 4})


def cases() -> list[tuple[Degrees, str, str]]:
    """Layouts, routers and kinds of attention that take turns, so that each meets many of the others."""
    layouts, options, attentions, routers = (cycle(items) for items in (LAYOUTS, OPTIONS, ATTENTIONS, ROUTERS))
    return [(_fitting(replace(next(layouts), **next(options))), next(attentions), next(routers)) for _ in range(60)]


def _fitting(degrees: Degrees) -> Degrees:
    """The layout with GPipe where there are too few micro-batches for another schedule."""
    num_micro_batches = degrees.plan(Shape().groups).options.num_micro_batches
    if num_micro_batches >= degrees.pipeline:
        return degrees
    return replace(degrees, schedule="gpipe", virtual_stages=1, stages=None)


@pytest.mark.parametrize("case", item_params(cases(), 10))
def test_stages_compute_the_same(ranks: Pools, case: tuple[Degrees, str, str]) -> None:
    degrees, attention, router = case
    model = staged_model(attention, router)
    records = run_on(ranks, degrees, model, train_of(), Shape(), 3)
    assert_same(records, run(model, train_of(), Degrees(), Shape(), 3), 1e-10)
