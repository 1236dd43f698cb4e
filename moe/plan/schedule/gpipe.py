"""GPipe (arXiv 1811.06965): all forward passes, then all backward passes."""

from moe.plan.schedule.action import Action, Order


def gpipe(rank: int, num_micro_batches: int) -> Order:
    """Actions of a rank with one stage. All `m` micro-batches are in flight; the bubble is `(p - 1)(F + B)`."""
    micro_batches = range(num_micro_batches)
    return (
        *(Action("forward", rank, micro_batch) for micro_batch in micro_batches),
        *(Action("backward", rank, micro_batch) for micro_batch in micro_batches),
    )
