"""Turns of pipeline ranks: one action, or two that take place side by side."""

from moe.plan.schedule.action import Action, Order
from moe.plan.schedule.by_name import can_pair_passes, schedule
from moe.spec.parallel import PipelineSchedule

Turn = tuple[Action, ...]
"""An action; or a forward pass, and a backward pass of another micro-batch."""


def schedule_turns(
    name: PipelineSchedule, num_ranks: int, virtual_stages: int, num_micro_batches: int, *, side_by_side: bool
) -> tuple[tuple[Turn, ...], ...]:
    """Return the turns of each pipeline rank, in order, for one step.

    `side_by_side`: where the schedule allows it (`can_pair_passes`), a forward pass runs beside a backward pass, so
    that the exchanges of each can overlap with the computation of the other. For that every rank runs one forward
    pass ahead, and keeps its activations; otherwise one of two ranks would wait for the end of the other's turn, and
    that for its own.
    """
    if not side_by_side or not can_pair_passes(name, num_ranks):
        orders = schedule(name, num_ranks, virtual_stages, num_micro_batches)
        return tuple(_single(order) for order in orders)
    in_rounds = -(-num_micro_batches // num_ranks) * num_ranks
    orders, orders_ahead = (schedule(name, num_ranks, virtual_stages, in_rounds, ahead=ahead) for ahead in (0, 1))
    turns_in_rounds = [
        _paired(ahead) if _alternates(order) else _single(order)
        for order, ahead in zip(orders, orders_ahead, strict=True)
    ]
    return tuple(_without_padding(turns, num_micro_batches) for turns in turns_in_rounds)


def _single(order: Order) -> tuple[Turn, ...]:
    return tuple((action,) for action in order)


def _alternates(order: Order) -> bool:
    """Whether a forward pass follows a backward pass."""
    kinds = [action.kind for action in order]
    return "forward" in kinds[kinds.index("backward") :]


def _paired(order: Order) -> tuple[Turn, ...]:
    """Pairs of a forward pass and the backward pass that follows it, and single actions."""
    turns, index = list[Turn](), 0
    while index < len(order):
        is_pair = [action.kind for action in order[index : index + 2]] == ["forward", "backward"]
        turns.append(order[index : index + 1 + is_pair])
        index += len(turns[-1])
    return tuple(turns)


def _without_padding(turns: tuple[Turn, ...], num_micro_batches: int) -> tuple[Turn, ...]:
    """Turns without the micro-batches from `num_micro_batches` on."""
    remaining = [tuple(action for action in turn if action.micro_batch < num_micro_batches) for turn in turns]
    return tuple(turn for turn in remaining if turn)
