"""Global batches of packed sequences, made up: documents of many lengths in a row, and padding behind them."""

import torch
from torch import Tensor

from moe.data.sequences.store import Rows
from moe.parallel import Layout
from moe.plan import Plan
from moe.routing import BatchCounts
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.context import SequenceContext
from moe.tasks.task import RankBatch

LONGEST_DOCUMENT = 7


def global_sequences(num_rows: int, length: int, vocabulary: int, step_number: int) -> Rows:
    """The rows of a step: the first is one document, the second and every fifth is padded at its end, and the others
    are full."""
    generator = torch.Generator().manual_seed(2000 + step_number % 2)  # two batches in turn, to be learned

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    tokens, labels = drawn(4, vocabulary, num_rows, length), drawn(4, vocabulary, num_rows, length)
    documents = torch.zeros(num_rows, length, dtype=torch.int32)
    for row in range(1, num_rows):
        begins = torch.zeros(length, dtype=torch.int32)
        at = 0
        while (at := at + int(drawn(1, LONGEST_DOCUMENT + 1, 1))) < length:
            begins[at] = 1
        documents[row] = begins.cumsum(0)
        if row % 5 == 1:
            documents[row, int(drawn(1, length + 1, 1)) :] = -1
    goes_on = documents[:, 1:] == documents[:, :-1]
    labels[:, :-1] = torch.where(goes_on, tokens[:, 1:], labels[:, :-1])  # else what ends a document
    tokens, labels = tokens.masked_fill(documents < 0, 0), labels.masked_fill(documents < 0, -1)
    return Rows(tokens.numpy(), documents.numpy(), labels.numpy())


def rank_sequences(
    layout: Layout, plan: Plan, num_groups: int, rows_per_group: int, rows: Rows, step_number: int
) -> RankBatch:
    """This rank's micro-batches of a global batch."""
    here, each = layout.groups_here(num_groups), plan.options.micro_batch_groups
    num_tokens = int((rows.documents >= 0).sum())
    counts = BatchCounts(num_groups, num_groups * rows_per_group, num_tokens)
    micro_batches = []
    for index in range(plan.options.num_micro_batches):
        first = min(here.start + index * each, here.stop)
        of = slice(first * rows_per_group, min(first + each, here.stop) * rows_per_group)
        context = SequenceContext(None, step_number, 5, True, of.start, rows_per_group, counts)
        micro_batches.append(SequencesBatch.of(Rows(*(part[of] for part in rows)), context, layout))
    return RankBatch(step_number, micro_batches, num_tokens, num_tokens)
