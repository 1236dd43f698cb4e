"""From a job and a cluster to the plan: enumerate, drop what does not fit, rank by predicted step."""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from moe.plan.candidate import Candidate
from moe.plan.choices import Choices
from moe.plan.cluster import Cluster
from moe.plan.degrees import Degrees
from moe.plan.executable import not_yet
from moe.plan.explain import (
    blocks_of,
    cannot_be_run,
    does_not_fit,
    no_degrees,
    number_of,
    reasons_for,
    ruled_out,
    runner_up,
)  # fmt: skip
from moe.plan.flops import model_flops_per_step
from moe.plan.memory import MemoryModel
from moe.plan.plan import Plan
from moe.plan.stored import made_for
from moe.plan.time import TimeModel
from moe.spec import JobSpec, LanguageModelSpec
from moe.spec.errors import Problem, SpecError

MOST_SKEW = 4
"""Times the rows that a rank would get of even routing, before they come in more chunks."""
LOAD_SKEW = 1.2
"""Rows of the busiest expert over the mean, where none were measured: what balanced routers were seen to keep."""
RUNNABLE = 3
"""Of those that can be run, how many of the fastest are surely found: those that `auto: measured` measures."""
_SIZES = 3
"""Sizes of micro-batches that are tried, from the largest that fits."""
_REFINED = 4
"""Of the fastest of each shape with plain dispatch, how many are tried with other kinds."""


def plan_job(
    spec: JobSpec,
    cluster: Cluster,
    num_workers: int | None = None,
    *,
    load_skew: float | None = None,
    top: int = 5,
    to_run: bool = False,
) -> Plan:
    """The layout for `num_workers` (as many as the job wants and the cluster has, when left out), with the next best
    of the `top` fastest. `load_skew`: rows of the busiest expert over the mean, where they were measured.

    The fastest that can be run is chosen, and the fastest of all where none can be, unless it is wanted `to_run`.
    Raises SpecError when no degrees multiply to the number of workers, or nothing fits the memory.
    """
    skew = LOAD_SKEW if load_skew is None else load_skew
    return Search(spec, cluster, skew).plan(num_workers, top, to_run=to_run)


@dataclass(frozen=True)
class Ranked:
    """A candidate that fits."""

    candidate: Candidate
    shape: Degrees
    step_s: float
    not_yet: tuple[str, ...]

    @property
    def order(self) -> tuple[object, ...]:
        """By the time that is shown, then by what decides between equals."""
        return (float(f"{self.step_s:.6g}"), *self.candidate.key)


@dataclass
class Ranking:
    """What a search has found."""

    fitting: list[Ranked] = field(default_factory=list)
    """The fastest first, those of different shapes before more of the same."""
    num_shapes: int = 0
    num_too_large: int = 0
    num_too_slow: int = 0
    """Shapes that could not be among the fastest whatever else is chosen."""

    @property
    def runnable(self) -> list[Ranked]:
        return [each for each in self.fitting if not each.not_yet]


