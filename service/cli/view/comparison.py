"""Two plans beside each other: on the screen, and as JSON."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from moe.plan import Cluster, Plan
from moe.plan.compare import Comparison, Names, Term, compare, made_for_in_words, sentences
from moe.plan.search.explain import kind_of_time, seconds_of
from service.cli.view.amounts import num_bytes
from service.cli.view.plan import headline, lines, section

CHOSEN = Names("the chosen layout", "the one asked for")


def explained_view(plan: Plan, other: Plan, where: str, cluster: Cluster | None) -> RenderableType:
    """Why the chosen plan, and not the layout that was asked for."""
    found = compare(plan, other)
    return Group(
        *section("chosen", headline(plan, where), is_first=True),
        *section("asked for", headline(other, where)),
        *_tables(found, Names("chosen", "asked")),
        *section("why", lines(_why(plan, other, cluster))),
    )


def explain_json(plan: Plan, other: Plan, cluster: Cluster | None) -> dict[str, Any]:
    """The same for programs."""
    keys = Names("chosen", "against")
    return {"chosen": plan.model_dump(mode="json"), "against": other.model_dump(mode="json"),
            **_amounts(compare(plan, other), keys), "why": list(_why(plan, other, cluster))}  # fmt: skip


def _why(plan: Plan, other: Plan, cluster: Cluster | None) -> tuple[str, ...]:
    return sentences(plan, other, CHOSEN, None if cluster is None else cluster.devices_per_node)


def diff_view(first: Plan, second: Plan, first_name: str, second_name: str) -> RenderableType:
    """Two kept plans."""
    names, found = Names(first_name, second_name), compare(first, second)
    return Group(
        *section("first", headline(first, first_name, of="plan"), is_first=True),
        *section("second", headline(second, second_name, of="plan")),
        *_tables(found, Names("first", "second")),
        *section("made for", lines([made_for_in_words(first, second, names)])),
        *section("why", lines(sentences(first, second, names))),
    )


def diff_json(first: Plan, second: Plan) -> dict[str, Any]:
    """The same for programs."""
    keys, found = Names("first", "second"), compare(first, second)
    return {
        "first": first.model_dump(mode="json"),
        "second": second.model_dump(mode="json"),
        "layout": _differing(found.layout, keys),
        "priced_for": _differing(found.priced_for, keys),
        "made_for": _differing(found.made_for, keys),
        **_amounts(found, keys),
        "why": list(sentences(first, second)),
    }


def _differing(found: Mapping[str, Any], keys: Names) -> dict[str, dict[str, Any]]:
    return {name: {keys.first: both.first, keys.second: both.second} for name, both in found.items()}


def _amounts(found: Comparison, keys: Names) -> dict[str, dict[str, dict[str, float]]]:
    """Each term of time and memory, with their totals; what is hidden is no part of the step."""
    time = {
        kind: term for kind, term in found.time.items() if kind != "module_s" or term.first or term.second
    }
    time |= {"hidden_s": found.hidden, "step_s": found.step}
    memory = {**found.memory, "total": found.total, "limit": found.limit}
    return {
        part: {name: {keys.first: term.first, keys.second: term.second, "difference": term.difference}
               for name, term in terms.items()}
        for part, terms in (("time", time), ("memory", memory))
    }  # fmt: skip


def _tables(found: Comparison, heads: Names) -> tuple[RenderableType, ...]:
    """Layout, time and memory, where there is something to tell."""
    time = {kind_of_time(kind): term for kind, term in found.time.items()}
    return (
        *(section("layout, where it differs", _layout(found, heads)) if found.layout else ()),
        *section("time of a step (predicted)", _terms(
            time, {"total": found.step, "hidden": found.hidden}, heads, seconds_of)),
        *section("memory of the fullest device (predicted)", _terms(
            found.job_memory, {"total": found.needed, "free": found.free, "limit": found.limit}, heads, num_bytes)),
    )  # fmt: skip


def _layout(found: Comparison, heads: Names) -> Table:
    table = _table("", *heads)
    for name, both in found.layout.items():
        table.add_row(name, *("-" if each is None else str(each) for each in (both.first, both.second)))
    return table


def _terms(
    kinds: Mapping[str, Term], sums: Mapping[str, Term], heads: Names, in_words: Callable[[float], str]
) -> Table:
    table = _table("", *heads, "difference")
    for name, term in {**kinds, **sums}.items():
        if term.first or term.second or name in ("total", "limit"):
            sign = "+" if term.difference > 0 else "-"
            difference = f"{sign}{in_words(abs(term.difference))}" if term.difference else "-"
            table.add_row(name, in_words(term.first), in_words(term.second), difference)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column(first, style="dim", no_wrap=True, min_width=17)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
