"""Floating-point operations of a model."""

from moe.plan.cost.units import BACKWARD, units
from moe.plan.profile import profile_of
from moe.spec import JobSpec
from moe.spec.block import AttentionDims


def model_flops_per_step(spec: JobSpec) -> float:
    """Floating-point operations of one step, forward and backward (3 times forward), without recomputation: of
    projections, experts that tokens choose, attention over the pairs that are looked at, and logits.

    Counted as for whole sequences of one document, and with the gradients of all weights, without adapters: a run of
    packed documents, or with frozen weights, does fewer."""
    flops, width = 0.0, spec.model.model_dim
    for unit in units(spec.model, profile_of()):
        positions = spec.train.batch_tokens / unit.sides
        per_position = 0.0
        for each in unit.attentions:
            per_position += 2 * each.projections + pairs_flops(each, looked_at(each, spec.data.padded_tokens))
        if unit.feed_forward is not None:
            per_position += 2 * unit.feed_forward.num_matrices * width * unit.feed_forward.hidden
        if (moe := unit.moe) is not None:
            chosen = moe.experts_per_token * moe.hidden_dim + (moe.shared_hidden_dim or 0)
            per_position += 2 * width * (moe.num_matrices * chosen + moe.num_experts)
        if unit.vocabulary is not None:
            per_position += 2 * width * unit.vocabulary
        flops += positions * per_position
    return (1 + BACKWARD) * flops


def looked_at(dims: AttentionDims, sequence_tokens: float) -> float:
    """Positions that a query looks at, on average: with a window W of L positions, W - W²/2L, as those before the W-th
    have fewer behind them. Of a state, those of its chunk."""
    if dims.linear:
        return min(sequence_tokens, float(dims.chunk))
    length = min(sequence_tokens, float(dims.window or sequence_tokens))
    return length - length**2 / (2 * sequence_tokens) if dims.causal else length


def pairs_flops(dims: AttentionDims, positions: float) -> float:
    """Of one query that looks at so many positions: scores and the weighing of values.

    Of a gated delta rule in chunks of so many (arXiv 2412.06464, section 3.3): the state is read for queries and for
    keys, and written; a chunk's keys meet each other and its queries, its system is solved for values and for what
    meets the state, and what is written is weighed.
    """
    if dims.linear:
        of_state = 6.0 * dims.keys * dims.linear
        return of_state + positions * (2.0 * dims.queries + dims.keys + 3.0 * dims.values)
    return 2.0 * (dims.queries + dims.values) * positions
