"""The table of operators with a rule: `python -m moe.sharding.rules.table docs/sharding.md` writes it there anew."""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from moe.sharding import torch_private
from moe.sharding.capture.decomposed import decompositions
from moe.sharding.rules import pointwise, random, registry

MARKS = "<!-- operators: written by moe.sharding.rules.table -->", "<!-- end of operators -->"


def table() -> str:
    """Families of operators, with what may be split of them, in Markdown."""
    lines = ["| Family | Operators |", "|---|---|"]
    for family in _families():
        have = [target for target, maker in family.RULES.items() if maker is not random.refused]
        lines.append(f"| {_says(family)} | {_names(have)} |")
    tagged = [each for each in _overloads() if torch.Tag.pointwise in each.tags]
    others = _names(pointwise.UNTAGGED)
    lines.append(
        f"| {_says(pointwise)} | the {len(_packets(tagged))} that torch tags `pointwise`, and {others} |"
    )
    refused = [target for target, maker in random.RULES.items() if maker is random.refused]
    lines.append(f"| Refused: random numbers that would be others on each layout. | {_names(refused)} |")
    lines.append(f"| Written with simpler ones while a module is captured. | {_names(decompositions())} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """A document with the table between its marks."""
    begin, end = map(re.escape, MARKS)
    found, count = re.subn(f"(?<={begin}\n).*?(?={end})", lambda _: f"\n{table()}\n\n", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"must hold {MARKS[0]} and {MARKS[1]} once")
    return found


def _families() -> Iterable[ModuleType]:
    """Files of rules, in the order of their names."""
    named = vars(registry)
    found = {each for each in named.values() if isinstance(each, ModuleType) and hasattr(each, "RULES")}
    return sorted(found, key=lambda each: each.__name__)


def _says(family: ModuleType) -> str:
    """What its file says of itself, without sources."""
    return re.sub(r" \([^()]*arXiv[^()]*\)", "", " ".join((family.__doc__ or "").split()))


def _packets(targets: Iterable[Any]) -> list[str]:
    """Names of operators, each once whatever overloads it has."""
    names = {
        f"{each._schema.name.removeprefix('aten::')}"
        for each in targets
        if isinstance(each, torch_private.OpOverload)
    }
    return sorted(names, key=lambda name: (name.lstrip("_"), name))


def _names(targets: Mapping[Any, Any] | Iterable[Any]) -> str:
    return ", ".join(f"`{each}`" for each in _packets(targets))


def _overloads() -> Iterable[torch_private.OpOverload]:
    """Of torch's own functional operators, those that a captured graph may have."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            found = getattr(packet, overload)
            if not found._schema.is_mutable:
                yield found


def main() -> None:
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))


if __name__ == "__main__":
    main()
