"""The tables of docs/parity.md."""

import platform
from collections.abc import Iterator

import torch

from tests.parity.combinations import OPTIONS, REFUSED, ROUTERS
from tests.parity.findings import Findings
from tests.parity.grid import NAMES, STEPS, TOLERANCE, Kind, Row
from tests.parity.language_models import ATTENTIONS

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
    """The tables in Markdown."""
    return "\n".join(
        [
            "# Sharding never changes the math",
            "",
            f"`make parity` wrote these tables: {len(found.rows)} of {len(NAMES)} rows, torch {torch.__version__}, "
            f"{platform.machine()}, gloo between processes, {found.minutes:.0f} minutes on two cores. In float64, with "
            f"dropout, dropping, jitter and random second experts on, each of the {len(ROUTERS)} routers below is "
            "trained on one process and under each layout, by AdamW; the last column is by Adafactor. *Same* means: "
            "every decision of every router identical; every loss, the norm and every gradient (by name, by norm) "
            f"within {TOLERANCE:g} at every step, and every parameter, second moment and router's bias at the end; and "
            "what several ranks hold of a gradient equal on all of them.",
            "",
            f"Routers: {'; '.join(ROUTERS)}.",
            "",
            "A dash stands where an option has nothing to act on: rows that never leave a rank are in no chunks.",
            "",
            *_table("translation", "An encoder and a decoder: the translation model", found),
            *_table("language", "A decoder of packed documents: the language model", found),
            *_table(
                "adapters",
                "Adapters of the language model, of random rank, scale, dropout and targets",
                found,
            ),
            "Attention takes turns from cell to cell and from router to router, so that each kind meets every router, "
            f"every layout and every option: {'; '.join(ATTENTIONS)}.",
            "",
            WHERE_IT_ENDS,
            "",
            "Refused, with a SpecError that names the place, the value, the rule and the remedy:",
            "",
            *(f"- {degrees}: `{path}`, {why}" for degrees, path, why in REFUSED),
            "",
        ]
    )


def _table(kind: Kind, title: str, found: Findings) -> Iterator[str]:
    steps = STEPS[kind]
    yield from (f"## {title}", "")
    yield (
        f"{steps['without']} steps without any option, {steps['one']} with each by itself, {steps['all']} with all of "
        "them."
    )
    yield from ("", f"| Layout | Ranks | {' | '.join(OPTIONS)} |", f"|---|---|{'---|' * len(OPTIONS)}")
    yield from (_line(row, kind) for row in found.rows if row.name.startswith(f"{kind}, "))
    yield ""


def _line(row: Row, kind: Kind) -> str:
    cells = (_cell(row.num_same.get(option)) for option in OPTIONS)
    return f"| {row.name.removeprefix(f'{kind}, ')} | {row.num_ranks} | {' | '.join(cells)} |"


def _cell(num_same: int | None) -> str:
    if num_same is None:
        return "–"
    if num_same == len(ROUTERS):
        return f"{num_same} same"
    return f"{num_same} of {len(ROUTERS)} same: **differs**"
