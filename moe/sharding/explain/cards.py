"""Cards of a picture: the modules of a plan in the order of use, repeated modules as one card, each with its parameters
and its exchanges. No torch."""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe.sharding.explain.explain import Plan, part_bytes
from moe.sharding.explain.name_patterns import Fold, fold_names
from moe.sharding.plan_records import Collective, StoredTensor

OUTSIDE = "the module itself"
"""Title of the card for exchanges outside of all other cards' modules."""


@dataclass(frozen=True)
class CardParameter:
    """A parameter of a card's modules."""

    name: str
    """Name within the module. It is the owner's name if a `weight` is the owner's only parameter."""
    shape: tuple[int, ...]
    placements: str
    num_bytes: int
    """Bytes on one rank, over all modules of the card."""


@dataclass(frozen=True)
class Arrow:
    """Collectives of one kind along one axis in one pass, over all modules of the card."""

    phase: str
    kind: str
    axis: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Card:
    """Identical modules with the same placements."""

    title: str
    count: int
    parameters: tuple[CardParameter, ...]
    num_buffers: int
    buffer_bytes: int
    arrows: tuple[Arrow, ...]
    """Exchanges, those with most bytes first."""


def cards_of(plan: Plan) -> list[Card]:
    """Cards in the order of use; the card of exchanges that belong to no module is the last."""
    names = [entry.name for entry in plan.stored]
    prefix = _common(names)
    opened_modules = _open_modules(names, prefix)
    block_names = {name: _block(name.split("."), prefix, opened_modules) for name in names}
    stored_by_block: dict[str, list[StoredTensor]] = defaultdict(list)
    for entry in plan.stored:
        stored_by_block[block_names[entry.name]].append(entry)
    facts: dict[str, Hashable] = {
        block: tuple(
            (_relative_name(entry.name, block), tuple(entry.shape), entry.dtype, plan.parameters[entry.name])
            for entry in entries
        )
        for block, entries in stored_by_block.items()
    }
    exchanges_by_block: dict[str, list[Collective]] = defaultdict(list)
    for collective in plan.collectives:
        exchanges_by_block[_block_of(collective, block_names, stored_by_block)].append(collective)
    cards = []
    prefix_path = "".join(f"{step}." for step in prefix)
    for fold in fold_names(facts):
        cards.append(
            _card(
                plan,
                fold,
                stored_by_block[fold.names[0]],
                prefix_path,
                [collective for name in fold.names for collective in exchanges_by_block[name]],
            )
        )
    if OUTSIDE in exchanges_by_block:
        cards.append(Card(OUTSIDE, 1, (), 0, 0, _arrows(exchanges_by_block[OUTSIDE])))
    return cards


def _card(
    plan: Plan, fold: Fold, entries: Sequence[StoredTensor], prefix_path: str, collectives: Sequence[Collective]
) -> Card:
    count = len(fold.names)
    names = [_relative_name(entry.name, fold.names[0]) for entry in entries]
    owners = Counter(name.rpartition(".")[0] for name in names)
    parameters, buffers = [], []
    for name, entry in zip(names, entries, strict=True):
        num_bytes = count * part_bytes(plan, entry)
        owner, _, suffix = name.rpartition(".")
        if entry.kind == "buffer":
            buffers.append(num_bytes)
            continue
        short = owner if suffix == "weight" and owner and owners[owner] == 1 else name
        parameters.append(CardParameter(short, tuple(entry.shape), plan.parameters[entry.name], num_bytes))
    title = fold.pattern.removeprefix(prefix_path)
    return Card(title, count, tuple(parameters), count * len(buffers), sum(buffers), _arrows(collectives))


def _common(names: Sequence[str]) -> list[str]:
    """Names on the path of the innermost module that contains all parameters."""
    paths = [name.split(".")[:-1] for name in names]
    modules: list[str] = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1 or steps[0].isdigit():
            break
        modules.append(steps[0])
    if modules and any(len(path) > len(modules) and path[len(modules)].isdigit() for path in paths):
        modules.pop()  # numbers alone would name nothing
    return modules


def _open_modules(names: Iterable[str], prefix: Sequence[str]) -> set[tuple[str, ...]]:
    """Paths of modules whose children have separate cards: the outermost one, and those that contain a numbered
    module."""
    modules: set[tuple[str, ...]] = {tuple(prefix)}
    for name in names:
        steps = name.split(".")
        number_depth = next((depth for depth in range(len(prefix), len(steps)) if steps[depth].isdigit()), 0)
        modules.update(tuple(steps[:depth]) for depth in range(len(prefix), number_depth + 1))
    return modules


def _block(steps: Sequence[str], prefix: Sequence[str], opened_modules: set[tuple[str, ...]]) -> str:
    depth = len(prefix) + 1
    while tuple(steps[:depth]) in opened_modules and depth < len(steps) and not steps[depth - 1].isdigit():
        depth += 1
    return ".".join(steps[:depth])


def _relative_name(name: str, block: str) -> str:
    return name.removeprefix(block).lstrip(".") or name.rpartition(".")[2]


def _block_of(collective: Collective, block_names: dict[str, str], blocks: dict[str, Any]) -> str:
    name = re.sub("^gradient of ", "", collective.tensor)
    if name in block_names:
        return block_names[name]
    steps = (collective.block or "").split(".")
    for length in range(len(steps), 0, -1):
        if (path := ".".join(steps[:length])) in blocks:
            return path
    return OUTSIDE


def _arrows(collectives: Iterable[Collective]) -> tuple[Arrow, ...]:
    sizes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for collective in collectives:
        sizes[collective.phase, collective.kind, collective.axis].append(collective.num_bytes)
    arrows = [Arrow(*key, len(sizes_of_key), sum(sizes_of_key)) for key, sizes_of_key in sizes.items()]
    return tuple(sorted(arrows, key=lambda arrow: (-arrow.num_bytes, arrow.phase, arrow.kind, arrow.axis)))
