"""Interleaved 1F1B (arXiv 2104.04473, section 2.2.2): 1F1B over several virtual stages a rank."""

from moe.plan.schedule.action import Action, Order, without_padding


def interleaved(rank: int, num_ranks: int, virtual_stages: int, num_micro_batches: int, ahead: int = 0) -> Order:
    """Actions of a rank with the stages `rank, p + rank, 2p + rank, ...`.

    Micro-batches pass in rounds of `p`, each through all virtual stages before the next. The paper asks for whole
    rounds; here a last round with fewer micro-batches leaves the actions of the others out, so that any number can be
    run, but with the bubble of whole rounds. At most `2(p - rank - 1) + (v - 1)p + 1` activations of one stage are in
    flight; the bubble is `(p - 1)(F + B)` of one stage, which is a v-th of 1F1B's. `ahead`: forward passes that precede
    the backward pass which they would follow.
    """
    num_rounds = -(-num_micro_batches // num_ranks)
    num_passes = num_rounds * num_ranks * virtual_stages
    warm_up = min(2 * (num_ranks - rank - 1) + (virtual_stages - 1) * num_ranks + ahead, num_passes)

    def forward(index: int) -> Action:
        virtual_stage, micro_batch = _place(index)
        return Action("forward", virtual_stage * num_ranks + rank, micro_batch)

    def backward(index: int) -> Action:
        virtual_stage, micro_batch = _place(index)
        return Action("backward", (virtual_stages - 1 - virtual_stage) * num_ranks + rank, micro_batch)

    def _place(index: int) -> tuple[int, int]:
        """Virtual stage, in the order of the pass, and micro-batch of a rank's passes of one direction."""
        round_index, in_round = divmod(index, num_ranks * virtual_stages)
        virtual_stage, micro_batch = divmod(in_round, num_ranks)
        return virtual_stage, round_index * num_ranks + micro_batch

    order = [forward(index) for index in range(warm_up)]
    for index in range(num_passes):
        if index + warm_up < num_passes:
            order.append(forward(index + warm_up))
        order.append(backward(index))
    return without_padding(order, num_micro_batches)
