"""The choice of a layout under both ends of what is known of the software that runs it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moe.plan.candidate import Candidate

NEAR = 1.02
"""Factor below which no layout is taken for the faster one."""

StepS = Callable[[Candidate], float]


@dataclass(frozen=True)
class End:
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


def under_both(first: Candidate, others: Iterable[Candidate], ends: Sequence[End]) -> Chosen:
    """The candidate that is the best, or within 2% of it, at both ends: the `first`, which is the fastest between them,
    where it is; else the one that lies the least behind at either end."""

    def worst(candidate: Candidate) -> float:
        return max(end.regret(candidate) for end in ends)

    if not ends or worst(first) <= NEAR:
        return Chosen(first)
    every = dict.fromkeys((first, *others, *(end.fastest for end in ends)))
    chosen = min(every, key=worst)
    behind = [(end, end.regret(chosen) - 1) for end in ends if end.regret(chosen) > NEAR]
    if not behind:
        more = max(ends, key=lambda end: end.regret(first))
        told = f"within 2% of the fastest at both ends of the software's spread; {first}, the fastest "
        return Chosen(
            chosen, (f"{told}between them, is {more.regret(first) - 1:.1%} behind with {more.name}",)
        )
    told = "; ".join(
        f"with {end.name} {end.fastest} would take {1 - 1 / (1 + more):.1%} less" for end, more in behind
    )
    return Chosen(
        chosen, (f"the ends of the software's spread disagree, and no layout is within 2% at both: {told}",)
    )
