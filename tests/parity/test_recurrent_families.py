"""Families with recurrent layers train alike where context ranks have parts of the rows."""

import pytest

from tests.grid import each_once
from tests.parity.combinations import assert_same, run_on, train_with, with_option
from tests.parity.family_models import family_model
from tests.parity.gloo_ranks import Pools
from tests.parity.row import TOLERANCE
from tests.parity.trajectory import Degrees, Shape, run

FAMILIES = ("granitemoehybrid", "lfm2_moe", "nemotron_h", "qwen3_5_moe", "qwen3_next")
LAYOUTS = (
    Degrees(data=2, context=2), Degrees(data=4, context=4), Degrees(data=4, context=2, tensor=2),
    Degrees(expert=2, context=2), Degrees(expert=2, data=2, context=2, tensor=2),
)  # fmt: skip
NUM_STEPS = 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [Shape(), Shape(source=2, target=1)], ids=["12 positions", "3 positions"])
@pytest.mark.parametrize("option", ["without", "all"])
@pytest.mark.parametrize("case", each_once(FAMILIES, LAYOUTS))
def test_recurrent_layers_train_alike_over_context_ranks(
    ranks: Pools, case: tuple[str, Degrees], option: str, shape: Shape
) -> None:
    family, degrees = case
    option_degrees = with_option(degrees, option)
    assert option_degrees is not None
    model, train = family_model(family, degrees), train_with(option)
    records = run_on(ranks, option_degrees, model, train, shape, NUM_STEPS)
    assert_same(records, run(model, train, Degrees(), shape, NUM_STEPS), TOLERANCE)
