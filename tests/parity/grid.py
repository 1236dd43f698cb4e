"""The whole grid: every router under every layout with every option, beside one process. Of the translation model, and
of a language model, whose kinds of attention take turns: each meets every router, every layout and every option. And
the language model with adapters at random, under the layouts that split these."""

import sys
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

from moe.spec import LanguageModelSpec, SpecError, TrainSpec
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
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Model, Shape, run

Kind = Literal["translation", "language", "adapters"]

TOLERANCE = 1e-10
STEPS: dict[Kind, dict[str, int]] = {
    "translation": {"without": NUM_STEPS, "all": 8, "one": 3},
    "language": {"without": 10, "all": 5, "one": 2},
    "adapters": {"without": 6, "all": 4, "one": 3},  # A has no gradient in the first, where B is zero
}
"""Of trainings without any option, with all, and with one by itself."""
OF_ADAPTERS = ("expert x FSDP", "expert x tensor", "folded, three at a time")
"""Layouts of models with adapters."""
TARGETS: tuple[list[str] | None, ...] = (
    None, ["*"], ["*.attention.*"], ["*.experts.*"], ["*.experts.w_out", "*.attention.o*"],
    ["layers.1.*"], ["*.router", "*.attention.*"],
)  # fmt: skip

_EVERY: list[tuple[Kind, str, Degrees]] = [
    (kind, family, degrees)
    for kind in STEPS
    for family, layouts in LAYOUTS.items()
    if kind != "adapters" or family in OF_ADAPTERS
    for degrees in layouts
]
NAMES = tuple(f"{kind}, {family}: {degrees}" for kind, family, degrees in _EVERY)
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


def model_of_row(at: int, option: str, router: str) -> tuple[str, Model]:
    """(what it is called, the model) that a router is trained in, in row `at` with an option."""
    if _EVERY[at][0] == "translation":
        return router, model_of(**ROUTERS[router])
    turn = at + OPTIONS.index(option) + list(ROUTERS).index(router)
    attention = list(ATTENTIONS)[turn % len(ATTENTIONS)]
    model = language_model(attention, **ROUTERS[router])
    if _EVERY[at][0] == "adapters":
        model = adapted(model, Random(f"{at} {option} {router}"))
    return f"{attention}, {router}", model


def adapted(model: LanguageModelSpec, random: Random) -> LanguageModelSpec:
    """The model with an adapter of random rank, scale, dropout and targets that it can have."""
    while True:
        adapter: dict[str, Any] = {
            "rank": random.randint(1, 4), "alpha": random.choice([None, 0.7, 5.0]),
            "rank_stabilized": random.random() < 0.3, "dropout": random.choice([0.0, 0.2]),
            "targets": random.choice(TARGETS),
        }  # fmt: skip
        try:
            return LanguageModelSpec(**{**model.model_dump(), "adapter": adapter})
        except SpecError:  # a router's, whose bias follows the loads
            continue


def row_of(ranks: Pools, at: int) -> Row:
    """Row `at`, counted from 0: every router with every option under its layout, on ranks and on one process."""
    kind, _, degrees = _EVERY[at]
    num_same, digests = {}, {}
    for option in OPTIONS:
        chosen, train = with_option(degrees, option), train_with(option)
        if chosen is None:
            continue
        num_same[option] = 0
        steps = STEPS[kind].get(option, STEPS[kind]["one"])
        for router in ROUTERS:
            called, model = model_of_row(at, option, router)
            trajectory = f"{called}, under {NAMES[at]}, {option}"
            digests[trajectory] = {}
            try:
                records = run_on(ranks, chosen, model, train, Shape(), steps)
                digests[trajectory] = digests_of(records)
                assert_same(records, _reference(model, train, steps), TOLERANCE)
                num_same[option] += 1
            except Exception as error:  # whatever it is, it goes into the table
                print(f"{trajectory}: {error!s:.2000}", file=sys.stderr, flush=True)
    return Row(NAMES[at], degrees.workers, num_same, digests)


@cache
def _reference(model: Model, train: TrainSpec, num_steps: int) -> list[dict]:
    return run(model, train, Degrees(), Shape(), num_steps)
