"""Every family that can be loaded is trained alike under a layout of its own; `make parity` tries every family under
every layout."""

import pytest

from tests.language.families import FAMILIES
from tests.parity.combinations import LAYOUTS, assert_same, run_on, train_with, with_option
from tests.parity.family_models import family_model
from tests.parity.gloo_ranks import Pools
from tests.parity.row import TOLERANCE
from tests.parity.trajectory import Degrees, Shape, run

ON_RANKS = [degrees for layouts in LAYOUTS.values() for degrees in layouts if degrees.workers > 1]
NUM_STEPS = 2


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=list(FAMILIES))
def test_a_family_trains_alike_under_a_layout(ranks: Pools, number: int) -> None:
    family, degrees = list(FAMILIES)[number], ON_RANKS[number % len(ON_RANKS)]
    option = ("without", "all")[number % 2]
    option_degrees = with_option(degrees, option)
    assert option_degrees is not None
    model, train = family_model(family, degrees), train_with(option)
    records = run_on(ranks, option_degrees, model, train, Shape(), NUM_STEPS)
    assert_same(records, run(model, train, Degrees(), Shape(), NUM_STEPS), TOLERANCE)
