"""Simulation of a pipeline schedule."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moe.plan.schedule.action import Action, ActionKind
from moe.plan.schedule.in_flight import peak_activations


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a stage's passes on one micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float

    def of(self, kind: ActionKind) -> float:
        if kind == "backward":
            return self.backward_input + self.backward_weight
        return float(getattr(self, kind))


@dataclass(frozen=True)
class Simulation:
    """Timing of a schedule."""

    makespan_s: float
    """From the start to the last rank's last action."""
    idle_shares: tuple[float, ...]
    """Share of the makespan in which a rank waits, by pipeline rank."""
    peak_in_flight: tuple[int, ...]
    """Most micro-batches whose activations a stage keeps, by stage."""
    start_s: Mapping[Action, float] = field(repr=False)
    """Start of each action."""


def simulate(orders: Sequence[Sequence[Action]], seconds: Sequence[StageSeconds], hop_s: float = 0.0) -> Simulation:
    """Run each pipeline rank's actions, each as early as the rank's order and the action's inputs allow.

    `seconds`: by stage. `hop_s`: seconds until a result of one rank is at another, which keeps neither of them busy.
    Raises ValueError if the ranks wait for one another forever.
    """
    run = _Run(orders, seconds, hop_s)
    while any(run.advance(rank) for rank in range(len(orders))):
        pass
    if waiting := run.waiting():
        raise ValueError(f"the schedule deadlocks: {'; '.join(map(str, waiting))} wait for one another")
    makespan_s = max(run.clock_s, default=0.0)
    in_flight = {
        stage: int(peak_activations(order, {stage: 1.0})) for order in orders for stage in {a.stage for a in order}
    }
    return Simulation(
        makespan_s,
        tuple(1 - busy_s / makespan_s if makespan_s else 0.0 for busy_s in run.busy_s),
        tuple(in_flight[stage] for stage in range(len(seconds))),
        run.start_s,
    )


class _Run:
    """Ranks that run their actions in order."""

    def __init__(self, orders: Sequence[Sequence[Action]], seconds: Sequence[StageSeconds], hop_s: float) -> None:
        self._orders, self._seconds, self._hop_s = orders, seconds, hop_s
        self._rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
        self._next = [0] * len(orders)
        self._end_s: dict[Action, float] = {}
        self.start_s: dict[Action, float] = {}
        self.clock_s = [0.0] * len(orders)
        self.busy_s = [0.0] * len(orders)

    def advance(self, rank: int) -> bool:
        """Run the rank's actions until one waits for another rank; return whether any ran."""
        first = self._next[rank]
        for action in self._orders[rank][first:]:
            ready_s = self._ready_s(action, rank)
            if ready_s is None:
                break
            duration_s = self._seconds[action.stage].of(action.kind)
            self.start_s[action] = max(self.clock_s[rank], ready_s)
            self._end_s[_result(action)] = self.clock_s[rank] = self.start_s[action] + duration_s
            self.busy_s[rank] += duration_s
            self._next[rank] += 1
        return self._next[rank] > first

    def waiting(self) -> list[Action]:
        """Next actions of the ranks that have not run all."""
        return [order[at] for order, at in zip(self._orders, self._next, strict=True) if at < len(order)]

    def _ready_s(self, action: Action, rank: int) -> float | None:
        """Time at which an action's inputs are on its rank; None if one is not computed yet."""
        ready_s = 0.0
        for producer in _inputs(action, len(self._seconds)):
            if (end_s := self._end_s.get(producer)) is None:
                return None
            ready_s = max(ready_s, end_s + (0.0 if self._rank_of[producer.stage] == rank else self._hop_s))
        return ready_s


def _result(action: Action) -> Action:
    """The action, where a whole backward pass counts as that of its input, which other stages wait for."""
    return action._replace(kind="backward_input") if action.kind == "backward" else action


def _inputs(action: Action, num_stages: int) -> Iterator[Action]:
    """Actions whose results an action needs."""
    kind, stage, micro_batch = action
    if kind == "forward":
        if stage > 0:
            yield Action("forward", stage - 1, micro_batch)
    elif kind == "backward_weight":
        yield Action("backward_input", stage, micro_batch)
    else:
        yield Action("forward", stage, micro_batch)
        if stage < num_stages - 1:
            yield Action("backward_input", stage + 1, micro_batch)
