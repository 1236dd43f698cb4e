"""From a job and a cluster to the plan: enumerate the degrees, drop what does not fit, take the fastest."""

from moe.plan import memory, time
from moe.plan.cluster import Cluster
from moe.plan.degrees import Degrees
from moe.plan.fit import fit_problems
from moe.plan.plan import MemoryEstimate, Plan, RunnerUp
from moe.spec import JobSpec
from moe.spec.errors import Problem, SpecError

_MOST_SKEW = 4
"""Times the rows that a rank would get of even routing, before they come in more chunks."""
_USABLE = 0.9
"""Share of a device's memory that a plan may fill; the rest is the framework's and fragmentation."""


def plan_job(spec: JobSpec, cluster: Cluster, num_workers: int | None = None) -> Plan:
    """The layout for `num_workers` (as many as the job wants and the cluster has, when left out).

    Raises SpecError when no degrees multiply to the number of workers, or nothing fits the memory.
    """
    workers, why_workers = _workers(spec, cluster, num_workers)
    candidates = _degrees(spec, workers)
    if not candidates:
        raise SpecError(_no_degrees(spec, workers))
    candidates = [degrees for degrees in candidates if _fits_nodes(spec, cluster, degrees)]
    if not candidates:
        raise SpecError(
            Problem("parallel.dispatch", "hierarchical",
                    f"needs nodes of as many ranks (={cluster.devices_per_node}) to divide expert groups, with whole "
                    "experts on each", "leave it out, or use other degrees")
        )  # fmt: skip

    fitting, ruled_out = [], []
    for degrees in candidates:
        if (plan := _fit(spec, cluster, degrees)) is not None:
            fitting.append(plan)
        else:
            why = _too_large(spec, cluster, degrees)
            ruled_out.append(RunnerUp(expert=degrees.expert, data=degrees.data, why_not=why))
    if not fitting:
        raise SpecError(_does_not_fit(spec, cluster, candidates))

    fitting.sort(key=lambda plan: (plan.predicted.step_s, -plan.expert))
    best, others = fitting[0], fitting[1:]
    slower = [
        RunnerUp(expert=other.expert, data=other.data, why_not=_slower(other, best)) for other in others
    ]
    reasons = (*why_workers, *_reasons(spec, cluster, best, len(candidates)))
    return best.model_copy(update={"reasons": reasons, "runners_up": (*slower, *ruled_out)})


def _workers(spec: JobSpec, cluster: Cluster, asked: int | None) -> tuple[int, list[str]]:
    resources = spec.resources
    if asked is not None:
        return asked, [f"{_count(asked, 'worker')}, as asked for"]
    if resources.fewest_workers == resources.most_workers:
        return resources.most_workers, [f"{_count(resources.most_workers, 'worker')}: resources.num_workers"]
    workers = max(resources.fewest_workers, min(resources.most_workers, cluster.num_devices))
    return workers, [
        f"{_count(workers, 'worker')}: the most of {resources.fewest_workers} to "
        f"{resources.most_workers} that {_count(cluster.num_devices, 'device')} hold"
    ]


