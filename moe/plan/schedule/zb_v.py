"""ZB-V (arXiv 2401.10241, section 6): two virtual stages a rank, in the order of a V."""

from moe.plan.schedule.action import Action, ActionKind, Order, without_padding


def zb_v(rank: int, num_ranks: int, num_micro_batches: int) -> Order:
    """Actions of a rank with the stages `rank`, on the way down, and `2p - 1 - rank`, on the way up.

    The first rank has the first and the last stage, so that a micro-batch's backward pass starts where its forward
    pass ends. If F, B and W take the same time no rank idles between its first and last action. Every rank has at most
    `2p` activations of one stage in flight, the memory of 1F1B's first rank. The schedule is of `2p - 1` or more
    micro-batches; of fewer it leaves the actions of the others out.
    """
    total = max(2 * num_ranks - 1, num_micro_batches)
    down, up = _Stage(rank), _Stage(2 * num_ranks - 1 - rank)
    order: list[Action] = [down.next("forward") for _ in range(2 * (num_ranks - rank) - 1)]
    for _ in range(rank):
        order += (up.next("forward"), down.next("forward"))
    for _ in range(num_ranks - rank):
        order += (up.next("forward"), *up.backward())
    while up.passes("forward") < total:  # steady state
        if down.passes("forward") < total:
            order.append(down.next("forward"))
        order += (*down.backward(), up.next("forward"), *up.backward())
    for _ in range(rank):
        order += (down.next("backward_input"), up.next("backward_input"))
    for _ in range(num_ranks - rank):
        order += (down.next("backward_input"), down.next("backward_weight"))
    for stage in (up, down):
        while stage.passes("backward_weight") < total:
            order.append(stage.next("backward_weight"))
    return without_padding(order, num_micro_batches)


class _Stage:
    """A stage with the number of micro-batches that it has passed, by kind of action."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._passes: dict[ActionKind, int] = {}

    def passes(self, kind: ActionKind) -> int:
        return self._passes.get(kind, 0)

    def next(self, kind: ActionKind) -> Action:
        """Return the action of this kind on the next micro-batch."""
        micro_batch = self.passes(kind)
        self._passes[kind] = micro_batch + 1
        return Action(kind, self._stage, micro_batch)

    def backward(self) -> tuple[Action, Action]:
        return self.next("backward_input"), self.next("backward_weight")
