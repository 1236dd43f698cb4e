"""Predicted seconds of a step: arithmetic at a device's rate, collectives at its links'. Predictions only."""

from moe.plan.cluster import Cluster
from moe.plan.memory import BYTES_PER_ELEMENT, held_parameters
from moe.plan.plan import TimeEstimate
from moe.spec import JobSpec


def flops_per_step(spec: JobSpec) -> float:
    """Floating-point operations of one step, forward and backward (3 times forward), without recomputation."""
    model, moe = spec.model, spec.model.moe
    per_layer = spec.train.batch_tokens / 2
    active_expert = 0
    if moe is not None:
        per_choice = moe.num_matrices * model.model_dim * moe.hidden_dim
        active_expert = len(model.moe_layers) * moe.experts_per_token * per_choice
    embeddings = model.source_vocab_size * model.model_dim
    dense = model.num_parameters() - model.num_expert_parameters() - embeddings
    projection = model.target_vocab_size * model.model_dim
    if not model.share_vocabulary:
        dense -= projection
    return 3 * 2 * per_layer * (dense + active_expert + projection)


def estimate(spec: JobSpec, cluster: Cluster, expert: int, data: int) -> TimeEstimate:
    """Seconds by kind for experts over `expert` ranks and `data` replicas of each."""
    device, workers = cluster.traits, expert * data
    width = BYTES_PER_ELEMENT[spec.train.dtype]
    rate = device.bfloat16_flops_per_s if spec.train.dtype == "bfloat16" else device.float32_flops_per_s
    busy_ranks = min(workers, spec.num_groups)
    arithmetic = flops_per_step(spec) / busy_ranks / (rate * device.efficiency)

    moe = spec.model.moe
    all_to_all = 0.0
    if moe is not None and expert > 1:
        tokens = spec.train.batch_tokens / 2 / busy_ranks
        sent = tokens * moe.experts_per_token * spec.model.model_dim * width * (expert - 1) / expert
        link = (
            device.within_node_bytes_per_s
            if expert <= cluster.devices_per_node
            else device.across_nodes_bytes_per_s
        )
        all_to_all = 4 * len(spec.model.moe_layers) * (sent / link + device.latency_s)

    dense, in_experts = held_parameters(spec, expert)
    state = max(4, width)
    link = (
        device.within_node_bytes_per_s
        if workers <= cluster.devices_per_node
        else device.across_nodes_bytes_per_s
    )
    all_reduce = 0.0
    if workers > 1:
        all_reduce += 2 * dense * state * (workers - 1) / workers / link + device.latency_s
    if data > 1 and in_experts:
        all_reduce += 2 * in_experts * state * (data - 1) / data / link + device.latency_s
    memory_bytes_per_s = 2e12 if device.kind != "cpu" else 5e9
    optimizer = 7 * state * (dense + in_experts) / memory_bytes_per_s
    return TimeEstimate(
        arithmetic_s=arithmetic, all_to_all_s=all_to_all, all_reduce_s=all_reduce, optimizer_s=optimizer
    )
