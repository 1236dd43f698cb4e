"""Floating-point operations of a model."""

from moe.plan.cost.units import BACKWARD, Part, Unit, units
from moe.plan.profile import profile_of
from moe.spec import JobSpec, PreferenceSpec
from moe.spec.block import AttentionDims


def model_flops_per_step(spec: JobSpec) -> float:
    """Floating-point operations of one step, forward and backward, without recomputation: of projections, experts that
    tokens choose, attention over the pairs that are looked at, and logits.

    A matrix that is not trained has no gradient of its own, adapters' products count beside those of their base, and
    preferences take one forward pass more: what is counted is what has to be computed. Counted as for whole sequences
    of one document; a run of packed documents does fewer."""
    flops, width = 0.0, spec.model.model_dim
    of_reference = int(isinstance(spec.data, PreferenceSpec))
    for unit in units(spec.model, profile_of(), spec.train.freeze):
        positions = spec.train.batch_tokens / unit.sides

        def times(part: Part, unit: Unit = unit) -> float:
            """Passes of one part's products, as a fraction of a forward pass and its whole backward pass."""
            of = unit.products(part)
            return (of_reference + of.forward + unit.has_backward * of.backward) / _PASSES

        pairs_times = (of_reference + 1 + unit.has_backward * BACKWARD) / _PASSES
        router_times = (of_reference + 1 + unit.has_backward * (1 + unit.trains_router)) / _PASSES
        per_position = 0.0
        for attention in unit.attentions:
            pairs = pairs_times * pairs_flops(attention, looked_at(attention, spec.data.padded_tokens))
            per_position += times("others") * 2 * attention.projections + pairs
        if unit.feed_forward is not None:
            products = 2 * unit.feed_forward.num_matrices * width * unit.feed_forward.hidden
            per_position += times("feed_forward") * products
        if (moe := unit.moe) is not None:
            of_experts = times("experts") * moe.num_matrices * moe.experts_per_token * moe.hidden_dim
            of_shared = times("feed_forward") * moe.num_matrices * (moe.shared_hidden_dim or 0)
            per_position += 2 * width * (of_experts + of_shared + router_times * moe.num_experts)
        if unit.vocabulary is not None:
            per_position += times("others") * 2 * width * unit.vocabulary
        flops += positions * per_position
    return _PASSES * flops


_PASSES = 1 + BACKWARD
"""Forward passes that a step takes where everything is trained."""


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
