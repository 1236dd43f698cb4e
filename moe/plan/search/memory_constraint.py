"""Memory constraint of the search: which layouts of a shape fit."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cache, cached_property, partial
from operator import add

from moe.plan.candidate import Candidate, Recompute, Sharding
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.run_choices import StateOptions
from moe.plan.cost.stages import PipelineChoices
from moe.plan.degrees import Degrees
from moe.plan.search.choices import LayoutChoices


class MemoryConstraint:
    """Layouts of one shape, and which fit."""

    def __init__(self, choices: LayoutChoices, memory: MemoryModel, limit_bytes: int, shape: Degrees) -> None:
        self._choices = choices
        self.sizes = choices.micro_batches(shape)
        """(token groups per micro-batch, number of micro-batches) pairs, from the largest."""
        self._shape, self._plain = shape, choices.plain(shape)
        self._memory, self._limit_bytes = memory, limit_bytes
        self._usable_bytes = limit_bytes - memory.allowance
        self.run = cache(self._run)
        self._share_state_bytes = cache(self._sum_share_state_bytes)

    def _run(self, recompute: Recompute, number: int, virtual_stages: int = 1) -> Candidate:
        """Candidate with the micro-batch size of index `number`."""
        size, times = self.sizes[number]
        return self._plain.with_options(
            micro_batch_groups=size, num_micro_batches=times, recompute=recompute, virtual_stages=virtual_stages
        )

    @cached_property
    def data_shardings(self) -> list[tuple[Degrees, Sharding]]:
        """Placements: ways to shard state over data ranks, referred to by index."""
        return list(self._choices.data_shardings(self._shape))

    @cached_property
    def largest(self) -> list[tuple[Recompute, int]]:
        """(recomputation, index of the largest size that may fit in some placement) pairs. Memory is monotonic in the
        micro-batch size."""
        indices, largest_sizes = range(len(self.sizes)), []
        for recompute in self._choices.recomputes():
            first = bisect_left(indices, True, key=partial(self._may_fit, recompute))
            if first < len(indices):
                largest_sizes.append((recompute, first))
        return largest_sizes

    def _may_fit(self, recompute: Recompute, number: int) -> bool:
        return not self._memory.exceeds_unplaced(self.run(recompute, number), self._usable_bytes)

    def maybe_feasible(self, run: Candidate) -> Iterator[int]:
        """Indices of placements that no lower bound rules out."""
        run_bytes, states = (
            self._memory.non_state_shares(run),
            self._share_state_bytes(run.options.recompute == "full"),
        )
        for number, state in enumerate(states):
            if max(map(add, state, run_bytes)) <= self._usable_bytes:
                yield number

    def feasible(self, run: Candidate, numbers: Iterable[int]) -> Iterator[int]:
        """Indices among `numbers` of the placements in which the run fits."""
        run_bytes, options = self._memory.non_state_bytes(run), run.options
        pipeline = PipelineChoices.from_candidate(run)
        for number in numbers:
            degrees, sharding = self.data_shardings[number]
            layout = StateOptions.from_degrees(degrees, sharding, options.recompute)
            state = self._memory.state_bytes(layout, pipeline)
            update = self._memory.update_bytes(layout, pipeline)
            if max(*map(add, state, run_bytes), *update) <= self._usable_bytes:
                yield number

    def fits(self, candidate: Candidate) -> bool:
        return self._memory.total(candidate) <= self._limit_bytes

    def _sum_share_state_bytes(self, recomputes: bool) -> list[tuple[int, ...]]:
        return [
            self._memory.share_state_bytes(StateOptions(degrees, sharding, recomputes))
            for degrees, sharding in self.data_shardings
        ]
