"""Predicted seconds of a step: arithmetic at a device's rate, collectives at its links'. Predictions only."""

from moe.plan.cluster import Cluster
from moe.plan.degrees import Degrees
from moe.plan.memory import BYTES_PER_ELEMENT, state_of
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


def estimate(spec: JobSpec, cluster: Cluster, degrees: Degrees) -> TimeEstimate:
    """Seconds by kind."""
    device, workers = cluster.traits, degrees.num_workers
    width = BYTES_PER_ELEMENT[spec.train.dtype]
    rate = device.bfloat16_flops_per_s if spec.train.dtype == "bfloat16" else device.float32_flops_per_s
    busy_ranks = min(degrees.data_ranks, spec.num_groups)
    again = 4 / 3 if spec.parallel.recompute == "full" else 1.0
    arithmetic = again * flops_per_step(spec) / busy_ranks / degrees.tensor / (rate * device.efficiency)

    def link(num_ranks: int) -> float:
        within = num_ranks <= cluster.devices_per_node
        return device.within_node_bytes_per_s if within else device.across_nodes_bytes_per_s

    model, moe = spec.model, spec.model.moe
    exchanging = degrees.expert * degrees.expert_tensor
    tokens = spec.train.batch_tokens / 2 / busy_ranks
    all_to_all = 0.0
    if moe is not None and exchanging > 1:
        copies = moe.experts_per_token * degrees.expert_tensor
        sent = tokens / degrees.tensor * copies * model.model_dim * width * (exchanging - 1) / exchanging
        all_to_all = 4 * len(model.moe_layers) * (sent / link(exchanging) + device.latency_s)
    if degrees.tensor > 1:
        # Into and out of attention and feed-forward layers, forward and backward.
        regions = (
            model.num_encoder_layers + 2 * model.num_decoder_layers + model.num_layers - len(model.moe_layers)
        )
        moved = tokens * model.model_dim * width * (degrees.tensor - 1) / degrees.tensor
        all_to_all += 4 * regions * (moved / link(degrees.tensor) + device.latency_s)

    of_state = state_of(spec.model, degrees, spec.train.optimizer.name)
    state = max(4, width)
    all_reduce = 0.0
    if workers > 1:
        # Cut up, they are gathered twice and reduced once: half as much again as an all-reduce.
        times = 3 if degrees.fsdp > 1 else 2
        all_reduce += (
            times * of_state.used.dense * state * (workers - 1) / workers / link(workers) + device.latency_s
        )
    if degrees.data > 1 and of_state.used.in_experts:
        data, times = degrees.data, 3 if degrees.expert_fsdp > 1 else 2
        moved = times * of_state.used.in_experts * state * (data - 1) / data
        all_reduce += moved / link(workers) + device.latency_s
    memory_bytes_per_s = 2e12 if device.kind != "cpu" else 5e9
    optimizer = 7 * state * of_state.held.both / memory_bytes_per_s
    return TimeEstimate(
        arithmetic_s=arithmetic, all_to_all_s=all_to_all, all_reduce_s=all_reduce, optimizer_s=optimizer
    )
