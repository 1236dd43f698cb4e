"""The candidate with the least memory, and the smallest cluster that it fits."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import inf, lcm

from moe.plan.candidate import Candidate
from moe.plan.cluster.cluster import Cluster
from moe.plan.cost.memory import MemoryModel
from moe.plan.degrees import Degrees
from moe.plan.executable import not_yet
from moe.plan.search.choices import Choices
from moe.spec import JobSpec

MAX_NODES = 16_384
_LEADING_BITS = 4
_EACH = 1 << _LEADING_BITS
"""Up to as many nodes each number is tried."""


class Smallest:
    """Finds the least that one job needs, on clusters of one kind."""

    def __init__(self, spec: JobSpec, cluster: Cluster, memory: MemoryModel) -> None:
        self._spec, self._cluster, self._memory = spec, cluster, memory

    def candidate(
        self, choices: Choices, shapes: Iterable[Degrees], *, to_run: bool = False
    ) -> Candidate | None:
        """The candidate of the least memory, where it is wanted `to_run` of those that can be run; None where there is
        none."""
        found: Candidate | None = None
        least = inf

        def least_bytes() -> float:
            return least

        for each, total in self._within(choices, shapes, least_bytes, to_run):
            if found is None or (total, each.key) < (least, found.key):
                found, least = each, total
        return found

    def fits(
        self, choices: Choices, shapes: Iterable[Degrees], limit_bytes: int, *, to_run: bool = False
    ) -> bool:
        """Whether any candidate takes at most `limit_bytes`."""
        return any(True for _ in self._within(choices, shapes, lambda: limit_bytes, to_run))

    def _within(
        self, choices: Choices, shapes: Iterable[Degrees], limit_bytes: Callable[[], float], to_run: bool
    ) -> Iterator[tuple[Candidate, int]]:
        """Candidates of the smallest micro-batches that take at most `limit_bytes`, which may fall meanwhile, and what
        they take; the promising shapes first."""
        for state, _, shape in sorted(
            (self._memory.bound_of_state(shape), shape.order, shape) for shape in shapes
        ):
            if state + self._memory.allowance > limit_bytes():
                break
            plain = choices.plain(shape)
            runs = (plain.having(recompute=recompute) for recompute in choices.recomputes())
            runs = (run for run in runs if not self._memory.exceeds_beside_state(run, limit_bytes()))
            for run, (degrees, sharding) in product(runs, choices.placed(shape)):
                one = Candidate(degrees, replace(run.options, sharding=sharding))
                if (to_run and not_yet(self._spec, one, self._memory.profile.name)) or self._memory.exceeds(
                    one, limit_bytes()
                ):
                    continue
                for virtual_stages in choices.virtual_stages(shape.pipeline):
                    each = one.having(virtual_stages=virtual_stages)
                    if (total := self._memory.total(each)) <= limit_bytes():
                        yield each, total

    def cluster(self, *, to_run: bool = False) -> Cluster | None:
        """The fewest devices that hold the job with a worker on each: of one node, or of whole nodes, of which all
        numbers to 16 are tried, then eight to a doubling. None where none to 16 does, and no doubling up to
        `MAX_NODES`."""
        per_node, asked = self._cluster.devices_per_node, Choices(self._spec, self._cluster).multiple
        usable = max(1, self._cluster.memory_bytes - self._memory.allowance)
        fewest = -(-self._memory.bound_of_state(Degrees()) // usable)
        for workers in range(asked, per_node, asked):
            if workers >= fewest and self.holds(workers, to_run=to_run):
                return self._cluster.of(workers)
        unit, limit = lcm(per_node, asked), MAX_NODES * per_node
        doublings = (unit << power for power in range((limit // unit).bit_length()))
        enough = next(
            (each for each in doublings if each >= fewest and self.holds(each, to_run=to_run)), None
        )
        between = (unit * times for times in _round_numbers(_EACH if enough is None else enough // unit))
        fewer = (each for each in between if fewest <= each != enough)
        found = next((each for each in fewer if self.holds(each, to_run=to_run)), enough)
        return None if found is None else self._cluster.of(found)

    def holds(self, workers: int, *, to_run: bool = False) -> bool:
        """Whether any layout over so many workers fits."""
        choices = Choices(self._spec, self._cluster.of(workers))
        shapes = filter(choices.fits_nodes, choices.shapes(workers))
        return self.fits(choices, shapes, self._cluster.memory_bytes, to_run=to_run)


def _round_numbers(limit: int) -> Iterator[int]:
    """Whole numbers up to `limit` of which only the leading bits are set, in order."""
    number = 1
    while number <= limit:
        yield number
        number += 1 << max(0, number.bit_length() - _LEADING_BITS)
