"""Errors for a user's mistakes: the place, the value, the rule and the remedy."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where (`model.moe.num_experts`), what stood there (None where nothing
    did, or where it is a whole part), the rule, the way out."""

    path: str
    value: Any
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        shown = "" if self.value is None else f" (={_shortened(repr(self.value))})"
        return f"{_shortened(self.path) or 'the spec'}{shown} {self.rule}" + (
            f"; {self.remedy}" if self.remedy else ""
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


MAX_IN_WORDS = 20


def in_words(problems: Sequence[Problem], between: str = "\n") -> str:
    """The first problems, and how many more there are: a text for people, however much is wrong."""
    told = [str(problem) for problem in problems[:MAX_IN_WORDS]]
    if len(problems) > MAX_IN_WORDS:
        told.append(f"and {len(problems) - MAX_IN_WORDS:,} more")
    return between.join(told)


class SpecError(ValueError):
    """A spec, plan or checkpoint request that cannot be honoured; carries every `Problem` found."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(in_words(self.problems))

    def __reduce__(self) -> tuple[type["SpecError"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)
