"""Two plans side by side: on the terminal, and as JSON."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from moe.plan import Cluster, Plan
from moe.plan.compare import Comparison, CostTerm, Names, compare, describe_inputs, sentences
from moe.plan.quantities import format_seconds, time_kind_name
from service.cli.view.amounts import num_bytes
from service.cli.view.plan import headline, lines, section

CHOSEN = Names("the chosen layout", "the requested one")


def explained_view(plan: Plan, alternative: Plan, location: str, cluster: Cluster | None) -> RenderableType:
    """Why the chosen plan was preferred to the requested layout."""
    comparison = compare(plan, alternative)
    return Group(
        *section("chosen", headline(plan, location), is_first=True),
        *section("requested", headline(alternative, location)),
        *_tables(comparison, Names("chosen", "asked")),
        *section("why", lines(_reasons(plan, alternative, cluster))),
    )


def explain_json(plan: Plan, alternative: Plan, cluster: Cluster | None) -> dict[str, Any]:
    """The same as JSON."""
    keys = Names("chosen", "against")
    return {"chosen": plan.model_dump(mode="json"), "against": alternative.model_dump(mode="json"),
            **_amounts(compare(plan, alternative), keys),
            "why": list(_reasons(plan, alternative, cluster))}  # fmt: skip


def _reasons(plan: Plan, alternative: Plan, cluster: Cluster | None) -> tuple[str, ...]:
    return sentences(plan, alternative, CHOSEN, None if cluster is None else cluster.devices_per_node)


def diff_view(first: Plan, second: Plan, first_name: str, second_name: str) -> RenderableType:
    """Comparison of two saved plans."""
    names, comparison = Names(first_name, second_name), compare(first, second)
    return Group(
        *section("first", headline(first, first_name, label="plan"), is_first=True),
        *section("second", headline(second, second_name, label="plan")),
        *_tables(comparison, Names("first", "second")),
        *section("made for", lines([describe_inputs(first, second, names)])),
        *section("why", lines(sentences(first, second, names))),
    )


def diff_json(first: Plan, second: Plan) -> dict[str, Any]:
    """The same as JSON."""
    keys, comparison = Names("first", "second"), compare(first, second)
    return {
        "first": first.model_dump(mode="json"),
        "second": second.model_dump(mode="json"),
        "layout": _differing(comparison.layout, keys),
        "priced_for": _differing(comparison.priced_for, keys),
        "made_for": _differing(comparison.made_for, keys),
        **_amounts(comparison, keys),
        "why": list(sentences(first, second)),
    }


def _differing(differences: Mapping[str, Any], keys: Names) -> dict[str, dict[str, Any]]:
    return {name: {keys.first: pair.first, keys.second: pair.second} for name, pair in differences.items()}


def _amounts(comparison: Comparison, keys: Names) -> dict[str, dict[str, dict[str, float]]]:
    """Terms of time and memory, with totals. Hidden seconds are not part of the step."""
    time = {kind: term for kind, term in comparison.time.items() if kind != "module_s" or term.first or term.second}
    time |= {"hidden_s": comparison.hidden, "step_s": comparison.step}
    memory = {**comparison.memory, "total": comparison.total, "limit": comparison.limit}
    return {
        part: {name: {keys.first: term.first, keys.second: term.second, "difference": term.difference}
               for name, term in terms.items()}
        for part, terms in (("time", time), ("memory", memory))
    }  # fmt: skip


def _tables(comparison: Comparison, heads: Names) -> tuple[RenderableType, ...]:
    time = {time_kind_name(kind): term for kind, term in comparison.time.items()}
    return (
        *(section("differences in layout", _layout(comparison, heads)) if comparison.layout else ()),
        *section("time of a step (predicted)", _terms(
            time, {"total": comparison.step, "hidden": comparison.hidden}, heads, format_seconds)),
        *section("memory of the fullest device (predicted)", _terms(
            comparison.job_memory,
            {"total": comparison.job_bytes, "free": comparison.free, "limit": comparison.limit}, heads, num_bytes)),
    )  # fmt: skip


def _layout(comparison: Comparison, heads: Names) -> Table:
    table = _table("", *heads)
    for name, pair in comparison.layout.items():
        table.add_row(name, *("-" if value is None else str(value) for value in (pair.first, pair.second)))
    return table


def _terms(
    kinds: Mapping[str, CostTerm], sums: Mapping[str, CostTerm], heads: Names, in_words: Callable[[float], str]
) -> Table:
    table = _table("", *heads, "difference")
    for name, term in {**kinds, **sums}.items():
        if term.first or term.second or name in ("total", "limit"):
            sign = "+" if term.difference > 0 else "-"
            difference = f"{sign}{in_words(abs(term.difference))}" if term.difference else "-"
            table.add_row(name, in_words(term.first), in_words(term.second), difference)
    return table


def _table(first: str, *headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column(first, style="dim", no_wrap=True, min_width=17)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
