"""The tables of docs/parity.md and docs/parity-of-families.md."""

import platform
from collections.abc import Iterable, Iterator, Sequence

import torch

from tests.parity.combinations import LAYOUTS, OPTIONS, REFUSED, ROUTERS
from tests.parity.findings import Findings
from tests.parity.grid import FAMILY_ROWS, ROUTER_ROWS, STEPS, Kind
from tests.parity.language_models import ATTENTIONS
from tests.parity.row import TOLERANCE, Row

WHERE_IT_ENDS = (
    "Where the guarantee ends: Adafactor divides a gradient by its own size, with an `eps` of 1e-30 as published. So "
    "it takes a full step along a gradient that is zero in exact arithmetic and a rounding error here. Such is the "
    "gradient of queries and keys if every source (or target) of the batch is one token, since a softmax over one key "
    "does not depend on them. The direction of that step depends on the layout. It does not affect the loss of that "
    "batch, but that of later ones: after six steps parameters differ by 1e-5. With an `optimizer.eps` of 1e-18, which "
    "bounds the denominator at 1e-9 as in AdamW, results are the same to 1e-10 there, too. It is not the default: "
    "large models have real gradients as small as that."
)
"""Of promise 1."""


def page_of_routers(findings: Findings) -> str:
    """Tables of every router under every layout with every option, in Markdown."""
    return "\n".join(
        [
            "# Sharding never changes the math",
            "",
            f"These tables are written by `make parity`: {_conditions(findings, ROUTER_ROWS)} Training is in float64, "
            "with dropout, token drops, jitter and random second experts on. Each of the "
            f"{len(ROUTERS)} routers below is trained on one process and under each layout, with AdamW; the last "
            "column is with Adafactor. *Same* means: every decision of every router is identical; every loss, the "
            f"gradient norm and every gradient (by name, by norm) are within {TOLERANCE:g} at every step; so is every "
            "parameter, second moment and router's bias at the end; and ranks that hold the same gradient have equal "
            "values.",
            "",
            f"Routers: {'; '.join(ROUTERS)}.",
            "",
            "A dash means that the option does not apply: rows that never leave a rank are not exchanged in chunks.",
            "",
            *_table("translation", "An encoder and a decoder: the translation model", findings),
            *_table("language", "A decoder of packed documents: the language model", findings),
            *_table("adapters", "Adapters of the language model, of random rank, scale, dropout and targets", findings),
            "The kind of attention changes from cell to cell and from router to router, so that each kind is tested "
            f"with every router, every layout and every option: {'; '.join(ATTENTIONS)}.",
            "",
            WHERE_IT_ENDS,
            "",
            "Refused, with a SpecError that names the place, the value, the rule and the remedy:",
            "",
            *(f"- {degrees}: `{path}`, {why}" for degrees, path, why in REFUSED),
            "",
        ]
    )


def page_of_families(findings: Findings) -> str:
    """A table of every family under every layout, in Markdown."""
    steps = STEPS["families"]
    return "\n".join(
        [
            "# Every family under every layout",
            "",
            f"This table is written by `make parity`: {_conditions(findings, FAMILY_ROWS)} Each family that can be "
            "loaded is trained under each layout, with a random small model of sizes that the layout divides, in "
            "float64, and compared with one process as on [the page of routers](parity.md): routing, losses, "
            f"gradients, parameters and moments within {TOLERANCE:g}, over {steps['without']} steps. Trainings without "
            "options, and with full recomputation, accumulation, exchange in chunks and a bound on skew at once, take "
            "turns from cell to cell.",
            "",
            *(f"- {kind}: {'; '.join(f'`{degrees}`' for degrees in layouts)}" for kind, layouts in LAYOUTS.items()),
            "",
            f"| Family | {' | '.join(LAYOUTS)} |",
            f"|---|{'---|' * len(LAYOUTS)}",
            *(_line(row, "families", LAYOUTS) for row in findings.rows if row.name in FAMILY_ROWS),
            "",
        ]
    )


def _conditions(findings: Findings, names: Sequence[str]) -> str:
    """How many of the named rows there are, and where they were measured."""
    return (
        f"{len(names) - len(findings.missing(names))} of {len(names)} rows, torch {torch.__version__}, "
        f"{platform.machine()}, gloo between processes, {findings.minutes:.0f} minutes on two cores."
    )


def _table(kind: Kind, title: str, findings: Findings) -> Iterator[str]:
    steps = STEPS[kind]
    yield from (f"## {title}", "")
    yield (
        f"{steps['without']} steps without options, {steps['one']} with each option alone, {steps['all']} with all of "
        "them."
    )
    yield from ("", f"| Layout | Ranks | {' | '.join(OPTIONS)} |", f"|---|---|{'---|' * len(OPTIONS)}")
    yield from (_line(row, kind, OPTIONS, row.num_ranks) for row in findings.rows if row.name.startswith(f"{kind}, "))
    yield ""


def _line(row: Row, kind: Kind, columns: Iterable[str], *values: object) -> str:
    results = (_cell(row.num_same.get(column), row.num_trainings.get(column)) for column in columns)
    return f"| {' | '.join(map(str, (row.name.removeprefix(f'{kind}, '), *values, *results)))} |"


def _cell(num_same: int | None, num_trainings: int | None) -> str:
    if num_same is None:
        return "–"
    if num_same == num_trainings:
        return f"{num_same} same"
    return f"{num_same} of {num_trainings} same: **differs**"
