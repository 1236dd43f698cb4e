"""Local dispatch, for a rank that holds every expert."""

from functools import partial

from torch import Tensor

from moe.dispatch.dispatcher import DirectDispatcher
from moe.dispatch.permute import pad, rows_to_tokens, tokens_to_rows
from moe.experts import LocalExperts, feed_forward
from moe.routing import Assignments


class LocalDispatcher(DirectDispatcher):
    """Sorts rows by expert, runs each expert on its rows, and sums the outputs by token."""

    def counts(self, load: Tensor) -> Tensor:
        return load[:0]

    def carry(self, x: Tensor, assignments: Assignments, counts: Tensor, experts: LocalExperts) -> Tensor:
        work = experts.work_on(assignments.counts)
        assignments = pad(assignments, assignments.counts, work.counts)
        run = partial(feed_forward, work=work)
        outputs = experts(tokens_to_rows(x, assignments), assignments.weight, run)
        return rows_to_tokens(outputs, assignments)
