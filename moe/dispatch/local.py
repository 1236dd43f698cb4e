"""Dispatch where this rank holds every expert."""

from torch import Tensor

from moe.dispatch.dispatcher import Dispatcher
from moe.dispatch.permute import pad, rows_to_tokens, tokens_to_rows
from moe.experts import Experts
from moe.routing import Assignments


class LocalDispatcher(Dispatcher):
    """Sort by expert, run each expert on its rows, add up."""

    def __call__(self, x: Tensor, assignments: Assignments, experts: Experts) -> Tensor:
        counts = assignments.load.tolist()
        padded = experts.padded(counts)
        assignments = pad(assignments, counts, padded)
        outputs = experts(tokens_to_rows(x, assignments), assignments.weight, padded)
        return rows_to_tokens(outputs, assignments)
