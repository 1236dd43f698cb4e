"""Unusable records of a corpus: reported all at once, or skipped up to a share."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from moe.spec import Problem, SpecError
from moe.spec.bad_records import BadRecordsFields

MAX_KINDS, MAX_EXAMPLES = 20, 5
"""Maximum kinds of faults in a report, and further examples of each."""
_VARIES = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")
"""Parts of a rule that vary within one kind of fault: numbers and quoted text."""


class DeadlineExceeded(Exception):
    """The deadline of a pass over the records has passed."""


@dataclass
class _FaultKind:
    """Faults that break the same rule."""

    first: Problem
    count: int = 0
    examples: list[str] = field(default_factory=list)


class Faults:
    """Faults of records, by kind. With `skips`, unusable records are left out, up to `max_share` of all records. After
    `deadline`, a value of `time.monotonic`, reading another record raises OutOfTime."""

    def __init__(self, *, skips: bool = False, max_share: float = 0.0, deadline: float | None = None) -> None:
        self.skips, self._max_share, self._deadline = skips, max_share, deadline
        self.num_records = self.num_bad = 0
        self._kinds: dict[tuple[str, str], _FaultKind] = {}

    @classmethod
    def from_spec(cls, data: object, deadline: float | None = None) -> "Faults":
        """An empty collection that stops or skips according to the corpus's spec."""
        assert isinstance(data, BadRecordsFields)
        return cls(skips=data.on_bad == "skip", max_share=data.max_bad_share, deadline=deadline)

    def read(self, num_records: int = 1) -> None:
        """Count records that were read, good and bad. Raises OutOfTime after the deadline."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise DeadlineExceeded
        self.num_records += num_records

    def add(self, error: SpecError) -> None:
        """Add the fault of a record."""
        self.num_bad += 1
        problem = error.problems[0]
        key = problem.path, _VARIES.sub("#", problem.rule)
        if key not in self._kinds and len(self._kinds) >= MAX_KINDS:
            key = "", ""
        kind = self._kinds.setdefault(key, _FaultKind(problem))
        kind.count += 1
        if problem.value != kind.first.value and len(kind.examples) < MAX_EXAMPLES:
            file, comma, position = str(problem.value).rpartition(", ")
            is_same_file = str(kind.first.value).startswith(f"{file}{comma}")
            kind.examples.append(position if is_same_file else str(problem.value))

    @property
    def has_unreadable(self) -> bool:
        """Whether a record could not be read at all, for example a text file."""
        return any(kind.first.code == "unreadable" for kind in self._kinds.values())

    def end_file(self) -> None:
        """Raise SpecError as `require_none` does, unless records may be skipped: their share is known at the end."""
        if not self.skips:
            self.require_none()

    def require_none(self) -> None:
        """Raise SpecError with every kind of fault, its count and first places, unless all of them may be skipped."""
        if self.num_bad and not (self.skips and self.num_bad <= self._max_share * self.num_records):
            self.raise_all()

    def raise_all(self) -> NoReturn:
        """Raise SpecError with every kind of fault, its count and first places."""
        raise SpecError(self._problems())

    def _problems(self) -> Iterator[Problem]:
        for key, kind in self._kinds.items():
            code, rule, first = kind.first.code, kind.first.rule, kind.first
            if key == ("", ""):
                code = "bad_records"
                rule = f"{rule}, one of {kind.count:,} further faults"
            elif kind.count > 1:
                ellipsis = ["..."] if kind.count > 1 + len(kind.examples) else []
                example_text = f": also {', '.join([*kind.examples, *ellipsis])}" if kind.examples else ""
                rule = f"{rule} (1 of {kind.count:,} such faults{example_text})"
            yield Problem(code, first.path, first.value, rule, first.remedy)
        if self.skips:
            share = self.num_bad / max(1, self.num_records)
            rule = f"is below the share of unusable records: {self.num_bad:,} of {self.num_records:,} ({share:.3g})"
            yield Problem(
                "bad_records", "data.max_bad_share", self._max_share, rule, "correct the records, or raise this share"
            )
        elif self.num_bad > 1:
            rule = f"has {self.num_bad:,} unusable records among {self.num_records:,} examined"
            yield Problem("bad_records", "data", None, rule, "correct them, or skip them with data.on_bad: skip")
