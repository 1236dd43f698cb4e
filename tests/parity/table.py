"""The table of docs/parity.md."""

import platform

import torch

from tests.parity.combinations import NUM_STEPS, OPTIONS, REFUSED, ROUTERS
from tests.parity.findings import Findings
from tests.parity.grid import NAMES, STEPS_WITH_ALL, STEPS_WITH_ONE, TOLERANCE, Row

WHERE_IT_ENDS = (
    "Where it ends: Adafactor divides a gradient by its own size, with an `eps` of 1e-30 as published, and so takes a "
    "whole step along one that is zero in exact arithmetic and rounding here: that of queries and keys where every "
    "source (or target) of the batch is one token, since a softmax over one key does not depend on them. Its direction "
    "is then the layout's, and the loss of that batch knows nothing of it, that of later ones does: after six steps "
    "parameters differ by 1e-5. An `optimizer.eps` of 1e-18, which bounds the denominator at 1e-9 as AdamW's does, is "
    "the same to 1e-10 there, too. It is not the default: large models have gradients as small as that which are real."
)
"""Of promise 1."""


def page(found: Findings) -> str:
    """The table in Markdown."""
    lines = [
        "# Sharding never changes the math",
        "",
        f"`make parity` wrote this table: {len(found.rows)} of {len(NAMES)} layouts, torch {torch.__version__}, "
        f"{platform.machine()}, gloo between processes, {found.minutes:.0f} minutes on two cores. In float64, with "
        f"dropout, dropping, jitter and random second experts on, each of the {len(ROUTERS)} routers below is trained "
        f"for {NUM_STEPS} steps on one process and under each layout, for {STEPS_WITH_ONE} steps with each option by "
        f"itself, and for {STEPS_WITH_ALL} with all of them, by AdamW; the last column is by Adafactor. *Same* means: "
        "every decision of every router identical; every loss, the norm and every gradient (by name, by norm) within "
        f"{TOLERANCE:g} at every step, and every parameter at the end; and what several ranks hold of a gradient equal "
        "on all of them.",
        "",
        f"Routers: {', '.join(ROUTERS)}.",
        "",
        f"| Layout | Ranks | {' | '.join(OPTIONS)} |",
        f"|---|---|{'---|' * len(OPTIONS)}",
        *(_line(row) for row in found.rows),
        "",
        "A dash stands where an option has nothing to act on: rows that never leave a rank are in no chunks.",
        "",
        WHERE_IT_ENDS,
        "",
        "Refused, with a SpecError that names the place, the value, the rule and the remedy:",
        "",
        *(f"- {degrees}: `{path}`, {why}" for degrees, path, why in REFUSED),
        "",
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    cells = (_cell(row.num_same.get(option)) for option in OPTIONS)
    return f"| {row.name} | {row.num_ranks} | {' | '.join(cells)} |"


def _cell(num_same: int | None) -> str:
    if num_same is None:
        return "–"
    if num_same == len(ROUTERS):
        return f"{num_same} same"
    return f"{num_same} of {len(ROUTERS)} same: **differs**"
