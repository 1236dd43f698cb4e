"""Explanation of a plan in words."""

from collections import Counter
from collections.abc import Iterator

from moe.plan.candidate import Candidate, Options
from moe.plan.cluster.cluster import Cluster
from moe.plan.cost.layer_bytes import BYTES_PER_ELEMENT
from moe.plan.cost.state import StateCounter
from moe.plan.cost.units import Unit, units
from moe.plan.degrees import Degrees
from moe.plan.fit import fit_problems
from moe.plan.placement import Placement
from moe.plan.plan import BlockShare, Plan, RunnerUp
from moe.plan.profile import Profile
from moe.plan.quantities import format_bytes, format_parameters, format_seconds, pluralize, time_kind_name
from moe.plan.search.ranking import Ranking
from moe.plan.search.schedule_reasons import schedule_reasons
from moe.plan.speed import describe_speed
from moe.spec import JobSpec, ParallelSpec
from moe.spec.adapter import describe_base
from moe.spec.adapter_names import B
from moe.spec.errors import Problem
from moe.spec.patterns import layer_pattern, matches
from moe.spec.stages import format_stages

IGNORED = "ignored config.json keys"
"""Prefix of the reason that lists config keys without effect on the model."""
IGNORED_BEFORE = "ignored of config.json"
"""The same prefix in plans of earlier releases."""
_AXES = {
    "pipeline": "stages of consecutive layers",
    "tensor": "attention heads and feed-forward layers split over this many ranks, which share their tokens",
    "context": "each sequence split over this many ranks",
    "fsdp": "parameters outside experts sharded over this many ranks and gathered where used",
    "expert_tensor": "the hidden units of each expert split over this many ranks",
    "expert_fsdp": "experts sharded over this many of their replicas and gathered where used",
}


def reasons_for(spec: JobSpec, cluster: Cluster, plan: Plan, num_degrees: int) -> list[str]:
    """A reason for each choice of a plan."""
    parallel, moe, reasons = spec.parallel, spec.model.moe, []
    degrees, options = plan.degrees, plan.options
    user_fields = {name for name in type(parallel).model_fields if getattr(parallel, name) is not None}
    if moe is None:
        reasons.append("no experts: every worker holds the whole model and processes its share of the groups")
    else:
        local_experts = moe.num_experts // degrees.expert
        reasons.append(
            f"expert degree {degrees.expert}: {local_experts} of each layer's {moe.num_experts} experts per worker, "
            f"{pluralize(degrees.data, 'replica')} of each; chosen from {pluralize(num_degrees, 'combination')} of "
            "degrees"
        )
        if (group_size := degrees.expert * degrees.expert_tensor) > cluster.devices_per_node:
            reasons.append(
                f"an expert group of {group_size} spans nodes of {cluster.devices_per_node} devices: "
                "its all-to-all crosses the network"
            )
    for axis, purpose in _AXES.items():
        if (degree := getattr(degrees, axis)) > 1:
            if axis in ("fsdp", "expert_fsdp") and options.sharding != "parameters":
                split_state = {"optimizer": "optimizer state", "gradients": "gradients and optimizer state"}
                purpose = f"{split_state[options.sharding]} sharded over this many replicas"
            reasons.append(f"{axis} degree {degree}{', as requested' * (axis in user_fields)}: {purpose}")
    reasons += _option_reasons(spec, plan, user_fields)
    reasons += _freezing_reasons(spec)
    if keys := getattr(spec.model, "ignored_keys", ()):
        reasons.append(f"{IGNORED}: {'; '.join(keys)}")
    reasons.append(
        f"{pluralize(options.num_micro_batches, 'micro-batch', 'es')} of "
        f"{pluralize(options.micro_batch_groups, 'group')}: {format_bytes(plan.memory.job_bytes)} of "
        f"{format_bytes(plan.memory.limit)} per device predicted"
    )
    ranks = degrees.data_ranks
    kind = "workers" if degrees.tensor * degrees.context * degrees.pipeline == 1 else "data ranks"
    if degrees.tensor > 1 and degrees.context * degrees.pipeline == 1:
        kind = "tensor groups of workers"
    if spec.num_groups < ranks:
        reasons.append(
            f"only {pluralize(spec.num_groups, 'group')} for {ranks} {kind}: "
            f"{ranks - spec.num_groups} run experts but hold no tokens; "
            "raise train.batch_tokens or lower model.moe.group_tokens to use them"
        )
    elif spec.num_groups % ranks:
        reasons.append(
            f"{spec.num_groups} groups do not divide evenly among {ranks} {kind}: some wait for "
            "others; use a multiple to keep all busy"
        )
    return reasons


