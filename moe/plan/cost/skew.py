"""Load skew of ranks under expert parallelism."""

from moe.spec import MoESpec


def rank_skew(load_skew: float, moe: MoESpec, expert: int) -> float:
    """Rows of the busiest rank over the mean; `load_skew` is the same for experts.

    Averaging over a rank's experts divides the excess by the square root of their number, as for independent loads.
    The capacity bounds it.
    """
    local_experts = max(1, moe.num_experts // expert)
    skew = 1 + (load_skew - 1) / local_experts**0.5 if expert > 1 else 1.0
    limit = moe.routing.max_load(moe.num_experts)
    return skew if limit is None else max(1.0, min(skew, limit))