class Search:
    """Searches the layouts of one job on one cluster."""

    def __init__(self, spec: JobSpec, cluster: Cluster, load_skew: float = LOAD_SKEW) -> None:
        self.spec, self.cluster = spec, cluster
        _check_dtype(spec, cluster)
        self._choices = Choices(spec, cluster)
        self._choices.check()
        self.memory = MemoryModel(spec, cluster, load_skew)
        self.time = TimeModel(spec, cluster, load_skew)
        self._load_skew = load_skew

    def plan(self, num_workers: int | None = None, top: int = 5, *, to_run: bool = False) -> Plan:
        """As `plan_job`."""
        workers, why_workers = self._workers(num_workers)
        ranking = self.ranking(workers, top, to_run=to_run)
        best = next(iter(ranking.runnable), ranking.fitting[0])
        others = [each for each in ranking.fitting if each is not best][: max(0, top - 1)]
        plan = self.plan_of(best.candidate)
        return plan.model_copy(
            update={
                "reasons": (*why_workers, *reasons_for(self.spec, self.cluster, plan, ranking.num_shapes)),
                "runners_up": tuple(runner_up(self.plan_of(each.candidate), plan) for each in others),
                "ruled_out": ruled_out(ranking, self.cluster),
            }
        )

    def best_to_run(self, num_workers: int | None = None, number: int = RUNNABLE) -> list[Plan]:
        """The fastest that can be run, without reasons. Raises SpecError where there are none."""
        ranking = self.ranking(self._workers(num_workers)[0], number, to_run=True)
        return [self.plan_of(each.candidate) for each in ranking.runnable[:number]]

    def ranking(self, workers: int, top: int, *, to_run: bool = False) -> Ranking:
        """The fastest that fit, of at least `top` shapes where there are as many. Raises SpecError as `plan_job`."""
        shapes = [shape for shape in self._shapes(workers) if self._choices.fits_nodes(shape)]
        if not shapes:
            raise SpecError(
                Problem("parallel.dispatch", "hierarchical",
                        f"needs nodes of as many ranks (={self.cluster.devices_per_node}) to divide expert groups, "
                        "with whole experts on each", "leave it out, or use other degrees")
            )  # fmt: skip
        ranking = self._ranked(shapes, top)
        if not ranking.fitting or (to_run and not ranking.runnable):
            raise SpecError(self._does_not_fit(shapes, to_run))
        return ranking

    def fits(self, workers: int) -> bool:
        """Whether any layout fits on so many workers, run or only planned."""
        shapes = list(self._choices.shapes(workers))
        return bool(shapes) and self.memory.total(self._least(shapes)) <= self.cluster.memory_bytes

    def check(self, workers: int) -> None:
        """Raises SpecError where no degrees multiply to the number of workers: what no memory can mend. And
        ArithmeticError or ValidationError for numbers beyond all arithmetic."""
        self.memory.of(self._choices.least(self._shapes(workers)[0]))

    def _shapes(self, workers: int) -> list[Degrees]:
        shapes = [
            each for each in self._choices.shapes(workers) if any(True for _ in self._choices.cut_up(each))
        ]
        if not shapes:
            raise SpecError(no_degrees(self.spec, workers, self._free(workers)))
        return shapes

    def _ranked(self, shapes: Sequence[Degrees], top: int) -> Ranking:
        """A shape is looked into when the least that a step could take there is less than what the fastest take: so
        what is left out is none of them."""
        ranking = Ranking(num_shapes=len(shapes))
        bounds = sorted((self.time.bound_s(shape, self._choices.ranks_per_node(shape)), shape.order, shape)
                        for shape in shapes)  # fmt: skip
        fastest: list[float] = []
        runnable: list[float] = []
        found: list[Ranked] = []
        for bound_s, _, shape in bounds:
            could_be = len(fastest) < top or bound_s <= fastest[top - 1]
            could_run = not not_yet(self.spec, Candidate(shape)) and (
                len(runnable) < RUNNABLE or bound_s <= runnable[RUNNABLE - 1]
            )
            if not could_be and not could_run:
                ranking.num_too_slow += 1
                continue
            here = self._of_shape(shape)
            if not here:
                ranking.num_too_large += 1
                continue
            insort(fastest, here[0].step_s)
            if (first := next((each.step_s for each in here if not each.not_yet), None)) is not None:
                insort(runnable, first)
            found += here
        found.sort(key=lambda each: each.order)
        firsts = {each.shape: each for each in reversed(found)}
        firsts_to_run = {each.shape: each for each in reversed(found) if not each.not_yet}
        leading = {id(each) for each in (*firsts.values(), *firsts_to_run.values())}
        ranking.fitting = sorted(found, key=lambda each: (id(each) not in leading, each.order))
        return ranking

    def _of_shape(self, shape: Degrees) -> list[Ranked]:
        """All that fit of a shape, the fastest first."""

        def ranked(candidates: Iterator[Candidate]) -> list[Ranked]:
            every = (
                Ranked(each, shape, self.time.step_s(each), not_yet(self.spec, each)) for each in candidates
            )
            return sorted(every, key=lambda each: each.order)

        plain = ranked(each for degrees in self._choices.cut_up(shape) for each in self._fitting(degrees))
        runnable = [each for each in plain if not each.not_yet]
        overlapping = [each for each in plain if self._choices.can_overlap(each.candidate)]
        refined = {each.candidate: None for each in (*plain[:_REFINED], *runnable[:_REFINED],
                                                     *overlapping[:_REFINED])}  # fmt: skip
        others = ranked(
            other
            for candidate in refined
            for other in self._choices.dispatches(candidate)
            if self.memory.total(other) <= self.cluster.memory_bytes
        )
        return sorted((*plain, *others), key=lambda each: each.order)

    def _fitting(self, degrees: Degrees) -> Iterator[Candidate]:
        """What fits of these degrees with plain dispatch: for each kind of recomputation the largest micro-batch, where
        it is larger than without, and the next smaller ones."""
        limit, sizes = self.cluster.memory_bytes, self._choices.micro_batches(degrees)
        for sharding in self._choices.shardings(degrees):
            first = self._choices.first(degrees, sharding)
            if self.memory.of_state(first) > limit:
                continue
            for virtual_stages in self._choices.virtual_stages(degrees.pipeline):
                largest = len(sizes)
                for recompute in self._choices.recomputes():
                    every = [
                        replace(first, micro_batch_groups=size, num_micro_batches=times, recompute=recompute,
                                virtual_stages=virtual_stages)
                        for size, times in sizes[:largest]
                    ]  # fmt: skip
                    low, high = 0, len(every)  # the first that fits, sizes falling
                    while low < high:
                        middle = (low + high) // 2
                        if self.memory.total(every[middle]) <= limit:
                            high = middle
                        else:
                            low = middle + 1
                    # Smaller ones wait for as much memory in a pipeline, until there are too few to fill it.
                    smaller = every[low : low + _SIZES]
                    yield from (
                        each for each in smaller if degrees.pipeline == 1 or self.memory.total(each) <= limit
                    )
                    largest = low
                    if not largest:
                        break

    def plan_of(self, candidate: Candidate) -> Plan:
        """The plan that runs a candidate, without reasons."""
        degrees, spec, cluster = candidate.degrees, self.spec, self.cluster
        return Plan(
            num_workers=degrees.num_workers, **vars(degrees), sharding=candidate.sharding,
            virtual_stages=candidate.virtual_stages, micro_batch_groups=candidate.micro_batch_groups,
            num_micro_batches=candidate.num_micro_batches, num_chunks=candidate.num_chunks,
            overlap=candidate.overlap, most_rows=_most_rows(spec, degrees, candidate.micro_batch_groups),
            ranks_per_node=candidate.ranks_per_node, recompute=candidate.recompute,
            device=cluster.traits.kind,  # type: ignore[arg-type]
            device_type=cluster.device, memory=self.memory.of(candidate), predicted=self.time.of(candidate),
            tokens_per_step=spec.train.batch_tokens, flops_per_step=model_flops_per_step(spec),
            num_steps=spec.train.num_steps, reasons=(), not_yet=not_yet(spec, candidate),
            blocks=blocks_of(spec, candidate), made_for=made_for(spec, cluster),
        )  # fmt: skip

    def _workers(self, asked: int | None) -> tuple[int, list[str]]:
        resources = self.spec.resources
        if asked is not None:
            return asked, [f"{number_of(asked, 'worker')}, as asked for"]
        if resources.fewest_workers == resources.most_workers:
            return resources.most_workers, [
                f"{number_of(resources.most_workers, 'worker')}: resources.num_workers"
            ]
        workers = max(resources.fewest_workers, min(resources.most_workers, self.cluster.num_devices))
        return workers, [
            f"{number_of(workers, 'worker')}: the most of {resources.fewest_workers} to "
            f"{resources.most_workers} that {number_of(self.cluster.num_devices, 'device')} hold"
        ]

    def _free(self, workers: int) -> list[Degrees]:
        """What there would be without the user's `parallel`, of the axes that it names."""
        free = self.spec.model_copy(update={"parallel": type(self.spec.parallel)()})
        axes = vars(Degrees())
        asked = {"expert", "data", *(axis for axis in axes if getattr(self.spec.parallel, axis) is not None)}
        choices = Choices(free, self.cluster)
        every = (each for shape in choices.shapes(workers) for each in choices.cut_up(shape))
        return [each for each in every if all(d == 1 for axis, d in vars(each).items() if axis not in asked)]

    def _does_not_fit(self, shapes: Sequence[Degrees], to_run: bool) -> Problem:
        if to_run:  # what is left has no stages and no context ranks, unless the user asks for them
            runnable = [shape for shape in shapes if not not_yet(self.spec, self._choices.first(shape))]
            if not runnable:
                return cannot_be_run(not_yet(self.spec, self._choices.first(shapes[0])))
            shapes = runnable
        least = self._least(shapes)
        return does_not_fit(
            self.memory.of(least), least, self.smallest(least.degrees.num_workers, to_run=to_run)
        )

    def _least(self, shapes: Sequence[Degrees]) -> Candidate:
        """What takes the least memory."""
        every = (self._choices.least(degrees) for shape in shapes for degrees in self._choices.cut_up(shape))
        return min(every, key=lambda each: (self.memory.total(each), each.key))

    def smallest(self, workers: int, *, to_run: bool = False, most_doublings: int = 12) -> int | None:
        """The first number of workers, of doublings of `workers`, that something fits on; None where none does."""
        for _ in range(most_doublings):
            workers *= 2
            larger = Search(
                self.spec, self.cluster.of(max(workers, self.cluster.num_devices)), self._load_skew
            )
            shapes = [
                shape for shape in larger._choices.shapes(workers)
                if not (to_run and not_yet(self.spec, larger._choices.first(shape)))
            ]  # fmt: skip
            if shapes and self.memory.total(larger._least(shapes)) <= self.cluster.memory_bytes:
                return workers
        return None


def _check_dtype(spec: JobSpec, cluster: Cluster) -> None:
    rates = cluster.traits.flops_per_s
    if spec.train.dtype not in rates:
        raise SpecError(
            Problem("train.dtype", spec.train.dtype, f"is nothing that a {cluster.device} computes in",
                    f"use one of {', '.join(rates)}")
        )  # fmt: skip


def _most_rows(spec: JobSpec, degrees: Degrees, groups: int) -> int | None:
    """How many rows a rank takes from others at a time: `MOST_SKEW` times what even routing would give it of a layer
    of either stack, were both as long. What is more comes in more chunks, and travels twice. None at expert degrees
    so small that there would hardly be more."""
    moe = spec.model.moe
    if moe is None or degrees.expert <= MOST_SKEW:
        return None
    sides = 1 if isinstance(spec.model, LanguageModelSpec) else 2  # a position passes through one stack only
    positions = groups * spec.group_tokens // sides // degrees.context
    share = positions * moe.experts_per_token * degrees.expert_tensor // degrees.tensor
    return max(1, MOST_SKEW * share)