def _freezing_reasons(spec: JobSpec) -> Iterator[str]:
    """Reasons about frozen parameters and adapters."""
    freeze, table = spec.train.freeze, spec.model.parameters()
    num_trained = sum(
        parameter.numel
        for parameter in table
        if not parameter.frozen and not any(matches(pattern, parameter.name) for pattern in freeze)
    )
    if num_trained < (total := spec.model.num_parameters()):
        share = f"{num_trained / total:.0%}" if num_trained > 0.095 * total else f"{100 * num_trained / total:.2g}%"
        yield (
            f"{share} of {format_parameters(total)} are trained: frozen parameters have no gradients and no optimizer "
            "moments"
        )
    if (adapter := getattr(spec.model, "adapter", None)) is not None:
        matrices = [parameter.name.removesuffix(B) for parameter in table if parameter.name.endswith(B)]
        counts: dict[tuple[int, float], Counter[str]] = {}
        for name in matrices:
            counts.setdefault((adapter.rank_of(name), adapter.scale_of(name)), Counter()).update([layer_pattern(name)])
        for (rank, scale), numbers in counts.items():
            names = ", ".join(f"{name} ({number})" for name, number in numbers.items())
            yield f"adapters of rank {rank} and scale {scale:.3g} on {names}"
        yield describe_base(table, max(4, BYTES_PER_ELEMENT[spec.train.dtype]))


def _option_reasons(spec: JobSpec, plan: Plan, user_fields: set[str]) -> Iterator[str]:
    degrees, options = plan.degrees, plan.options
    yield from schedule_reasons(plan, user_fields)
    if options.recompute != "none":
        kinds = {"selective": "hidden states of feed-forward layers and experts", "full": "whole blocks"}
        as_requested, subject = ", as requested" * ("recompute" in user_fields), kinds[options.recompute]
        yield f"recompute {options.recompute}{as_requested}: {subject} are recomputed in the backward pass"
    gathers = plan.candidate.is_sharded
    if not plan.not_yet and spec.train.dtype == "bfloat16" and (gathers or options.recompute == "full"):
        weights = "gathered weights" if options.recompute != "full" else "weights"
        yield f"{weights} are cast to bfloat16 at each use, so that no copies take memory between steps"
    if options.num_chunks > 1:
        travels = degrees.expert * degrees.expert_tensor > 1
        no_purpose = "without effect: no row leaves its rank"
        purpose = "so that communication and computation overlap" if travels else no_purpose
        as_requested = ", as requested" * ("num_chunks" in user_fields)
        yield f"rows are exchanged in {options.num_chunks} chunks{as_requested}, {purpose}"
    if options.ranks_per_node is not None:
        yield (
            f"hierarchical dispatch over nodes of {options.ranks_per_node}: a token crosses to each node once, "
            "however many of its experts are there"
        )
    elif spec.parallel.dispatch == "hierarchical":
        yield "hierarchical dispatch, as requested, has no effect: no expert group spans nodes"
    if options.overlap:
        yield "rows of one micro-batch are exchanged while another is computed"
    if options.max_rows is not None:
        yield (
            f"a rank receives at most {pluralize(options.max_rows, 'row')} at a time, 4 times what even routing would "
            "send it; more rows are exchanged in more chunks, and again in the backward pass"
        )
    if plan.not_yet:
        yield f"cannot be run yet: {', '.join(plan.not_yet)}"


