"""Layout search for a job on a cluster of equal nodes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from moe.plan.candidate import Candidate, Options
from moe.plan.cluster.cluster import Cluster
from moe.plan.cost.flops import model_flops_per_step
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.time import TimeModel
from moe.plan.degrees import Degrees
from moe.plan.executable import cannot_be_run, not_yet
from moe.plan.money import estimate_money
from moe.plan.placement import placements_of
from moe.plan.plan import FewestWorkers, Plan
from moe.plan.plan_file import made_for
from moe.plan.profile import ProfileName, find_profile
from moe.plan.quantities import pluralize
from moe.plan.query import PlanQuery
from moe.plan.search.choices import LayoutChoices
from moe.plan.search.explain import blocks_of, degrees_problems, reasons_for, ruled_out, runner_up
from moe.plan.search.pricing_warnings import (
    communication_s,
    divisible_s,
    extrapolated_exchange_warning,
    fewer_workers_warning,
    software_reason,
    unmeasured_kernels_warning,
    untested_device_warning,
)
from moe.plan.search.ranking import LEAST, Ranker, Ranking
from moe.plan.search.refinement import Refinement
from moe.plan.search.refusal import InfeasibleLayout, does_not_fit
from moe.plan.search.remedies import adapter_remedy, bfloat16_remedy, unwritten_float32
from moe.plan.search.smallest import Smallest
from moe.plan.search.spread import LayoutChoice, SpreadEnd
from moe.plan.software import Software, SoftwareName, find_software
from moe.spec import JobSpec
from moe.spec.errors import SpecError, spec_error

MAX_SKEW = 4
"""Bound of a rank's rows per chunk, relative to balanced routing."""
MIN_REFINED = 8
"""Layouts that are refined, at least: a schedule may make the eighth the first."""
LOAD_SKEW = 1.2
"""Rows of the busiest expert over the mean, if not measured; typical of balanced routers."""


def plan_job(
    spec: JobSpec,
    cluster: Cluster,
    num_workers: int | None = None,
    *,
    load_skew: float | None = None,
    top: int = 5,
    to_run: bool = False,
    profile: ProfileName | None = None,
    software: SoftwareName | None = None,
) -> Plan:
    """Plan the layout for `num_workers`; default: the most that the job allows and the cluster has.

    The plan is the fastest runnable layout; if there is none, the fastest of all, unless `to_run`. Runners-up
    complete the `top` fastest. `load_skew`: measured rows of the busiest expert over the mean. `profile`: executor to
    price for, by default ours. `software`: source of host times and sustained rates, by default the profile's.

    Raises SpecError if no degrees multiply to the number of workers, or nothing fits in memory.
    """
    query = PlanQuery(profile=profile, software=software, load_skew=load_skew)
    return LayoutSearch.from_query(spec, cluster, query).plan(num_workers, top, to_run=to_run)


