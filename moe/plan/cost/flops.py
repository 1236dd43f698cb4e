"""Model FLOPs."""

from moe.plan.cost.units import BACKWARD, Part, Unit, units
from moe.plan.profile import find_profile
from moe.spec import JobSpec
from moe.spec.block import AttentionDims


def model_flops_per_step(spec: JobSpec) -> float:
    """Model FLOPs of one step, forward and backward, without recomputation: projections, chosen experts, attention
    over unmasked pairs, logits.

    Frozen matrices have no weight gradient, adapters are added to their base, and a reference model adds a forward
    pass, a KL estimate two more. A sequence counts as one document; packed documents have fewer pairs.
    """
    flops, width = 0.0, spec.model.model_dim
    num_reference_passes = spec.num_extra_passes
    for unit in units(spec.model, find_profile(), spec.train.freeze):
        positions = spec.train.batch_tokens / unit.sides

        def times(part: Part, unit: Unit = unit) -> float:
            """Forward passes of all products of one part, over those of a fully trained step."""
            products = unit.products(part)
            return (num_reference_passes + products.forward + unit.has_backward * products.backward) / _PASSES

        pairs_times = (num_reference_passes + 1 + unit.has_backward * BACKWARD) / _PASSES
        router_times = (num_reference_passes + 1 + unit.has_backward * (1 + unit.trains_router)) / _PASSES
        per_position = 0.0
        for attention in unit.attentions:
            pairs = pairs_times * pairs_flops(attention, attended_positions(attention, spec.data.padded_tokens))
            per_position += times("others") * 2 * attention.projections + pairs
            per_position += (
                index_flops(attention, spec.data.padded_tokens)
                / _PASSES
                * (num_reference_passes + 1 + BACKWARD * trains_indexer(attention))
            )
        if unit.feed_forward is not None:
            products = 2 * unit.feed_forward.num_matrices * width * unit.feed_forward.hidden
            per_position += times("feed_forward") * products
        if (moe := unit.moe) is not None:
            experts = moe.num_matrices * moe.experts_per_token * moe.hidden_dim * moe.expert_dim
            every_token = width * (moe.num_matrices * (moe.shared_hidden_dim or 0) + 2 * (moe.latent_dim or 0))
            terms = times("experts") * experts + times("feed_forward") * every_token
            per_position += 2 * (terms + width * router_times * moe.num_experts)
        if unit.vocabulary is not None:
            per_position += times("others") * 2 * width * unit.vocabulary
        flops += positions * per_position
    return _PASSES * flops


_PASSES = 1 + BACKWARD
"""Cost of a step in forward passes if everything is trained."""


def attended_positions(dims: AttentionDims, sequence_tokens: float) -> float:
    """Mean positions that a query attends to: with a causal window W of L positions, or W selected ones, W - W²/2L, as
    the first W queries have fewer; in chunks of C, C/2. For linear attention, a chunk."""
    if dims.chunk:
        return min(sequence_tokens, float(dims.chunk))
    length = min(sequence_tokens, float(dims.window or sequence_tokens))
    if dims.in_chunks:
        sequence_tokens = length
    if dims.selection is not None and dims.selects(sequence_tokens):
        length = float(dims.selection.top_k)
    return length - length**2 / (2 * sequence_tokens) if dims.causal else length


def pairs_flops(dims: AttentionDims, positions: float) -> float:
    """FLOPs of one query over `positions` keys: scores and the weighted sum of values, or the state and chunk of linear
    attention."""
    if dims.chunk:
        return dims.state_flops + positions * dims.chunk_flops
    return 2.0 * (dims.queries + dims.values) * positions


def trains_indexer(dims: AttentionDims) -> bool:
    """Whether the layer has an indexer with a loss."""
    return dims.selection is not None and dims.selection.is_trained and dims.selection.heads > 0


def index_flops(dims: AttentionDims, sequence_tokens: float) -> float:
    """FLOPs of one query's index scores, of all earlier tokens; 0 if nothing needs them."""
    if dims.selection is None or not (dims.selects(sequence_tokens) or trains_indexer(dims)):
        return 0.0
    return 2.0 * dims.selection.heads * dims.selection.head_dim * sequence_tokens / 2
