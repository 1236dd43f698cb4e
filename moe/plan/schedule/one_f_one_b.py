"""1F1B, also PipeDream-Flush (arXiv 2104.04473, section 2.2.1): one forward pass, one backward pass."""

from moe.plan.schedule.action import Action, Order


def one_f_one_b(rank: int, num_ranks: int, num_micro_batches: int, ahead: int = 0) -> Order:
    """Actions of a rank with one stage.

    At most `p - rank` micro-batches are in flight, however many there are; the bubble is `(p - 1)(F + B)`, as GPipe's.
    `ahead`: forward passes that precede the backward pass which they would follow.
    """
    warm_up = min(num_ranks - rank - 1 + ahead, num_micro_batches)
    order = [Action("forward", rank, micro_batch) for micro_batch in range(warm_up)]
    for micro_batch in range(num_micro_batches):
        if micro_batch + warm_up < num_micro_batches:
            order.append(Action("forward", rank, micro_batch + warm_up))
        order.append(Action("backward", rank, micro_batch))
    return tuple(order)
