"""The pages docs/parity.md and docs/parity-of-families.md, written from the records of their rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tests.parity.combinations import LAYOUTS, OPTIONS, REFUSED, ROUTERS, schedules_of
from tests.parity.grid import FAMILY_ROWS, ROUTER_ROWS, STEPS, Kind, num_trainings_of
from tests.parity.language_models import ATTENTIONS
from tests.parity.records import Record
from tests.parity.row import TOLERANCE
from tests.parity.trajectory import Degrees

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


SCHEDULES = ", ".join(
    str(schedule) for num_stages in (1, 2) for schedule in schedules_of(Degrees(pipeline=2, virtual_stages=num_stages))
)


def page_of_routers(records: Mapping[str, Record]) -> str:
    """Tables of every router under every layout with every option, in Markdown."""
    return "\n".join(
        [
            "# Sharding never changes the math",
            "",
            f"`make parity` writes these tables: {_conditions(records, ROUTER_ROWS)} Training is in float64, "
            "with dropout, token drops, jitter and random second experts on. Each of the "
            f"{len(ROUTERS)} routers below is trained on one process and under each layout, with AdamW; the last "
            "columns are with Adafactor and Muon. *Same* means: every decision of every router is identical; every "
            f"loss, the gradient norm and every gradient (by name, by norm) are within {TOLERANCE:g} at every step; so "
            "is every parameter, second moment and router's bias at the end; and ranks that hold the same gradient "
            "have equal values.",
            "",
            f"Routers: {'; '.join(ROUTERS)}.",
            "",
            "Pipeline schedules take turns from router to router and from cell to cell, so that each is trained under "
            f"each layout with stages, with every option: {SCHEDULES} (the last two with two virtual stages on a "
            "rank). So do the exchanges between context ranks where there are stages too: gather, ring, heads.",
            "",
            f"{_ROWS_IN_SEVERAL_GOES} "
            "A dash means that the option does not apply: rows that never leave a rank are not exchanged in chunks.",
            "",
            *_table("translation", "An encoder and a decoder: the translation model", records),
            *_table("language", "A decoder of packed documents: the language model", records),
            *_table("adapters", "Adapters of the language model, of random rank, scale, dropout and targets", records),
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


def page_of_families(records: Mapping[str, Record]) -> str:
    """A table of every family under every layout, in Markdown."""
    steps = STEPS["families"]
    return "\n".join(
        [
            "# Every family under every layout",
            "",
            f"`make parity` writes this table: {_conditions(records, FAMILY_ROWS)} Each family that can be "
            "loaded is trained under each layout, with a random small model of sizes that the layout divides, in "
            "float64, and compared with one process as on [the page of routers](parity.md): routing, losses, "
            f"gradients, parameters and moments within {TOLERANCE:g}, over {steps['without']} steps. Trainings without "
            "options, and with full recomputation, accumulation, exchange in chunks and a bound on skew at once, take "
            "turns from cell to cell. So do pipeline schedules, and the exchanges between context ranks where there "
            "are stages too.",
            "",
            _ROWS_IN_SEVERAL_GOES,
            "",
            *(
                f"- {kind}: {'; '.join(f'`{replace(degrees, schedule=None)}`' for degrees in layouts)}"
                for kind, layouts in LAYOUTS.items()
            ),
            "",
            f"| Family | {' | '.join(LAYOUTS)} | Commit |",
            f"|---|{'---|' * len(LAYOUTS)}---|",
            *(
                _line(name, name.removeprefix("families, "), records[name], LAYOUTS)
                for name in FAMILY_ROWS
                if name in records
            ),
            "",
        ]
    )


_ROWS_IN_SEVERAL_GOES = (
    "Rows are run in several goes, each at the commit in its last column, with the routers, options and steps of that "
    "commit: *not run* means that it had fewer."
)


def _conditions(records: Mapping[str, Record], names: Sequence[str]) -> str:
    """How many of the named rows there are, and where they were measured."""
    rows = [records[name] for name in names if name in records]
    versions, machines = (sorted({getattr(row, field) for row in rows}) for field in ("torch", "machine"))
    return (
        f"{len(rows)} of {len(names)} rows, torch {', '.join(versions)}, {', '.join(machines)}, gloo between "
        f"processes, {sum(row.minutes for row in rows) / 60:.1f} hours of one or two cores."
    )


def _table(kind: Kind, title: str, records: Mapping[str, Record]) -> Iterator[str]:
    steps, names = STEPS[kind], [name for name in ROUTER_ROWS if name.startswith(f"{kind}, ")]
    yield from (f"## {title}", "")
    yield (
        f"{steps['without']} steps without options, {steps['one']} with each option alone, {steps['all']} with all of "
        "them."
    )
    yield from ("", f"| Layout | Ranks | {' | '.join(OPTIONS)} | Commit |", f"|---|---|{'---|' * len(OPTIONS)}---|")
    for name in names:
        if name in records:
            yield _line(name, f"{name.removeprefix(f'{kind}, ')} | {records[name].num_ranks}", records[name], OPTIONS)
    missing_names = [name.removeprefix(f"{kind}, ") for name in names if name not in records]
    yield ""
    if missing_names:
        yield from (f"Not run so far: {'; '.join(missing_names)}.", "")


def _line(name: str, title: str, record: Record, columns: Iterable[str]) -> str:
    num_trainings = num_trainings_of(name)
    results = (_cell(column, record) if column in num_trainings else "–" for column in columns)
    return f"| {title} | {' | '.join(results)} | {record.commit[:8]} |"


def _cell(column: str, record: Record) -> str:
    if column not in record.num_trainings:
        return "not run"
    num_same, num_trainings = record.num_same[column], record.num_trainings[column]
    return f"{num_same} same" if num_same == num_trainings else f"{num_same} of {num_trainings} same: **differs**"