def layout_of(plan: Plan) -> dict[str, bool | int | str]:
    """Degrees above 1 and non-default options, as `parallel` fields; of a module, its mesh."""
    if plan.module is not None:
        return dict(plan.module.mesh)
    always = ("expert", "data")
    layout = {axis: degree for axis, degree in vars(plan.degrees).items() if degree > 1 or axis in always}
    plain, options = vars(Options()), {name: getattr(plan.options, name) for name in _NAMED}
    if plan.candidate.is_sharded:
        del plain["sharding"]
    layout |= {name: value for name, value in options.items() if value != plain.get(name)}
    if plan.options.stages is not None:
        layout["stages"] = format_stages(plan.options.stages)
    if plan.options.ranks_per_node is not None:
        layout["dispatch"] = "hierarchical"
    return layout | {"micro_batch_groups": plan.options.micro_batch_groups}


_NAMED = [name for name in vars(Options()) if name in ParallelSpec.model_fields]


def runner_up(plan: Plan, best: Plan) -> RunnerUp:
    """Summary of a plan that was not chosen."""
    return RunnerUp(
        layout=layout_of(plan), expert=plan.degrees.expert, data=plan.degrees.data, why_not=_why_not(plan, best),
        step_s=plan.predicted.step_s, memory_bytes=plan.memory.total, not_yet=plan.not_yet,
        predicted=plan.predicted, memory=plan.memory,
    )  # fmt: skip


def _why_not(plan: Plan, best: Plan) -> str:
    """Obstacle to running the plan, or its speed relative to the best and the kind of time that differs most."""
    time, best_time = plan.predicted, best.predicted
    speed = describe_speed(time.step_s, best_time.step_s)
    if plan.not_yet and not best.not_yet:
        return f"predicted {speed}, but cannot be run yet: {', '.join(plan.not_yet)}"
    if time.step_s == best_time.step_s:
        return "predicted as fast, with more splits"
    kinds = time.by_kind()
    largest = max(kinds, key=lambda kind: kinds[kind] - best_time.by_kind()[kind])
    extra_s = kinds[largest] - best_time.by_kind()[largest]
    return f"predicted {speed}: {format_seconds(extra_s)} more for {time_kind_name(largest)}"


def ruled_out(ranking: Ranking, cluster: Cluster) -> tuple[str, ...]:
    """Reasons why shapes were dropped."""
    lines = []
    if number := ranking.num_too_slow:
        lines.append(
            f"{pluralize(number, 'combination')} of degrees: slower than these even without communication or waiting"
        )
    num_listed = len({entry.shape for entry in ranking.fitting})
    if (number := ranking.num_shapes - ranking.num_too_slow - num_listed) > 0:
        limit = format_bytes(cluster.memory_bytes)
        lines.append(f"{pluralize(number, 'combination')} of degrees: slower than these, or over {limit}")
    return tuple(lines)