class LayoutSearch:
    """Searches the layouts of one job on one cluster."""

    def __init__(
        self,
        spec: JobSpec,
        cluster: Cluster,
        load_skew: float = LOAD_SKEW,
        profile: ProfileName | None = None,
        software: SoftwareName | Software | None = None,
    ) -> None:
        self.spec, self.cluster, self.profile = spec, cluster, find_profile(profile)
        layer_s = cluster.calibrated_device.layer_s
        self.software = (
            software
            if isinstance(software, Software)
            else find_software(software, self.profile.name, layer_s, cluster.device)
        )
        _check_device(spec, cluster)
        self._load_skew = load_skew
        self._choices = LayoutChoices(spec, cluster, self.profile)
        self._choices.check()
        self.memory = MemoryModel(spec, cluster, self.profile, load_skew)
        self.time = TimeModel(spec, cluster, self.profile, self.software, load_skew)
        self._smallest = Smallest(spec, cluster, self.memory)
        self._ranker = Ranker(spec, cluster.memory_bytes, self._choices, self.memory, self.time)
        self._refinement = Refinement(
            spec, self.memory, self.time, cluster.memory_bytes,
            lambda candidate: not_yet(spec, candidate, self.profile.name),
        )  # fmt: skip

    @classmethod
    def from_query(cls, spec: JobSpec, cluster: Cluster, query: PlanQuery) -> Self:
        """Search with the query's pricing. Raises SpecError for problems that no layout can fix."""
        skew = LOAD_SKEW if query.load_skew is None else query.load_skew
        return cls(spec, cluster, skew, query.profile, query.software)

    def plan(
        self, num_workers: int | None = None, top: int = 5, *, to_run: bool = False, why_workers: Sequence[str] = ()
    ) -> Plan:
        """Plan the layout, as `plan_job` does. `why_workers`: the caller's reasons for the number of workers."""
        workers, default_reasons = self.workers(num_workers)
        ranking = self.refined_ranking(workers, top, to_run=to_run)
        choice, ends = self._choose_at_ends(workers, ranking)
        rest = [entry for entry in ranking.fitting if entry.candidate != choice.candidate][: max(0, top - 1)]
        plan = self.plan_of(choice.candidate)
        ends_s = sorted(end.step_s(choice.candidate) for end in ends)
        return plan.model_copy(
            update={
                "ends_s": tuple(float(f"{seconds:.6g}") for seconds in ends_s) or None,
                "fewest": self.fewest() if plan.not_yet and self.profile.name == "ours" else None,
                "reasons": (
                    *(why_workers or default_reasons),
                    *reasons_for(self.spec, self.cluster, plan, ranking.num_shapes),
                    *choice.reasons,
                    *software_reason(self.software, ends_s),
                    *untested_device_warning(self.software, self.cluster),
                    *unmeasured_kernels_warning(self.cluster),
                    *extrapolated_exchange_warning(self.software, self.cluster, plan.degrees),
                    *fewer_workers_warning(plan, self._on_fewer(plan)),
                ),
                "runners_up": tuple(runner_up(self.plan_of(entry.candidate), plan) for entry in rest),
                "ruled_out": ruled_out(ranking, self.cluster),
            }
        )

    def _choose_at_ends(self, workers: int, ranking: Ranking) -> tuple[LayoutChoice, list[SpreadEnd]]:
        """Return the choice (runnable if any is) and the ends of the software's spread."""
        choice, ends = self._ranker.choose_at_ends(ranking, self._dispatchable_shapes(workers), self._times_at_ends())
        return replace(choice, candidate=self._refinement.candidate(choice.candidate)), ends

    def _times_at_ends(self) -> list[TimeModel]:
        return [
            TimeModel(self.spec, self.cluster, self.profile, software, self._load_skew)
            for software in self.software.extremes
        ]

    def best_of(self, workers: int, ranking: Ranking) -> Plan:
        """The plan chosen from a refined ranking, without reasons."""
        return self.plan_of(self._choose_at_ends(workers, ranking)[0].candidate)

    def bound_s(self, workers: int) -> float:
        """Lower bound of the step time over all layouts. Raises SpecError without layouts."""
        candidates = (
            Candidate(shape, Options(micro_batch_groups=-(-self.spec.num_groups // shape.data_ranks)))
            for shape in self._dispatchable_shapes(workers)
        )
        return min(
            self.time.bound_s(candidate, self._choices.ranks_per_node(candidate.degrees)) for candidate in candidates
        )

    def _on_fewer(self, plan: Plan) -> Plan | None:
        """The fastest plan on half as many workers, a quarter and so on, if faster than `plan`; else None. Only
        searched while communication exceeds the shared work: otherwise more workers are faster."""
        fastest, limit_s, workers = None, plan.predicted.step_s, plan.num_workers // 2
        while workers and communication_s(plan) > divisible_s(plan):
            try:
                shapes = self._dispatchable_shapes(workers)
            except SpecError:  # no such degrees
                break
            if not self._smallest.fits(self._choices, shapes, self.cluster.memory_bytes):
                break
            best = self._ranker.fastest(shapes, limit_s, to_run=True)
            if best is not None and (faster := self.plan_of(best.candidate)).predicted.step_s < limit_s:
                fastest, limit_s = faster, faster.predicted.step_s
            workers //= 2
        return fastest

    def best_to_run(self, num_workers: int | None = None, number: int = LEAST) -> list[Plan]:
        """The fastest runnable plans, without reasons. Raises SpecError if there are none."""
        ranking = self.refined_ranking(self.workers(num_workers)[0], number, to_run=True)
        return [self.plan_of(entry.candidate) for entry in ranking.runnable[:number]]

    def refined_ranking(self, workers: int, top: int, *, to_run: bool = False) -> Ranking:
        """The ranking after refinement, for which `MIN_REFINED` layouts compete. Raises SpecError as `plan_job`."""
        ranking, number = self.ranking(workers, max(top, MIN_REFINED), to_run=to_run), max(top, LEAST)
        refined = self._refinement.ranking(ranking)
        leading = dict.fromkeys([*refined.fitting[:number], *refined.runnable[:number]])
        return replace(refined, fitting=sorted(leading, key=lambda entry: entry.order))

    def ranking(self, workers: int, top: int, *, to_run: bool = False) -> Ranking:
        """Rank the fastest layouts that fit, of at least `top` shapes. Raises SpecError as `plan_job`."""
        shapes = self._dispatchable_shapes(workers)
        self._check_fits(shapes, to_run)
        return self._ranker.rank(shapes, top)

    def _dispatchable_shapes(self, workers: int) -> list[Degrees]:
        """Shapes that allow the requested dispatch. Raises SpecError if there are none."""
        shapes = [shape for shape in self._shapes(workers) if self._choices.fits_nodes(shape)]
        if not shapes:
            raise spec_error("not_divisible", "parallel.dispatch", "hierarchical",
                        f"requires node sizes (={self.cluster.devices_per_node}) that divide expert groups, "
"with whole experts on each node", "omit it, or use other degrees")  # fmt: skip
        return shapes

    def check(self, workers: int) -> None:
        """Raise SpecError if no degrees multiply to the number of workers, regardless of memory; ArithmeticError or
        ValidationError for numbers out of range."""
        self.memory.estimate(self._first_candidate(self._shapes(workers)))

    def _first_candidate(self, shapes: Sequence[Degrees]) -> Candidate:
        degrees, sharding = next(self._choices.data_shardings(shapes[0]))
        return Candidate(degrees, replace(self._choices.plain(shapes[0]).options, sharding=sharding))

    def _shapes(self, workers: int) -> list[Degrees]:
        shapes = [shape for shape in self._choices.shapes(workers) if any(True for _ in self._choices.with_fsdp(shape))]
        if not shapes:
            problems = self._choices.option_problems(workers)
            raise SpecError(problems or degrees_problems(self.spec, workers, self._unconstrained_degrees(workers)))
        placeable = [shape for shape in shapes if any(True for _ in self._choices.data_shardings(shape))]
        sharding = self.spec.parallel.sharding
        if not placeable and all(shape.replica_ranks == 1 for shape in shapes):
            raise spec_error("requires", "parallel.sharding", sharding,
                        f"requires 2 data ranks or more, but the workers (={workers}) and the other degrees leave 1",
                        "omit it, use more workers, or lower other degrees")  # fmt: skip
        if not placeable:
            raise spec_error("requires", "parallel.sharding", sharding,
                        "requires an fsdp or expert_fsdp degree above 1", "omit it, or raise one of them")  # fmt: skip
        return [shape for shape in placeable if sharding is None or shape.replica_ranks > 1] or placeable

    def plan_of(self, candidate: Candidate) -> Plan:
        """Plan of a candidate, without reasons."""
        degrees, options, spec, cluster = candidate.degrees, candidate.options, self.spec, self.cluster
        estimate, tokens = self.time.estimate(candidate), spec.train.batch_tokens
        num_billed = cluster.billed_devices(degrees.num_workers)
        return Plan(
            num_workers=degrees.num_workers, degrees=degrees,
            options=replace(options, max_rows=_max_rows(spec, degrees, options.micro_batch_groups)),
            profile=self.profile.name, software=self.software.name,
            placements=placements_of(spec.model, degrees.shards, self.profile.axes),
            device=cluster.calibrated_device.kind,  # type: ignore[arg-type]
            device_type=cluster.device, memory=self.memory.estimate(candidate), predicted=estimate,
            tokens_per_step=tokens, flops_per_step=model_flops_per_step(spec),
            peak_flops_per_s=cluster.calibrated_device.peak_flops_per_s.get(spec.train.dtype),
            num_steps=spec.train.num_steps,
            num_billed_devices=None if num_billed == degrees.num_workers else num_billed,
            money=estimate_money(cluster.price_per_hour, billed_devices=num_billed, step_s=estimate.step_s,
                           tokens_per_step=tokens, num_steps=spec.train.num_steps),
            reasons=(), not_yet=not_yet(spec, candidate, self.profile.name),
            blocks=blocks_of(spec, candidate, self.profile), made_for=made_for(spec, cluster),
        )  # fmt: skip

    def workers(self, num_workers: int | None) -> tuple[int, list[str]]:
        """Return (number of workers, why): as requested, or the most of the job's range with enough devices."""
        resources = self.spec.resources
        if num_workers is not None:
            return num_workers, [f"{pluralize(num_workers, 'worker')}, as requested"]
        if resources.min_num_workers == resources.max_num_workers:
            return resources.max_num_workers, [
                f"{pluralize(resources.max_num_workers, 'worker')}: resources.num_workers"
            ]
        workers = max(resources.min_num_workers, min(resources.max_num_workers, self.cluster.num_devices))
        return workers, [
            f"{pluralize(workers, 'worker')}: the most of {resources.min_num_workers} to "
            f"{resources.max_num_workers} that fit on {pluralize(self.cluster.num_devices, 'device')}"
        ]

    def _unconstrained_degrees(self, workers: int) -> list[Degrees]:
        """Degrees without the job's `parallel`, split only along expert, data and the axes it names."""
        free = self.spec.model_copy(update={"parallel": type(self.spec.parallel)()})
        axes = vars(Degrees())
        user_axes = {"expert", "data", *(axis for axis in axes if getattr(self.spec.parallel, axis) is not None)}
        choices = LayoutChoices(free, self.cluster, self.profile)
        candidates = (degrees for shape in choices.shapes(workers) for degrees in choices.with_fsdp(shape))
        return [
            degrees
            for degrees in candidates
            if all(d == 1 for axis, d in vars(degrees).items() if axis not in user_axes)
        ]

    def _check_fits(self, shapes: Sequence[Degrees], to_run: bool) -> None:
        """Raise SpecError if nothing fits, judged by memory alone."""
        if self._smallest.fits(self._choices, shapes, self.cluster.memory_bytes, to_run=to_run):
            return
        smallest = self._smallest.candidate(self._choices, shapes, to_run=to_run)
        if smallest is None:
            raise SpecError(cannot_be_run(not_yet(self.spec, self._first_candidate(shapes), self.profile.name)))
        infeasible = InfeasibleLayout(
            smallest,
            self.memory.estimate(smallest),
            not_yet(self.spec, smallest, self.profile.name),
            unwritten_float32(self.spec) if self._has_bfloat16 else (),
        )
        raise SpecError(does_not_fit(infeasible, self.fewest(), *self._remedies(shapes[0].num_workers)))

    def fewest(self) -> FewestWorkers:
        """Fewest workers on this kind of cluster that hold the job, and that can run it."""
        clusters = (self.smallest(to_run=to_run) for to_run in (False, True))
        in_any_layout, to_run = (None if cluster is None else cluster.num_devices for cluster in clusters)
        return FewestWorkers(in_any_layout=in_any_layout, to_run=to_run)

    @property
    def _has_bfloat16(self) -> bool:
        return "bfloat16" in self.cluster.calibrated_device.dtypes

    def _remedies(self, workers: int) -> tuple[str | None, str | None]:
        """Changes that let these workers run the job: (bfloat16 for default float32, an adapter or a narrower base);
        None if it would not help."""
        if self.profile.name != "ours":
            return None, None

        def holds(spec: JobSpec) -> bool:
            return self._holds(spec, workers)

        narrow = bfloat16_remedy(self.spec) if self._has_bfloat16 else None
        if narrow is not None and not holds(narrow.spec):
            narrow = None
        has_adapter = getattr(self.spec.model, "adapter", None) is not None
        is_enough = narrow is not None and has_adapter
        adapter = None if is_enough else adapter_remedy(self.spec, holds, has_bfloat16=self._has_bfloat16)
        return (None if narrow is None else narrow.change), (None if adapter is None else adapter.change)

    def _holds(self, spec: JobSpec, workers: int) -> bool:
        """Whether a changed job fits in a runnable layout."""
        memory, choices = (
            MemoryModel(spec, self.cluster, self.profile, self._load_skew),
            LayoutChoices(spec, self.cluster, self.profile),
        )
        shapes = [shape for shape in choices.shapes(workers) if choices.fits_nodes(shape)]
        return Smallest(spec, self.cluster, memory).fits(choices, shapes, self.cluster.memory_bytes, to_run=True)

    def smallest(self, *, to_run: bool = False) -> Cluster | None:
        """The smallest cluster of this kind that holds the job, one worker per device; None if none does."""
        return self._smallest.cluster(to_run=to_run)


def _check_device(spec: JobSpec, cluster: Cluster) -> None:
    if spec.train.cuda_graphs and cluster.device_type.kind != "cuda":
        raise spec_error("unsupported", "train.cuda_graphs", True, f"is not supported by {cluster.device}", "omit it")
    dtypes = cluster.calibrated_device.dtypes
    if spec.train.dtype not in dtypes:
        raise spec_error("unsupported", "train.dtype", spec.train.dtype, f"is not supported by {cluster.device}",
                    f"use one of {', '.join(dtypes)}")  # fmt: skip


def _max_rows(spec: JobSpec, degrees: Degrees, groups: int) -> int | None:
    """Most rows that a rank receives per chunk: `MAX_SKEW` times balanced routing, with stacks of equal length.
    Excess rows come in more chunks, and are sent twice. None if the expert degree is too small for an excess."""
    moe = spec.model.moe
    if moe is None or degrees.expert <= MAX_SKEW:
        return None
    positions = groups * spec.group_tokens // spec.model.sides // degrees.context
    share = positions * moe.experts_per_token * degrees.expert_tensor // degrees.tensor
    return max(1, MAX_SKEW * share)
