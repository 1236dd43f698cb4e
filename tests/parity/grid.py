"""The whole grid: every router under every layout with every option, beside one process."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from moe.spec import TrainSpec
from tests.parity.combinations import (
    LAYOUTS,
    NUM_STEPS,
    OPTIONS,
    ROUTERS,
    assert_same,
    model_of,
    run_on,
    train_with,
    with_option,
)
from tests.parity.digests import digests_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run

TOLERANCE = 1e-10
STEPS_WITH_ALL = 8
STEPS_WITH_ONE = 3
"""Of trainings with all options, and with one by itself; without any it is the whole trajectory."""

NAMES = tuple(f"{family}: {degrees}" for family, layouts in LAYOUTS.items() for degrees in layouts)
"""Of the rows, in their order."""


@dataclass(frozen=True)
class Row:
    """What was found under one layout."""

    name: str
    num_ranks: int
    num_same: dict[str, int]
    """By option, how many routers do the same as on one process. Without those that have nothing to act on."""
    digests: dict[str, dict[str, str]]
    """By trajectory, those of what it recorded; without any where it did not end."""


def rows(ranks: Pools, number: int = 1, num_parts: int = 1) -> Iterator[Row]:
    """Those of one part: every `num_parts`-th row, from the `number`-th on."""
    layouts = [degrees for each in LAYOUTS.values() for degrees in each]
    for name, degrees in list(zip(NAMES, layouts, strict=True))[number - 1 :: num_parts]:
        row = _row(ranks, name, degrees)
        print(name, row.num_same, flush=True)
        yield row


def _row(ranks: Pools, name: str, degrees: Degrees) -> Row:
    num_steps = {"without": NUM_STEPS, "all": STEPS_WITH_ALL}
    num_same, digests = {}, {}
    for option in OPTIONS:
        chosen, train = with_option(degrees, option), train_with(option)
        if chosen is None:
            continue
        num_same[option] = 0
        for router in ROUTERS:
            trajectory = f"{router}, under {name}, {option}"
            digests[trajectory] = {}
            try:
                steps = num_steps.get(option, STEPS_WITH_ONE)
                records = run_on(ranks, chosen, model_of(**ROUTERS[router]), train, Shape(), steps)
                digests[trajectory] = digests_of(records)
                assert_same(records, _reference(router, train, steps), TOLERANCE)
                num_same[option] += 1
            except Exception as error:  # whatever it is, it goes into the table
                print(f"{trajectory}: {error!s:.2000}", file=sys.stderr, flush=True)
    return Row(name, degrees.workers, num_same, digests)


@cache
def _reference(router: str, train: TrainSpec, num_steps: int) -> list[dict]:
    return run(model_of(**ROUTERS[router]), train, Degrees(), Shape(), num_steps)
