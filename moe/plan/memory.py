"""Predicted bytes of a layout on its fullest device.

State (parameters, gradients, moments) is counted weight by weight, activations from the tensors that the layers save
for their backward pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from moe.plan.degrees import Degrees
from moe.plan.plan import MemoryEstimate
from moe.plan.weights import Block, Weight, blocks, optimizer_elements
from moe.spec import JobSpec, ModelSpec

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float64": 8}

LOGITS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""By device type, the logits that the loss holds at a time: on a CPU one megabyte, which stays in its cache; on a
GPU enough to fill it."""


@dataclass(frozen=True)
class Elements:
    """How many numbers parameters have, those of experts apart."""

    dense: int
    in_experts: int

    @property
    def both(self) -> int:
        return self.dense + self.in_experts


@dataclass(frozen=True)
class State:
    """What the fullest rank has of a model's parameters, exactly."""

    held: Elements
    used: Elements
    """As they are used: what FSDP cuts up counts as it is gathered."""
    gathered: Elements
    """Of those, what FSDP has at a time: two layers, the one at work and the next, and what lies in none."""
    optimizer: int
    """Numbers that the optimizer remembers."""


@lru_cache(256)  # a search asks for the same again and again
def state_of(model: ModelSpec, degrees: Degrees, optimizer: str) -> State:
    """Weight by weight; `optimizer` is its name in a spec."""
    outside, *layers = parts = blocks(model)

    def held(weight: Weight) -> tuple[int, ...]:
        return weight.held(degrees)

    def used(weight: Weight) -> tuple[int, ...]:
        return weight.used(degrees)

    single = [
        _elements([replace(block, count=1)], used) for block in layers for _ in range(min(2, block.count))
    ]
    return State(
        held=_elements(parts, held),
        used=_elements(parts, used),
        gathered=Elements(
            _elements([outside], used).dense + sum(sorted(each.dense for each in single)[-2:]),
            sum(sorted(each.in_experts for each in single)[-2:]),
        ),
        optimizer=sum(
            block.count * optimizer_elements(held(weight), weight.of_experts, optimizer)
            for block in parts
            for weight in block.weights
        ),
    )


def _elements(parts: Iterable[Block], shape_of: Callable[[Weight], tuple[int, ...]]) -> Elements:
    totals = [0, 0]
    for block in parts:
        for weight in block.weights:
            totals[weight.of_experts] += block.count * prod(shape_of(weight))
    return Elements(*totals)


def estimate(
    spec: JobSpec, degrees: Degrees, micro_batch_groups: int, limit_bytes: int, *, on_cpu: bool
) -> MemoryEstimate:
    """Bytes by kind on the fullest rank, when each data rank runs `micro_batch_groups` groups at once."""
    model, moe = spec.model, spec.model.moe
    compute = BYTES_PER_ELEMENT[spec.train.dtype]
    state = max(4, compute)  # bfloat16 keeps float32 weights, gradients and moments
    of_state, tensor = state_of(spec.model, degrees, spec.train.optimizer.name), degrees.tensor
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
    optimizer = state * of_state.optimizer
    reduced = 0
    if degrees.num_workers > 1:
        reduced = of_state.held.dense if degrees.fsdp == 1 else of_state.gathered.dense
    if degrees.expert_fsdp > 1:
        reduced += of_state.gathered.in_experts
    elif degrees.data > 1:
        reduced = max(reduced, of_state.held.in_experts)  # one after the other
    # Weights narrowed where they are used stay until the backward pass: of what is gathered for it, all.
    narrowed = 0
    if compute < state and recompute != "full":
        narrowed = compute * of_state.used.both
    elif compute < state:
        narrowed = compute * of_state.held.both
    return MemoryEstimate(
        parameters=state * of_state.held.both + narrowed,
        gradients=state * of_state.held.both,
        optimizer=optimizer,
        activations=activations,
        dispatch=dispatch,
        logits=logits,
        communication=state * reduced,
        staging=state * of_state.held.both + optimizer if on_cpu else 0,
        limit=limit_bytes,
    )
