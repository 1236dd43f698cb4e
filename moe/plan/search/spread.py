"""The choice of a layout under both ends of what is known of the software that runs it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moe.plan.candidate import Candidate
from moe.plan.speed import speed_in_words

NEAR = 1.02
"""Factor below which no layout is taken for the faster one at an end."""
WITHIN_ERROR = 1.05
"""Factor between steps that are predicted as well as equal: published runs that differ by less are not told apart."""

StepS = Callable[[Candidate], float]


@dataclass(frozen=True)
class SpreadEnd:
    """One end of a spread: seconds of a candidate's step there, and the candidate that is fastest."""

    name: str
    """Name in words, after `with`."""
    step_s: StepS
    fastest: Candidate

    def regret(self, candidate: Candidate) -> float:
        """Times the fastest's step that the candidate's takes here."""
        return self.step_s(candidate) / self.step_s(self.fastest)


@dataclass(frozen=True)
class Chosen:
    """A candidate, and why it is that one, in words; none where nothing else was in question."""

    candidate: Candidate
    reasons: tuple[str, ...] = ()


def choose(ranked: Sequence[Candidate], step_s: StepS, ends: Sequence[SpreadEnd]) -> Chosen:
    """Choice among candidates, ranked by `step_s`, their step between the ends.

    It is the fastest, unless one within the error of it splits along fewer axes and is within the error at both ends
    too; another that splits along no more axes replaces that only if it is faster at both ends. So the choice is never
    slower than the fastest by more than the error, and a candidate better between the ends and at one end stays.
    """
    first = ranked[0]
    limit_s = step_s(first) * WITHIN_ERROR
    within = [candidate for candidate in ranked if step_s(candidate) <= limit_s]
    simple = [candidate for candidate in within if _is_behind_by(candidate, first, ends) <= WITHIN_ERROR]
    fewest = min(candidate.degrees.num_further_axes for candidate in (first, *simple))
    choice = next(candidate for candidate in (first, *simple) if candidate.degrees.num_further_axes == fewest)
    reasons = []
    if choice != first:
        reasons.append(
            f"it splits along fewer axes than {first}, which is predicted "
            f"{speed_in_words(step_s(first), step_s(choice))}: within the error of predictions"
        )
    for alternative in within:
        as_simple = alternative.degrees.num_further_axes <= choice.degrees.num_further_axes
        if as_simple and ends and all(NEAR * end.step_s(alternative) < end.step_s(choice) for end in ends):
            reasons.append(
                f"better at both ends of the software's spread than {choice}, which is predicted "
                f"{speed_in_words(step_s(choice), step_s(alternative))} between them"
            )
            choice = alternative
            break
    return Chosen(choice, (*reasons, *_disagreement(choice, ends)))


def _is_behind_by(candidate: Candidate, first: Candidate, ends: Sequence[SpreadEnd]) -> float:
    """Largest ratio, over the ends, of the candidate's step to that of the first."""
    return max((end.step_s(candidate) / end.step_s(first) for end in ends), default=1.0)


def _disagreement(choice: Candidate, ends: Sequence[SpreadEnd]) -> Iterator[str]:
    """Line on the layouts that are faster by more than 2% at an end; none where there are none."""
    behind = [
        f"with {end.name} {end.fastest} would be {speed_in_words(end.step_s(end.fastest), end.step_s(choice))}"
        for end in ends
        if end.regret(choice) > NEAR
    ]
    if behind:
        yield f"the ends of the software's spread disagree: {'; '.join(behind)}"
