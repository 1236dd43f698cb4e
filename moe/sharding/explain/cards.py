"""Cards of a picture: the modules of a plan in the order of use, those that repeat as one, each with its parameters and
with what is exchanged for it. No torch."""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe.sharding.explain.explain import Plan, part_bytes
from moe.sharding.explain.folded import Fold, folded
from moe.sharding.planned import Collective, Stored

OUTSIDE = "the module itself"
"""What is computed outside of all cards' modules."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a card's modules."""

    name: str
    """Within the module, without a `weight` that it is the only one to have."""
    shape: tuple[int, ...]
    placements: str
    num_bytes: int
    """On one rank, of all the card's modules together."""


@dataclass(frozen=True)
class Arrow:
    """Collectives of one kind along one axis in one pass, of all the card's modules together."""

    phase: str
    kind: str
    axis: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Card:
    """Modules that are the same, and lie alike."""

    title: str
    count: int
    parameters: tuple[Parameter, ...]
    num_buffers: int
    buffer_bytes: int
    arrows: tuple[Arrow, ...]
    """Those with most bytes first."""


def cards_of(plan: Plan) -> list[Card]:
    """In the order of use; what belongs to none of the modules is the last."""
    names = [each.name for each in plan.stored]
    prefix = _common(names)
    opened = _opened(names, prefix)
    of_name = {name: _block(name.split("."), prefix, opened) for name in names}
    held: dict[str, list[Stored]] = defaultdict(list)
    for each in plan.stored:
        held[of_name[each.name]].append(each)
    about: dict[str, Hashable] = {
        block: tuple(
            (_within(each.name, block), tuple(each.shape), each.dtype, plan.parameters[each.name])
            for each in those
        )
        for block, those in held.items()
    }
    moved: dict[str, list[Collective]] = defaultdict(list)
    for each in plan.collectives:
        moved[_block_of(each, of_name, held)].append(each)
    cards = []
    skipped = "".join(f"{step}." for step in prefix)
    for fold in folded(about):
        cards.append(
            _card(
                plan,
                fold,
                held[fold.names[0]],
                skipped,
                [each for name in fold.names for each in moved[name]],
            )
        )
    if OUTSIDE in moved:
        cards.append(Card(OUTSIDE, 1, (), 0, 0, _arrows(moved[OUTSIDE])))
    return cards


def _card(plan: Plan, fold: Fold, held: Sequence[Stored], skipped: str, moved: Sequence[Collective]) -> Card:
    count = len(fold.names)
    names = [_within(each.name, fold.names[0]) for each in held]
    owners = Counter(name.rpartition(".")[0] for name in names)
    parameters, buffers = [], []
    for name, each in zip(names, held, strict=True):
        num_bytes = count * part_bytes(plan, each)
        owner, _, last = name.rpartition(".")
        if each.kind == "buffer":
            buffers.append(num_bytes)
            continue
        short = owner if last == "weight" and owner and owners[owner] == 1 else name
        parameters.append(Parameter(short, tuple(each.shape), plan.parameters[each.name], num_bytes))
    title = fold.pattern.removeprefix(skipped)
    return Card(title, count, tuple(parameters), count * len(buffers), sum(buffers), _arrows(moved))


def _common(names: Sequence[str]) -> list[str]:
    """Modules that all of the parameters lie in."""
    paths = [name.split(".")[:-1] for name in names]
    found: list[str] = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1 or steps[0].isdigit():
            break
        found.append(steps[0])
    if found and any(len(path) > len(found) and path[len(found)].isdigit() for path in paths):
        found.pop()  # numbers alone would name nothing
    return found


def _opened(names: Iterable[str], prefix: Sequence[str]) -> set[tuple[str, ...]]:
    """Modules whose children have cards of their own: the outermost, and those in which something is numbered."""
    found: set[tuple[str, ...]] = {tuple(prefix)}
    for name in names:
        steps = name.split(".")
        numbered = next((at for at in range(len(prefix), len(steps)) if steps[at].isdigit()), 0)
        found.update(tuple(steps[:at]) for at in range(len(prefix), numbered + 1))
    return found


def _block(steps: Sequence[str], prefix: Sequence[str], opened: set[tuple[str, ...]]) -> str:
    at = len(prefix) + 1
    while tuple(steps[:at]) in opened and at < len(steps) and not steps[at - 1].isdigit():
        at += 1
    return ".".join(steps[:at])


def _within(name: str, block: str) -> str:
    return name.removeprefix(block).lstrip(".") or name.rpartition(".")[2]


def _block_of(each: Collective, of_name: dict[str, str], blocks: dict[str, Any]) -> str:
    name = re.sub("^gradient of ", "", each.tensor)
    if name in of_name:
        return of_name[name]
    steps = (each.block or "").split(".")
    for length in range(len(steps), 0, -1):
        if (path := ".".join(steps[:length])) in blocks:
            return path
    return OUTSIDE


def _arrows(collectives: Iterable[Collective]) -> tuple[Arrow, ...]:
    sizes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for each in collectives:
        sizes[each.phase, each.kind, each.axis].append(each.num_bytes)
    found = [Arrow(*key, len(every), sum(every)) for key, every in sizes.items()]
    return tuple(sorted(found, key=lambda each: (-each.num_bytes, each.phase, each.kind, each.axis)))
