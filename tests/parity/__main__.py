"""`make parity`: every router under every layout with every option, in float64, as a table in docs/parity.md."""

import platform
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from moe.spec import TrainSpec
from tests.parity.combinations import (
    LAYOUTS,
    NUM_STEPS,
    OPTIONS,
    REFUSED,
    ROUTERS,
    assert_same,
    model_of,
    run_on,
    train_with,
    with_option,
)
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run

TABLE = Path(__file__).parents[2] / "docs/parity.md"
TOLERANCE = 1e-10
STEPS_WITH_ALL = 8
STEPS_WITH_ONE = 3
"""Of trainings with all options, and with one by itself; without any it is the whole trajectory."""

WHERE_IT_ENDS = (
    "Where it ends: Adafactor divides a gradient by its own size, with an `eps` of 1e-30 as published, and so takes a "
    "whole step along one that is zero in exact arithmetic and rounding here: that of queries and keys where every "
    "source (or target) of the batch is one token, since a softmax over one key does not depend on them. Its direction "
    "is then the layout's, and the loss of that batch knows nothing of it, that of later ones does: after six steps "
    "parameters differ by 1e-5. An `optimizer.eps` of 1e-18, which bounds the denominator at 1e-9 as AdamW's does, is "
    "the same to 1e-10 there, too. It is not the default: large models have gradients as small as that which are real.",
)
"""Of promise 1."""


@cache
def reference(router: str, train: TrainSpec, num_steps: int) -> list[dict]:
    return run(model_of(**ROUTERS[router]), train, Degrees(), Shape(), num_steps)


def compare(ranks: Pools, router: str, degrees: Degrees, train: TrainSpec, num_steps: int) -> str:
    """`same`, or what differs."""
    try:
        answer = run_on(ranks, degrees, model_of(**ROUTERS[router]), train, Shape(), num_steps)
        assert_same(answer, reference(router, train, num_steps), TOLERANCE)
    except Exception as error:  # whatever it is, it goes into the table
        print(f"{router}, {degrees}: {error!s:.2000}", file=sys.stderr, flush=True)
        return "**differs**"
    return "same"


def rows(ranks: Pools) -> Iterator[tuple[str, Degrees, dict[str, list[str]]]]:
    """(family, layout, by option the answers of all routers)."""
    num_steps = {"without": NUM_STEPS, "all": STEPS_WITH_ALL}
    for family, layouts in LAYOUTS.items():
        for degrees in layouts:
            answers: dict[str, list[str]] = {}
            for option in OPTIONS:
                chosen, steps = with_option(degrees, option), num_steps.get(option, STEPS_WITH_ONE)
                answers[option] = (
                    [compare(ranks, router, chosen, train_with(option), steps) for router in ROUTERS]
                    if chosen
                    else []
                )
            print(family, degrees, {option: summary(each) for option, each in answers.items()}, flush=True)
            yield family, degrees, answers


def summary(answers: list[str]) -> str:
    if not answers:
        return "–"
    good = answers.count("same")
    return f"{good} same" if good == len(answers) else f"{good} of {len(answers)} same: **differs**"


def page(found: list[tuple[str, Degrees, dict[str, list[str]]]], minutes: float) -> str:
    """The table of the layouts compared so far, in Markdown."""
    num_layouts = sum(len(layouts) for layouts in LAYOUTS.values())
    lines = [
        "# Sharding never changes the math",
        "",
        f"`make parity` wrote this table: {len(found)} of {num_layouts} layouts, torch {torch.__version__}, "
        f"{platform.machine()}, gloo between processes, {minutes:.0f} minutes on two cores. In float64, with dropout, "
        f"dropping, jitter and random second experts on, each of the {len(ROUTERS)} routers below is trained for "
        f"{NUM_STEPS} steps on one process and under each layout, for {STEPS_WITH_ONE} steps with each option by "
        f"itself, and for {STEPS_WITH_ALL} with all of them, by AdamW; the last column is by Adafactor. *Same* means: "
        "every decision of every router identical; every loss, the norm and every gradient (by name, by norm) within "
        f"{TOLERANCE:g} at every step, and every parameter at the end; and what several ranks hold of a gradient equal "
        "on all of them.",
        "",
        f"Routers: {', '.join(ROUTERS)}.",
        "",
        f"| Layout | Ranks | {' | '.join(OPTIONS)} |",
        f"|---|---|{'---|' * len(OPTIONS)}",
    ]
    for family, degrees, answers in found:
        cells = " | ".join(summary(answers[option]) for option in OPTIONS)
        lines.append(f"| {family}: {degrees} | {degrees.workers} | {cells} |")
    lines += [
        "",
        "A dash stands where an option has nothing to act on: rows that never leave a rank are in no chunks.",
        "",
        *WHERE_IT_ENDS,
        "",
        "Refused, with a SpecError that names the place, the value, the rule and the remedy:",
        "",
        *(f"- {degrees}: `{path}`, {why}" for degrees, path, why in REFUSED),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    ranks, began = Pools(), time.monotonic()
    found = []
    for row in rows(ranks):
        found.append(row)
        TABLE.write_text(page(found, (time.monotonic() - began) / 60))
    ranks.close()
    return int("differs" in TABLE.read_text())


if __name__ == "__main__":
    sys.exit(main())
