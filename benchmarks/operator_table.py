"""Table of operators with a rule: `python -m benchmarks.operator_table docs/sharding.md` updates it there."""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from moe.sharding import torch_private
from moe.sharding.decompositions.decomposed import decompositions
from moe.sharding.rules import pointwise, random, registry

MARKS = "<!-- operators: written by benchmarks.operator_table -->", "<!-- end of operators -->"


def table() -> str:
    """Families of operators and their rules, as a Markdown table."""
    lines = ["| Family | Operators |", "|---|---|"]
    for family in registry.FAMILIES:
        have = [target for target, maker in family.RULES.items() if maker is not random.refuse]
        lines.append(f"| {_says(family)} | {_names(have)} |")
    overloads = [overload for overload in _overloads() if torch.Tag.pointwise in overload.tags]
    untagged_names = _names(pointwise.UNTAGGED)
    lines.append(
        f"| {_says(pointwise)} | the {len(_packets(overloads))} that torch tags `pointwise`, and {untagged_names} |"
    )
    refused_targets = [target for target, maker in random.RULES.items() if maker is random.refuse]
    lines.append(f"| Refused: random numbers that would depend on the layout. | {_names(refused_targets)} |")
    lines.append(f"| Decomposed into simpler operators while a module is captured. | {_names(decompositions())} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """A document with the table between its marks."""
    begin, end = map(re.escape, MARKS)
    document, count = re.subn(f"(?<={begin}\n).*?(?={end})", lambda _: f"\n{table()}\n\n", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"must hold {MARKS[0]} and {MARKS[1]} once")
    return document


def _says(family: ModuleType) -> str:
    """Description of a family from its module docstring, without sources."""
    return re.sub(r" \([^()]*arXiv[^()]*\)", "", " ".join((family.__doc__ or "").split()))


def _packets(targets: Iterable[Any]) -> list[str]:
    """Names of operators, each once for all its overloads."""
    names = {
        f"{target._schema.name.removeprefix('aten::')}"
        for target in targets
        if isinstance(target, torch_private.OpOverload)
    }
    return sorted(names, key=lambda name: (name.lstrip("_"), name))


def _names(targets: Mapping[Any, Any] | Iterable[Any]) -> str:
    return ", ".join(f"`{name}`" for name in _packets(targets))


def _overloads() -> Iterable[torch_private.OpOverload]:
    """torch's functional operators that a captured graph may have."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            operator = getattr(packet, overload)
            if not operator._schema.is_mutable:
                yield operator


def main() -> None:
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))


if __name__ == "__main__":
    main()
