"""Skew of the loads that routing gives to ranks."""

from moe.spec import MoESpec


def rank_skew(load_skew: float, moe: MoESpec, expert: int) -> float:
    """Rows of the busiest rank over the mean, where `load_skew` is that of the busiest expert.

    The experts of a rank even one another out: what the busiest one has too much shrinks with the root of how many
    there are, as for independent loads. A capacity bounds it.
    """
    local_experts = max(1, moe.num_experts // expert)
    skew = 1 + (load_skew - 1) / local_experts**0.5 if expert > 1 else 1.0
    limit = moe.routing.max_load(moe.num_experts)
    return skew if limit is None else max(1.0, min(skew, limit))
