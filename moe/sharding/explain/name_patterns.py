"""Patterns for repeated names: `layers.*.wi` for all layers, `layers.0-2,5.wi` for some, `layers.0,2,..,10.wi` for
every other one. No torch."""

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Fold:
    """Names with one pattern."""

    pattern: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return self.pattern if len(self.names) == 1 else f"{self.pattern} (x {len(self.names)})"


def fold_names(facts_by_name: Mapping[str, Hashable]) -> list[Fold]:
    """Folds of names with equal values in `facts_by_name`, in the order of their first names. Each name is in one
    fold."""
    alike: dict[tuple[str, Hashable], list[str]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    for name, facts in facts_by_name.items():
        counts[_form(name)] += 1
        alike[_form(name), facts].append(name)
    folds: list[Fold] = []
    for (form, _), names in alike.items():
        if len(names) == 1:
            folds.append(Fold(names[0], (names[0],)))
        elif len(names) == counts[form]:
            folds.append(Fold(form, tuple(names)))
        else:
            folds += _by_numbers(names)
    order = {name: index for index, name in enumerate(facts_by_name)}
    return sorted(folds, key=lambda fold: order[fold.names[0]])


def _form(name: str) -> str:
    return _NUMBER.sub("*", name)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in _NUMBER.findall(name))


def _by_numbers(names: list[str]) -> list[Fold]:
    """Fold of all names if they have all combinations of their numbers; else a fold for each distinct first number."""
    numbers = [_numbers(name) for name in names]
    places = [sorted(set(values)) for values in zip(*numbers, strict=True)]
    if set(numbers) == set(itertools.product(*places)):
        range_texts = map(ranges, places)
        return [Fold(_NUMBER.sub(lambda _: next(range_texts), names[0]), tuple(names))]
    place = next(index for index, values in enumerate(places) if len(values) > 1)
    return [
        fold
        for number in places[place]
        for fold in _by_numbers(
            [name for name, name_numbers in zip(names, numbers, strict=True) if name_numbers[place] == number]
        )
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as text: `0-2,5` or `0,2,..,10`."""
    sorted_numbers = sorted(numbers)
    steps = {after - before for before, after in itertools.pairwise(sorted_numbers)}
    if len(sorted_numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{sorted_numbers[0]},{sorted_numbers[1]},..,{sorted_numbers[-1]}"
    runs: list[list[int]] = []
    for number in sorted_numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
