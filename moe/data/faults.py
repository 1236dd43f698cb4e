"""Records of a corpus that cannot be learned from: told all at once, or skipped up to a share."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from moe.spec import Problem, SpecError
from moe.spec.bad_records import BadRecordsFields

MAX_KINDS, MAX_EXAMPLES = 20, 5
"""Kinds of faults that are told, and places of each."""
_VARIES = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")
"""Part of a rule in which faults of one kind differ: numbers and what is quoted."""


@dataclass
class _Kind:
    """Faults that break the same rule."""

    first: Problem
    count: int = 0
    examples: list[str] = field(default_factory=list)


class Faults:
    """Faults of records, by kind. `skips` leaves such records out as long as they are at most `max_share` of all."""

    def __init__(self, *, skips: bool = False, max_share: float = 0.0) -> None:
        self.skips, self._max_share = skips, max_share
        self.num_records = self.num_bad = 0
        self._kinds: dict[tuple[str, str], _Kind] = {}

    @classmethod
    def of(cls, data: object) -> "Faults":
        """None so far, of a corpus that is handled as its spec says."""
        assert isinstance(data, BadRecordsFields)
        return cls(skips=data.on_bad == "skip", max_share=data.max_bad_share)

    def read(self, num_records: int = 1) -> None:
        """Count records that were looked at, the bad ones among them."""
        self.num_records += num_records

    def add(self, error: SpecError) -> None:
        """Take up what is wrong with a record."""
        self.num_bad += 1
        problem = error.problems[0]
        key = problem.path, _VARIES.sub("#", problem.rule)
        if key not in self._kinds and len(self._kinds) >= MAX_KINDS:
            key = "", ""
        kind = self._kinds.setdefault(key, _Kind(problem))
        kind.count += 1
        if problem.value != kind.first.value and len(kind.examples) < MAX_EXAMPLES:
            file, comma, where = str(problem.value).rpartition(", ")
            is_same_file = str(kind.first.value).startswith(f"{file}{comma}")
            kind.examples.append(where if is_same_file else str(problem.value))

    def end_file(self) -> None:
        """Raise SpecError, as `require_none` does, where nothing may be skipped: one file is enough to stop for."""
        if not self.skips:
            self.require_none()

    def require_none(self) -> None:
        """Raise SpecError with every kind of fault, its number and first places, unless they may be skipped."""
        if self.num_bad and not (self.skips and self.num_bad <= self._max_share * self.num_records):
            raise SpecError(self._problems())

    def _problems(self) -> Iterator[Problem]:
        for key, kind in self._kinds.items():
            rule, first = kind.first.rule, kind.first
            if key == ("", ""):
                rule = f"{rule}, which is one of {kind.count:,} further faults"
            elif kind.count > 1:
                more = ["..."] if kind.count > 1 + len(kind.examples) else []
                also = f": also {', '.join([*kind.examples, *more])}" if kind.examples else ""
                rule = f"{rule} (1 of {kind.count:,} alike{also})"
            yield Problem(first.path, first.value, rule, first.remedy)
        if self.skips:
            share = self.num_bad / max(1, self.num_records)
            rule = (
                f"is less than the share of records that cannot be learned from: {self.num_bad:,} of "
                f"{self.num_records:,} ({share:.3g})"
            )
            yield Problem("data.max_bad_share", self._max_share, rule, "correct them, or raise it")
        elif self.num_bad > 1:
            rule = (
                f"has {self.num_bad:,} records that cannot be learned from, of {self.num_records:,} looked at"
            )
            yield Problem("data", None, rule, "correct them, or leave them out by data.on_bad: skip")


def fault(faults: Faults | None, error: SpecError) -> None:
    """Take up what is wrong with a record. Raises it where nobody gathers faults."""
    if faults is None:
        raise error
    faults.add(error)
