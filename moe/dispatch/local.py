"""Dispatch where this rank holds every expert."""

from torch import Tensor

from moe.dispatch.dispatcher import Dispatcher
from moe.dispatch.permute import rows_to_tokens, tokens_to_rows
from moe.experts import Experts
from moe.routing import Routing


class LocalDispatcher(Dispatcher):
    """Sort by expert, run each expert on its rows, add up."""

    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        rows = tokens_to_rows(x, routing.assignments)
        return rows_to_tokens(experts(rows, routing.load.tolist()), routing.assignments)
