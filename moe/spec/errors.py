"""User errors: path, value, rule and remedy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

ProblemCode = Literal[
    "already_exists", "bad_records", "changed", "conflict", "corrupt", "does_not_fit", "dtype_mismatch", "duplicate",
    "empty", "invalid_encoding", "invalid_syntax", "invalid_value", "mismatch", "missing", "no_sharding_rule",
    "not_a_choice", "not_allowed", "not_applicable", "not_capturable", "not_divisible", "not_finite", "not_found",
    "not_installed", "not_runnable", "not_writable", "out_of_range", "requires", "shape_mismatch", "side_effect",
    "too_large", "uninitialized", "unknown_key", "unreadable", "unsupported", "user_code", "wrong_state", "wrong_type",
    "wrong_version",
]  # fmt: skip
"""Stable codes, documented in docs/problems.md; wording may change."""

PROBLEM_CODES: tuple[str, ...] = get_args(ProblemCode)


@dataclass(frozen=True)
class Problem:
    """One mistake in a user's input."""

    code: ProblemCode
    path: str
    """A key (`model.moe.num_experts`), a file or a line of code."""
    value: Any
    """Value at the path; None if there is none, or if it is a mapping under a known key."""
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        value_text = "" if self.value is None else f" (={_shorten(repr(self.value))})"
        return f"{_shorten(self.path) or 'the spec'}{value_text} {self.rule}" + (
            f"; {self.remedy}" if self.remedy else ""
        )

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))  # `dataclasses.asdict` would copy the value, which may be any object


class RuleError(ValueError):
    """Broken rule, raised by validators that do not know the value's path; `problems_of` adds it."""

    def __init__(self, code: ProblemCode, rule: str, remedy: str) -> None:
        super().__init__(f"{rule}; {remedy}")
        self.code, self.rule, self.remedy = code, rule, remedy

    def __reduce__(self) -> tuple[type["RuleError"], tuple[ProblemCode, str, str]]:
        return type(self), (self.code, self.rule, self.remedy)


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


MAX_IN_WORDS = 20


def in_words(problems: Sequence[Problem], separator: str = "\n") -> str:
    """The first problems, and the number of others."""
    lines = [str(problem) for problem in problems[:MAX_IN_WORDS]]
    if len(problems) > MAX_IN_WORDS:
        lines.append(f"and {len(problems) - MAX_IN_WORDS:,} more")
    return separator.join(lines)


class SpecError(ValueError):
    """A spec, plan or checkpoint request that cannot be honoured, with every `Problem` found."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(in_words(self.problems))

    def __reduce__(self) -> tuple[type["SpecError"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def spec_error(code: ProblemCode, path: str, value: Any, rule: str, remedy: str = "") -> SpecError:
    """SpecError with a single problem."""
    return SpecError(Problem(code, path, value, rule, remedy))