def _degrees(spec: JobSpec, workers: int) -> list[Degrees]:
    """All that the model, the workers and the user's `parallel` allow. What the user does not ask for beside expert
    and data parallelism is left at 1."""
    num_experts = spec.model.moe.num_experts if spec.model.moe else 1
    wanted = spec.parallel
    beside = {axis: getattr(wanted, axis) or 1 for axis in ("tensor", "fsdp", "expert_tensor", "expert_fsdp")}
    return [
        degrees
        for expert in range(1, min(workers, num_experts) + 1)
        if workers % (expert * beside["expert_tensor"]) == 0
        for degrees in [Degrees(expert=expert, data=workers // (expert * beside["expert_tensor"]), **beside)]
        if wanted.expert in (None, expert)
        and wanted.data in (None, degrees.data)
        and degrees.folds
        and not fit_problems(spec.model, degrees.axes)
    ]


def _fit(spec: JobSpec, cluster: Cluster, degrees: Degrees) -> Plan | None:
    """The plan with the largest micro-batch that fits at these degrees, if any does."""
    groups_per_rank = -(-spec.num_groups // degrees.data_ranks)
    asked = spec.parallel.micro_batch_groups
    for groups in [min(asked, groups_per_rank)] if asked else _halvings(groups_per_rank):
        estimate = _memory(spec, cluster, degrees, groups)
        if estimate.total <= _USABLE * cluster.memory_bytes:
            return Plan(
                num_workers=degrees.num_workers, **vars(degrees), micro_batch_groups=groups,
                num_micro_batches=-(-groups_per_rank // groups),
                num_chunks=spec.parallel.num_chunks or 1,
                most_rows=_most_rows(spec, degrees, groups),
                ranks_per_node=_ranks_per_node(spec, cluster, degrees),
                recompute=spec.parallel.recompute or "none",
                device=cluster.traits.kind,  # type: ignore[arg-type]
                device_type=cluster.device, memory=estimate,
                predicted=time.estimate(spec, cluster, degrees),
                tokens_per_step=spec.train.batch_tokens, reasons=(),
            )  # fmt: skip
    return None


def _most_rows(spec: JobSpec, degrees: Degrees, groups: int) -> int | None:
    """How many rows a rank takes from others at a time: `_MOST_SKEW` times what even routing would give it of a layer
    of either stack, were both as long. What is more comes in more chunks, and travels twice. None at expert degrees
    so small that there would hardly be more."""
    moe = spec.model.moe
    if moe is None or degrees.expert <= _MOST_SKEW:
        return None
    layer_positions = groups * spec.group_tokens // 2  # a position passes through one stack only
    share = layer_positions * moe.experts_per_token * degrees.expert_tensor // degrees.tensor
    return max(1, _MOST_SKEW * share)


def _ranks_per_node(spec: JobSpec, cluster: Cluster, degrees: Degrees) -> int | None:
    """For hierarchical dispatch, where it was asked for and an expert group spans nodes."""
    spans = degrees.expert * degrees.expert_tensor > cluster.devices_per_node
    return cluster.devices_per_node if spans and spec.parallel.dispatch == "hierarchical" else None


def _fits_nodes(spec: JobSpec, cluster: Cluster, degrees: Degrees) -> bool:
    """Whether nodes divide expert groups and hold whole experts, where dispatch asks for that."""
    each = _ranks_per_node(spec, cluster, degrees)
    return each is None or (
        degrees.expert * degrees.expert_tensor % each == 0 and each % degrees.expert_tensor == 0
    )


def _halvings(most: int) -> list[int]:
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _reasons(spec: JobSpec, cluster: Cluster, best: Plan, num_candidates: int) -> list[str]:
    reasons = []
    if spec.model.moe is None:
        reasons.append("no experts: every worker holds the whole model and takes its share of the groups")
    else:
        each = spec.model.moe.num_experts // best.expert
        reasons.append(
            f"expert degree {best.expert}: {each} of {spec.model.moe.num_experts} experts of a layer "
            f"a worker, {_count(best.data, 'replica')} of each; the fastest predicted of "
            f"{_count(num_candidates, 'pair')} of degrees"
        )
        if best.expert > cluster.devices_per_node:
            reasons.append(
                f"an expert group of {best.expert} spans nodes of {cluster.devices_per_node}: "
                "its all-to-all crosses the network"
            )
    beside = {
        "tensor": "attention heads and feed-forward layers split over as many ranks, which share their tokens",
        "fsdp": "parameters outside experts cut up over as many ranks, and gathered where they are used",
        "expert_tensor": "the hidden units of each expert split over as many ranks",
        "expert_fsdp": "experts cut up over as many of their replicas, and gathered where they are used",
    }
    reasons += [
        f"{axis} degree {getattr(best, axis)}, as asked for: {what}"
        for axis, what in beside.items()
        if getattr(best, axis) > 1
    ]
    if best.recompute != "none":
        what = {"selective": "hidden states of feed-forward layers and experts", "full": "whole blocks"}
        reasons.append(
            f"recompute {best.recompute}, as asked for: {what[best.recompute]} are computed again in the backward pass"
        )
    if best.num_chunks > 1:
        travels = best.expert * best.expert_tensor > 1
        what_for = (
            "so that exchange and arithmetic overlap"
            if travels
            else "which is for nothing: no row leaves its rank"
        )
        reasons.append(f"rows travel in {best.num_chunks} chunks, as asked for, {what_for}")
    if best.ranks_per_node is not None:
        reasons.append(
            f"hierarchical dispatch over nodes of {best.ranks_per_node}: a token crosses to each node once, "
            "however many of its experts live there"
        )
    elif spec.parallel.dispatch == "hierarchical":
        reasons.append("hierarchical dispatch, as asked for, is for nothing: no expert group spans nodes")
    if best.most_rows is not None:
        reasons.append(
            f"a rank takes at most {_count(best.most_rows, 'row')} from others at a time, {_MOST_SKEW} times what "
            "even routing would give it; what is more comes in more chunks and travels twice"
        )
    reasons.append(
        f"{_count(best.micro_batch_groups, 'group')} at a time in "
        f"{_count(best.num_micro_batches, 'micro-batch', 'es')}: {_gib(best.memory.total)} predicted of "
        f"{_gib(best.memory.limit)} a device"
    )
    ranks, kind = best.degrees.data_ranks, "workers" if best.tensor == 1 else "tensor groups of workers"
    if spec.num_groups < ranks:
        reasons.append(
            f"only {_count(spec.num_groups, 'group')} for {ranks} {kind}: "
            f"{ranks - spec.num_groups} serve experts but hold no tokens of their own; "
            "raise train.batch_tokens or lower model.moe.group_tokens to use them"
        )
    elif spec.num_groups % ranks:
        reasons.append(
            f"{spec.num_groups} groups do not divide among {ranks} {kind}: some wait for "
            "others; a multiple keeps all busy"
        )
    return reasons


def _slower(other: Plan, best: Plan) -> str:
    more = other.predicted.step_s / best.predicted.step_s - 1
    return f"predicted {more:.0%} slower ({other.predicted.step_s:.3g} s a step)"


def _memory(spec: JobSpec, cluster: Cluster, degrees: Degrees, groups: int) -> MemoryEstimate:
    on_cpu = cluster.traits.kind == "cpu"
    return memory.estimate(spec, degrees, groups, cluster.memory_bytes, on_cpu=on_cpu)


def _too_large(spec: JobSpec, cluster: Cluster, degrees: Degrees) -> str:
    needed = _memory(spec, cluster, degrees, 1).total
    return f"needs {_gib(needed)} of {_gib(int(_USABLE * cluster.memory_bytes))} usable a device"


def _no_degrees(spec: JobSpec, workers: int) -> list[Problem]:
    axes = ("expert", "data", "tensor", "fsdp", "expert_tensor", "expert_fsdp")
    asked = {axis: degree for axis in axes if (degree := getattr(spec.parallel, axis)) is not None}
    if misfits := fit_problems(spec.model, asked):
        return misfits
    shown = " x ".join(f"{axis} {degree}" for axis, degree in asked.items())
    free = spec.model_copy(update={"parallel": type(spec.parallel)()})
    beside = ", and tensor and fsdp divide it" if {"tensor", "fsdp", "expert_fsdp"} & asked.keys() else ""
    possible = ", ".join(str(degrees) for degrees in _degrees(free, workers))
    return [
        Problem(
            "parallel",
            shown,
            f"must multiply to the number of workers (={workers}){beside}",
            f"use {possible}",
        )
    ]


def _does_not_fit(spec: JobSpec, cluster: Cluster, candidates: list[Degrees]) -> Problem:
    needed = min(
        (_memory(spec, cluster, degrees, 1) for degrees in candidates), key=lambda estimate: estimate.total
    )
    largest = max(needed.by_kind(), key=lambda kind: needed.by_kind()[kind])
    usable = int(_USABLE * cluster.memory_bytes)
    return Problem(
        "resources",
        _count(candidates[0].num_workers, "worker"),
        f"must hold the model, but a device would need {_gib(needed.total)} of {_gib(usable)} usable, "
        f"{_gib(needed.by_kind()[largest])} of it {largest}",
        "use more workers, devices with more memory, smaller groups, a smaller model, or parallel.fsdp",
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _gib(num_bytes: int) -> str:
    return (
        f"{num_bytes / 1024**3:,.2f} GiB" if num_bytes >= 1024**3 / 10 else f"{num_bytes / 1024**2:,.0f} MiB"
    )
