"""What a user's mistake looks like: the place, the value, the rule and the remedy."""

from collections.abc import Iterable
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
        return f"{self.path or 'the spec'}{shown} {self.rule}" + (f"; {self.remedy}" if self.remedy else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


class SpecError(ValueError):
    """A spec, plan or checkpoint request that cannot be honoured; carries every `Problem` found."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type["SpecError"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)
