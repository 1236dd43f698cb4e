"""ZB-H1 (arXiv 2401.10241, section 2.2): 1F1B whose weight gradients fill the bubble."""

from moe.plan.schedule.action import Action, Order


def zero_bubble(rank: int, num_ranks: int, num_micro_batches: int) -> Order:
    """Actions of a rank with one stage.

    Rank `r` runs 1F1B with input gradients alone, and its weight gradients `r` micro-batches later. So every rank has
    at most `p` micro-batches in flight, as 1F1B's first rank has; the bubble is `(p - 1)(F + B - W)` instead of
    1F1B's `(p - 1)(F + B + W)`, where B and W are the input and weight gradients, as long as W is not longer than F.
    """
    warm_up, delay = min(num_ranks - rank - 1, num_micro_batches), min(rank, num_micro_batches)
    order = [Action("forward", rank, micro_batch) for micro_batch in range(warm_up)]
    for micro_batch in range(num_micro_batches):
        if micro_batch + warm_up < num_micro_batches:
            order.append(Action("forward", rank, micro_batch + warm_up))
        order.append(Action("backward_input", rank, micro_batch))
        if micro_batch >= delay:
            order.append(Action("backward_weight", rank, micro_batch - delay))
    order += [
        Action("backward_weight", rank, micro_batch)
        for micro_batch in range(num_micro_batches - delay, num_micro_batches)
    ]
    return tuple(order)
