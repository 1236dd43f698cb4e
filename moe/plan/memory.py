"""Predicted bytes of a layout on its fullest device.

State follows reference formulae: parameters, gradients and moments of what a rank holds. Activations are
counted from the tensors that the layers save for their backward pass.
"""

from moe.plan.plan import MemoryEstimate
from moe.spec import JobSpec

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float64": 8}

LOGITS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""By device type, the logits that the loss holds at a time: on a CPU one megabyte, which stays in its cache; on a
GPU enough to fill it."""


def held_parameters(spec: JobSpec, expert: int) -> tuple[int, int]:
    """(dense, expert) parameters that one rank holds at an expert degree."""
    in_experts = spec.model.num_expert_parameters()
    return spec.model.num_parameters() - in_experts, in_experts // expert


def optimizer_bytes(spec: JobSpec, expert: int, state_bytes: int) -> int:
    """AdamW: two moments a weight. Adafactor: statistics for each row and column of a matrix, each weight of a
    vector; every expert's matrices count by themselves."""
    dense, in_experts = held_parameters(spec, expert)
    if spec.train.optimizer.name == "adamw":
        return 2 * state_bytes * (dense + in_experts)
    model, moe = spec.model, spec.model.moe
    width, inner = model.model_dim, model.num_heads * model.head_dim
    attentions = model.num_encoder_layers + 2 * model.num_decoder_layers
    statistics = model.source_vocab_size + width
    if not model.share_vocabulary:
        statistics += model.target_vocab_size + width
    statistics += attentions * ((inner + width) + (2 * inner + width) + (width + inner))
    statistics += width * (2 * model.num_encoder_layers + 3 * model.num_decoder_layers + 2)
    for ffn_dim, layers in model.ffn_layers():
        statistics += layers * 2 * (ffn_dim + width)
    if moe is not None:
        per_expert = moe.num_matrices * (width + moe.hidden_dim)
        if moe.expert_bias:
            per_expert += (moe.num_matrices - 1) * moe.hidden_dim + width
        shared = 0
        if moe.shared_hidden_dim is not None:
            shared = moe.num_matrices * (width + moe.shared_hidden_dim) + moe.shared_gate * (width + 1)
        statistics += len(model.moe_layers) * (
            (width + moe.num_experts) + moe.num_experts // expert * per_expert + shared
        )
    return state_bytes * statistics


def estimate(
    spec: JobSpec, expert: int, num_workers: int, micro_batch_groups: int, limit_bytes: int, *, on_cpu: bool
) -> MemoryEstimate:
    """Bytes by kind when each rank holds 1/expert of the experts and runs `micro_batch_groups` groups at once."""
    model, moe = spec.model, spec.model.moe
    compute = BYTES_PER_ELEMENT[spec.train.dtype]
    state = max(4, compute)  # bfloat16 keeps float32 weights, gradients and moments
    dense, in_experts = held_parameters(spec, expert)
    held = dense + in_experts

    positions = micro_batch_groups * spec.group_tokens  # of both sides together
    layer_positions = positions // 2  # a position passes through one stack only
    m, attention_dim = model.model_dim, model.num_heads * model.head_dim
    attentions = model.num_encoder_layers + 2 * model.num_decoder_layers
    per_attention = 4 * m + 4 * attention_dim
    plain_layers = model.num_layers - len(model.moe_layers)
    per_ffn = 3 * m + 2 * model.ffn_dim
    activations = compute * layer_positions * (attentions * per_attention + plain_layers * per_ffn)
    # A few logits at a time, in three forms; the gradients that their loss takes on the way are kept.
    vocabulary, at_once = model.target_vocab_size, LOGITS_AT_ONCE["cpu" if on_cpu else "cuda"]
    logits = 3 * state * max(vocabulary, min(at_once, layer_positions * vocabulary))
    logits += m * (state * vocabulary + compute * layer_positions)
    dispatch = 0
    if moe is not None:
        rows = layer_positions * moe.experts_per_token
        routing = 6 * moe.num_experts * layer_positions
        inside = rows * (4 * m + moe.num_matrices * moe.hidden_dim)
        shared_inside = layer_positions * moe.num_matrices * (moe.shared_hidden_dim or 0)
        dispatch = len(model.moe_layers) * (compute * (inside + shared_inside) + 4 * routing)
    optimizer = optimizer_bytes(spec, expert, state)
    reduced = dense if num_workers > 1 else 0
    if num_workers > expert:
        reduced = max(reduced, in_experts)  # one after the other
    return MemoryEstimate(
        parameters=state * held + (compute * held if compute < state else 0),
        gradients=state * held,
        optimizer=optimizer,
        activations=activations,
        dispatch=dispatch,
        logits=logits,
        communication=state * reduced,
        staging=state * held + optimizer if on_cpu else 0,
        limit=limit_bytes,
    )