def blocks_of(spec: JobSpec, candidate: Candidate, profile: Profile) -> tuple[BlockShare, ...]:
    """Parameters by kind of unit, experts separate."""
    counter, degrees = StateCounter(spec.train.optimizer), candidate.degrees
    narrow_width = BYTES_PER_ELEMENT[spec.train.dtype]
    width = max(4, narrow_width)
    has_masters = candidate.is_sharded and candidate.options.sharding != "parameters"
    unit_counts = Counter(units(spec.model, profile, spec.train.freeze))
    rows: list[BlockShare] = []
    is_sharded = candidate.gathers
    for unit, count in unit_counts.items():
        of_unit = counter.of_unit(unit, degrees.shards)
        elements = of_unit.stored if is_sharded else of_unit.used
        codes = of_unit.coded_stored if is_sharded else of_unit.coded_used
        narrow = elements if profile.sharded_master_weights == "all" else of_unit.matrices_used
        num_parameters = {experts: _numel(unit, experts) for experts in (False, True)}
        name, most_per_stage = unit.kind, -(-count // (degrees.pipeline if unit.is_layer else 1))
        for experts, number in num_parameters.items():
            if not number:
                continue
            num_elements, code_bytes, num_narrow = (
                part.in_experts if experts else part.dense for part in (elements, codes, narrow)
            )
            is_split = (degrees.expert_fsdp if experts else degrees.fsdp) > 1
            num_narrow *= has_masters and (is_split or profile.sharded_master_weights == "all")
            weight_bytes = width * (num_elements - num_narrow) + min(width, narrow_width) * num_narrow
            rows.append(
                BlockShare(
                    block=f"{name}: experts" if experts else name, count=count, parameters=number * count,
                    placement=_placement(unit, degrees, experts, is_sharded),
                    bytes_per_device=(weight_bytes + code_bytes) * most_per_stage,
                )
            )  # fmt: skip
    return tuple(rows)


def _numel(unit: Unit, of_experts: bool) -> int:
    return sum(weight.num_weights for weight in unit.weights if weight.of_experts == of_experts)


def _placement(unit: Unit, degrees: Degrees, experts: bool, is_sharded: bool) -> str:
    if experts:
        axes = ["expert", "expert_tensor", *(["expert_fsdp"] if is_sharded else [])]
    else:
        split = any(weight.axis_dims for weight in unit.weights if not weight.of_experts)
        axes = [*(["tensor"] if split else []), *(["fsdp"] if is_sharded else [])]
    axes = [*(["pipeline"] if unit.is_layer else []), *axes]
    splits = [f"{axis} {degree}" for axis in axes if (degree := getattr(degrees, axis)) > 1]
    return "split: " + ", ".join(splits) if splits else "replicated"


def split_shape(placement: Placement, degrees: Degrees) -> str:
    """Format `256 / expert 64 x 7,168 x 2,048 / expert_fsdp 2`: each dimension, and what splits it."""
    degree_by_axis = vars(degrees)
    sizes = [f"{size:,}" for size in placement.shape]
    for axis, dim in placement.splits:
        sizes[dim] += f" / {axis} {degree_by_axis[axis]:,}"
    return " x ".join(sizes)


def degrees_problems(spec: JobSpec, workers: int, possible: list[Degrees]) -> list[Problem]:
    """Problem without possible degrees, with the nearest that work."""
    user_degrees = {axis: degree for axis in vars(Degrees()) if (degree := getattr(spec.parallel, axis)) is not None}
    if misfits := fit_problems(spec.model, user_degrees, spec.parallel.context_exchange or "gather"):
        return misfits
    degrees_in_words = " x ".join(f"{axis} {degree}" for axis, degree in user_degrees.items())
    divisors = ", and tensor and fsdp divide it" if {"tensor", "fsdp", "expert_fsdp"} & user_degrees.keys() else ""
    nearest = sorted(possible, key=lambda degrees: (_distance(degrees, user_degrees), str(degrees)))[:3]
    nearest = [
        degrees for degrees in nearest if _distance(degrees, user_degrees) == _distance(nearest[0], user_degrees)
    ]
    return [
        Problem(
            "mismatch",
            "parallel",
            degrees_in_words,
            f"must multiply to the number of workers (={workers}){divisors}",
            f"use {', or '.join(str(degrees) for degrees in nearest)}",
        )
    ]


def _distance(degrees: Degrees, user_degrees: dict[str, int]) -> int:
    """Distance to the requested degrees: doublings first, then further splits."""
    by_axis: dict[str, int] = vars(degrees)
    doublings = sum(abs(by_axis[axis].bit_length() - degree.bit_length()) for axis, degree in user_degrees.items())
    different = sum(by_axis[axis] != degree for axis, degree in user_degrees.items())
    further_splits = sum(
        degree > 1 for axis, degree in by_axis.items() if axis not in (*user_degrees, "expert", "data")
    )
    return 10 * (doublings + different) + further_splits
