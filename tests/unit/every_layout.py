"""Every layout that a job and a cluster allow: the slow, obvious reference of the search.

The choices are read from the spec's own types and from "What is tried" in `docs/design/planning.md`; none of the
search's own lists is used.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

from moe.plan import Cluster, Degrees
from moe.plan.candidate import Candidate, Options
from moe.plan.cost.units import units
from moe.plan.fit import fit_problems
from moe.plan.profile import PEER, ProfileName
from moe.spec import JobSpec, LanguageModelSpec
from moe.spec.parallel import ParallelSpec

CONTEXT_TOKENS = 4096
"""Of a sequence, on each context rank at least."""
CHUNKS = (1, 2, 4)


def every_layout(spec: JobSpec, cluster: Cluster, workers: int, profile: ProfileName) -> Iterator[Candidate]:
    """Every layout of a job over so many workers."""
    for degrees in every_degrees(spec, cluster, workers, profile):
        runs = product(
            shardings(spec, degrees), of_literal("recompute", spec), virtual_stages(spec, degrees, profile),
            micro_batches(spec, degrees), chunks(spec, degrees), nodes(spec, cluster, degrees), overlaps(spec),
        )  # fmt: skip
        for sharding, recompute, virtual, (groups, times), num_chunks, ranks_per_node, overlap in runs:
            options = Options(
                sharding=sharding, recompute=recompute, virtual_stages=virtual, num_chunks=num_chunks, overlap=overlap,
                ranks_per_node=ranks_per_node, micro_batch_groups=groups, num_micro_batches=times,
            )  # fmt: skip
            candidate = Candidate(degrees, options)
            if virtual > 1 and times < degrees.pipeline:  # too few micro-batches to interleave
                continue
            if not overlap or overlap_is_possible(candidate):
                yield candidate


def every_degrees(spec: JobSpec, cluster: Cluster, workers: int, profile: ProfileName) -> Iterator[Degrees]:
    parallel, model, per_node = spec.parallel, spec.model, cluster.devices_per_node
    language = isinstance(model, LanguageModelSpec)
    limits = {
        "pipeline": max_stages(spec, profile),
        "expert": model.moe.num_experts if model.moe else 1,
        "expert_tensor": per_node if model.moe else 1,
        "tensor": per_node,
        "context": max(1, spec.data.max_tokens // CONTEXT_TOKENS) if language else 1,
    }
    pins = {axis: getattr(parallel, axis) for axis in limits}
    ranges = [range(1, min(workers, limits[axis]) + 1) if pins[axis] is None else [pins[axis]] for axis in limits]
    for pipeline, expert, expert_tensor, tensor, context in product(*ranges):
        data, left = divmod(workers, pipeline * expert * expert_tensor)
        stage = expert * expert_tensor * data
        if left or stage % (tensor * context) or parallel.data not in (None, data):
            continue
        replicas, in_node = stage // tensor, per_node // tensor
        dense = cuts(replicas, in_node, parallel.fsdp)
        experts = cuts(data, per_node // (expert * expert_tensor), parallel.expert_fsdp)
        if model.moe is None and parallel.expert_fsdp is None:
            experts = [1]
        for fsdp, expert_fsdp in product(dense, experts):
            degrees = Degrees(expert, data, tensor, fsdp, expert_tensor, expert_fsdp, context, pipeline)
            if not fit_problems(model, vars(degrees)):
                yield degrees


def max_stages(spec: JobSpec, profile: ProfileName) -> int:
    """Every stage of ours has a layer; a peer's may have the embeddings or the head alone."""
    parts = units(spec.model, PEER)
    return sum(unit.is_layer for unit in parts) if profile == "ours" else len(parts)


def cuts(ranks: int, in_node: int, pin: int | None) -> list[int]:
    """Numbers of shards: 1, the ranks of a node, all ranks."""
    degrees = {1, in_node, ranks} if pin is None else {pin}
    return [degree for degree in sorted(degrees) if degree and ranks % degree == 0]


def of_literal(name: str, spec: JobSpec) -> tuple[Any, ...]:
    """Choices for a key of `parallel`, or its pinned value."""
    if (value := getattr(spec.parallel, name)) is not None:
        return (value,)
    literal, _ = get_args(ParallelSpec.model_fields[name].annotation)
    return get_args(literal)


def shardings(spec: JobSpec, degrees: Degrees) -> tuple[Any, ...]:
    """Without shards all shardings are the same; a pinned one is refused unless there is only one rank."""
    if degrees.fsdp > 1 or degrees.expert_fsdp > 1:
        return of_literal("sharding", spec)
    sharding = spec.parallel.sharding or "parameters"
    return (sharding,) if sharding == "parameters" or degrees.data_ranks == 1 else ()


