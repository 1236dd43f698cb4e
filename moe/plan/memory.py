"""Predicted bytes of a layout on its fullest device.

State follows reference formulae: parameters, gradients and moments of what a rank holds. Activations are
counted from the tensors that the layers save for their backward pass.
"""

from moe.plan.degrees import Degrees
from moe.plan.plan import MemoryEstimate
from moe.spec import JobSpec, ModelSpec

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float64": 8}

LOGITS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""By device type, the logits that the loss holds at a time: on a CPU one megabyte, which stays in its cache; on a
GPU enough to fill it."""


def held_parameters(spec: JobSpec, degrees: Degrees) -> tuple[int, int]:
    """(dense, expert) parameters that the fullest rank holds."""
    dense = _dense_matrices(spec.model) // degrees.tensor + _beside_matrices(spec.model)
    in_experts = spec.model.num_expert_parameters() // (degrees.expert * degrees.expert_tensor)
    return -(-dense // degrees.fsdp), in_experts // degrees.expert_fsdp


def _dense_matrices(model: ModelSpec) -> int:
    """Weights that are split over tensor ranks: of attention and of feed-forward layers without experts."""
    m = model.model_dim
    attentions = model.num_encoder_layers + 2 * model.num_decoder_layers
    feed_forward = sum(2 * m * ffn_dim * layers for ffn_dim, layers in model.ffn_layers())
    return attentions * 4 * m * model.num_heads * model.head_dim + feed_forward


def _beside_matrices(model: ModelSpec) -> int:
    return model.num_parameters() - model.num_expert_parameters() - _dense_matrices(model)


def optimizer_bytes(spec: JobSpec, degrees: Degrees, state_bytes: int) -> int:
    """AdamW: two moments a weight. Adafactor: statistics for each row and column of a matrix, each weight of a
    vector; every expert's matrices count by themselves, and their parts are counted whole."""
    dense, in_experts = held_parameters(spec, degrees)
    if spec.train.optimizer.name == "adamw":
        return 2 * state_bytes * (dense + in_experts)
    expert = degrees.expert
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
    spec: JobSpec, degrees: Degrees, micro_batch_groups: int, limit_bytes: int, *, on_cpu: bool
) -> MemoryEstimate:
    """Bytes by kind on the fullest rank, when each data rank runs `micro_batch_groups` groups at once."""
    model, moe = spec.model, spec.model.moe
    compute = BYTES_PER_ELEMENT[spec.train.dtype]
    state = max(4, compute)  # bfloat16 keeps float32 weights, gradients and moments
    dense, in_experts = held_parameters(spec, degrees)
    held, tensor = dense + in_experts, degrees.tensor
    recompute = spec.parallel.recompute or "none"

    positions = micro_batch_groups * spec.group_tokens  # of both sides together
    layer_positions = positions // 2  # a position passes through one stack only
    m, attention_dim = model.model_dim, model.num_heads * model.head_dim
    attentions = model.num_encoder_layers + 2 * model.num_decoder_layers
    # Tensor ranks share the tokens between layers; within, each has all of them and a part of the width.
    per_attention = 3 * m // tensor + m + 4 * attention_dim // tensor
    plain_layers = model.num_layers - len(model.moe_layers)
    hidden = 0 if recompute == "selective" else 2 * model.ffn_dim // tensor
    per_ffn = 2 * m // tensor + m + hidden
    per_element = attentions * per_attention + plain_layers * per_ffn
    if recompute == "full":  # the input of each block, and one block as it is computed again
        per_element = model.num_layers * m // tensor + 2 * per_attention + per_ffn
    activations = compute * layer_positions * per_element
    # A few logits at a time, in three forms; the gradients that their loss takes on the way are kept.
    vocabulary, at_once = model.target_vocab_size, LOGITS_AT_ONCE["cpu" if on_cpu else "cuda"]
    logits = 3 * state * max(vocabulary, min(at_once, layer_positions * vocabulary))
    logits += m * (state * vocabulary + compute * layer_positions)
    dispatch = 0
    if moe is not None:
        rows = layer_positions // tensor * moe.experts_per_token * degrees.expert_tensor
        routing = 6 * moe.num_experts * layer_positions
        hidden = 0 if recompute == "selective" else moe.num_matrices * moe.hidden_dim
        inside = rows * (4 * m + hidden // degrees.expert_tensor)
        shared_inside = layer_positions // tensor * moe.num_matrices * (moe.shared_hidden_dim or 0)
        layers = 1 if recompute == "full" else len(model.moe_layers)
        dispatch = layers * (compute * (inside + shared_inside) + 4 * routing)
    optimizer = optimizer_bytes(spec, degrees, state)
    reduced = 0
    if degrees.num_workers > 1:
        # What FSDP has gathered at a time: two blocks, and what is in none.
        of_block = (dense * degrees.fsdp - _beside_matrices(model)) // max(1, model.num_layers)
        gathered = 2 * of_block + _beside_matrices(model)
        reduced = dense if degrees.fsdp == 1 else gathered
    if degrees.expert_fsdp > 1:
        reduced += 2 * in_experts * degrees.expert_fsdp // max(1, len(model.moe_layers))
    elif degrees.data > 1:
        reduced = max(reduced, in_experts)  # one after the other
    # Weights narrowed where they are used stay until the backward pass: of what is gathered for it, all.
    narrowed = 0
    if compute < state and recompute != "full":
        narrowed = compute * (dense * degrees.fsdp + in_experts * degrees.expert_fsdp)
    elif compute < state:
        narrowed = compute * held
    return MemoryEstimate(
        parameters=state * held + narrowed,
        gradients=state * held,
        optimizer=optimizer,
        activations=activations,
        dispatch=dispatch,
        logits=logits,
        communication=state * reduced,
        staging=state * held + optimizer if on_cpu else 0,
        limit=limit_bytes,
    )
