"""Choice of a layout under both ends of the software's spread."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moe.plan.candidate import Candidate
from moe.plan.speed import describe_speed

NEAR = 1.02
"""Ratio of step times below which layouts are equally fast at an end."""
WITHIN_ERROR = 1.05
"""Ratio of step times within the prediction error: published runs that differ by less are not told apart."""

StepS = Callable[[Candidate], float]


@dataclass(frozen=True)
class SpreadEnd:
    """An end of the spread: step times there, and the fastest candidate."""

    name: str
    step_s: StepS
    fastest: Candidate

    def regret(self, candidate: Candidate) -> float:
        """Ratio of the candidate's step to the fastest here."""
        return self.step_s(candidate) / self.step_s(self.fastest)


@dataclass(frozen=True)
class LayoutChoice:
    """The chosen candidate, and why; no reasons without alternatives."""

    candidate: Candidate
    reasons: tuple[str, ...] = ()


def choose(candidates: Sequence[Candidate], step_s: StepS, ends: Sequence[SpreadEnd]) -> LayoutChoice:
    """Choose among candidates ranked by `step_s`, their step time between the ends.

    The fastest, unless another within the error of it, between and at both ends, splits along fewer axes; then, of
    those that split along no more axes, one that is faster at both ends. The choice is at most the error slower than
    the fastest, and a candidate better between the ends and at one end stays.
    """
    first = candidates[0]
    limit_s = step_s(first) * WITHIN_ERROR
    near_fastest = [candidate for candidate in candidates if step_s(candidate) <= limit_s]
    simple = [candidate for candidate in near_fastest if _is_behind_by(candidate, first, ends) <= WITHIN_ERROR]
    fewest = min(candidate.degrees.num_further_axes for candidate in (first, *simple))
    choice = next(candidate for candidate in (first, *simple) if candidate.degrees.num_further_axes == fewest)
    reasons = []
    if choice != first:
        reasons.append(
            f"splits along fewer axes than {first}, which is predicted "
            f"{describe_speed(step_s(first), step_s(choice))}: within the prediction error"
        )
    for alternative in near_fastest:
        as_simple = alternative.degrees.num_further_axes <= choice.degrees.num_further_axes
        if as_simple and ends and all(NEAR * end.step_s(alternative) < end.step_s(choice) for end in ends):
            reasons.append(
                f"faster at both bounds of the software than {choice}, which is predicted "
                f"{describe_speed(step_s(choice), step_s(alternative))} between them"
            )
            choice = alternative
            break
    return LayoutChoice(choice, (*reasons, *_disagreement(choice, ends)))


def _is_behind_by(candidate: Candidate, first: Candidate, ends: Sequence[SpreadEnd]) -> float:
    return max((end.step_s(candidate) / end.step_s(first) for end in ends), default=1.0)


def _disagreement(choice: Candidate, ends: Sequence[SpreadEnd]) -> Iterator[str]:
    """Message on layouts over 2% faster at an end."""
    behind = [
        f"at {end.name}, {end.fastest} would be {describe_speed(end.step_s(end.fastest), end.step_s(choice))}"
        for end in ends
        if end.regret(choice) > NEAR
    ]
    if behind:
        yield f"the bounds of the software disagree: {'; '.join(behind)}"