def cut_in_part(spec: JobSpec, candidate: Candidate) -> bool:
    """Whether optimizer or gradients are sharded over one node's ranks alone, without being pinned. The search does not
    try it, and a test shows that sharding over all ranks is no slower, and takes at most a little more memory, under
    Adafactor."""
    degrees, parallel = candidate.degrees, spec.parallel
    dense = parallel.fsdp is None and degrees.fsdp not in (1, degrees.stage_workers // degrees.tensor)
    experts = parallel.expert_fsdp is None and degrees.expert_fsdp not in (1, degrees.data)
    return parallel.sharding is None and candidate.options.sharding != "parameters" and (dense or experts)


def steps(largest: int) -> list[int]:
    """Every number up to 8, then four per doubling, and the largest."""
    return [
        number for number in range(1, largest + 1)
        if number <= 8 or number == largest or number % (1 << number.bit_length() - 3) == 0
    ]  # fmt: skip


def virtual_stages(spec: JobSpec, degrees: Degrees, profile: ProfileName) -> list[int]:
    pin = spec.parallel.virtual_stages
    largest = max_stages(spec, profile) // degrees.pipeline if degrees.pipeline > 1 else 1
    counts = steps(largest) if pin is None else [pin]
    return [count for count in counts if count <= largest]


def micro_batches(spec: JobSpec, degrees: Degrees) -> list[tuple[int, int]]:
    """(groups, number of micro-batches): for each number, the fewest groups that suffice."""
    groups, pin = -(-spec.num_groups // degrees.data_ranks), spec.parallel.micro_batch_groups
    sizes = {-(-groups // times) for times in steps(groups)} if pin is None else {min(pin, groups)}
    return [(size, -(-groups // size)) for size in sizes]


def rows_travel(degrees: Degrees) -> bool:
    return degrees.expert * degrees.expert_tensor > 1


def chunks(spec: JobSpec, degrees: Degrees) -> tuple[int, ...]:
    if spec.parallel.num_chunks is not None:
        return (spec.parallel.num_chunks,)
    return CHUNKS if rows_travel(degrees) else (1,)


def nodes(spec: JobSpec, cluster: Cluster, degrees: Degrees) -> list[int | None]:
    """Ranks of a node for hierarchical dispatch, if an expert group spans nodes; None for flat dispatch."""
    per_node, group = cluster.devices_per_node, degrees.expert * degrees.expert_tensor
    if not group > per_node > 1:
        return [None]
    fits_nodes = group % per_node == 0 and per_node % degrees.expert_tensor == 0
    by_kind: dict[str, list[int | None]] = {
        "flat": [None], "deepep": [None], "hierarchical": [per_node] * fits_nodes,
    }  # fmt: skip
    return list(dict.fromkeys(ranks for kind in of_literal("dispatch", spec) for ranks in by_kind[kind]))


def overlaps(spec: JobSpec) -> list[bool]:
    return [False, True] if spec.parallel.overlap is None else [spec.parallel.overlap]


def overlap_is_possible(candidate: Candidate) -> bool:
    """As in Megatron-Core: between two micro-batches without full recomputation, and in a pipeline only with virtual
    stages; rows hidden behind a micro-batch travel in one chunk."""
    options = candidate.options
    return (
        rows_travel(candidate.degrees) and options.num_micro_batches > 1 and options.num_chunks == 1
        and options.recompute != "full" and (candidate.degrees.pipeline == 1 or options.virtual_stages > 1)
    )  # fmt: skip


def least_layouts(spec: JobSpec, cluster: Cluster, workers: int, profile: ProfileName) -> Iterator[Candidate]:
    """Layouts with the smallest micro-batches, which take the least memory, however rows travel."""
    overlap = bool(spec.parallel.overlap)
    for degrees in every_degrees(spec, cluster, workers, profile):
        if not nodes(spec, cluster, degrees):
            continue
        groups, times = min(micro_batches(spec, degrees))
        runs = product(shardings(spec, degrees), of_literal("recompute", spec), virtual_stages(spec, degrees, profile))
        for sharding, recompute, virtual in runs:
            options = Options(
                sharding=sharding, recompute=recompute, virtual_stages=virtual, overlap=overlap,
                micro_batch_groups=groups, num_micro_batches=times,
            )  # fmt: skip
            candidate = Candidate(degrees, options)
            if virtual > 1 and times < degrees.pipeline:  # too few micro-batches to interleave
                continue
            if not overlap or overlap_is_possible(candidate):
                yield candidate
