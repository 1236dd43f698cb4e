"""Synthetic global batches of packed sequences: documents of many lengths in a row, and padding after them."""

import numpy as np
import torch
from torch import Tensor

from moe.data.sequences import SequenceBatchPart
from moe.data.sequences.store import SequenceRows
from moe.data.sequences.unpaired import UnpairedPart, mismatched_rows
from moe.parallel import Layout
from moe.plan import Plan
from moe.routing import BatchCounts
from moe.tasks.batch_context import BatchContext
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.task import RankBatch

LONGEST_DOCUMENT = 7


ALL, SOME, PAIRS, ANSWERS = "all", "some", "pairs", "answers"
"""Labels of a batch that are learned: all; some, as in conversations; or, by some labels, which one of each pair of
documents is preferred, or whether each document is desirable."""


def global_sequences(num_rows: int, length: int, vocabulary: int, step_number: int, learned: str = ALL) -> SequenceRows:
    """The rows of a step. The first is one document (or a pair); the second and every fifth after it are padded at the
    end; the others are full, except that pairs leave out a last document without a partner."""
    generator = torch.Generator().manual_seed(2000 + step_number % 2)  # two batches in turn, to be learned

    def random_ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    tokens, labels = random_ints(4, vocabulary, num_rows, length), random_ints(4, vocabulary, num_rows, length)
    documents = torch.zeros(num_rows, length, dtype=torch.int32)
    if learned == PAIRS:
        documents[0, length // 3 :] = 1
    for row in range(1, num_rows):
        begins = torch.zeros(length, dtype=torch.int32)
        start = 0
        while (start := start + int(random_ints(1, LONGEST_DOCUMENT + 1, 1))) < length:
            begins[start] = 1
        documents[row] = begins.cumsum(0)
        if row % 5 == 1:
            documents[row, int(random_ints(1, length + 1, 1)) :] = -1
    goes_on = documents[:, 1:] == documents[:, :-1]
    labels[:, :-1] = torch.where(goes_on, tokens[:, 1:], labels[:, :-1])  # otherwise the label of a document's end
    if learned == PAIRS:
        last = documents.max(1, keepdim=True).values
        documents = torch.where((last % 2 == 0) & (documents == last), -1, documents)
    if learned != ALL:
        labels = labels.masked_fill(random_ints(0, 3, num_rows, length) == 0, -1)
    if learned == ANSWERS:  # each has a label at its end
        ends = torch.ones_like(documents, dtype=torch.bool)
        ends[:, :-1] = documents[:, 1:] != documents[:, :-1]
        labels = torch.where(ends, tokens, labels)
    tokens, labels = tokens.masked_fill(documents < 0, 0), labels.masked_fill(documents < 0, -1)
    return SequenceRows(tokens.numpy(), documents.numpy(), labels.numpy())


def unpaired_part(rows: SequenceRows, row_slice: slice, *, estimates_kl: bool) -> UnpairedPart:
    """Labels of some rows of a global batch, every third document's undesirable, and their mismatched rows."""
    own, previous = (
        SequenceRows(*(field[row_slice] for field in part))
        for part in (rows, SequenceRows(*(np.roll(field, 1, 0) for field in rows)))
    )
    numbers = np.arange(row_slice.start, row_slice.stop)[:, None] + np.arange(own.documents.max(initial=0) + 1)
    return UnpairedPart(numbers % 3 != 0, mismatched_rows(own, previous) if estimates_kl else None)


def rank_sequences(
    layout: Layout,
    plan: Plan,
    num_groups: int,
    rows_per_group: int,
    rows: SequenceRows,
    step_number: int,
    learned: str = ALL,
) -> RankBatch:
    """This rank's micro-batches of a global batch, which are pairs or labelled answers if `learned` says so."""
    local_groups, groups_per_micro_batch = layout.local_groups(num_groups), plan.options.micro_batch_groups
    num_tokens = int((rows.documents >= 0).sum())
    counts = BatchCounts(num_groups, num_groups * rows_per_group, num_tokens)
    micro_batches = []
    for index in range(plan.options.num_micro_batches):
        first = min(local_groups.start + index * groups_per_micro_batch, local_groups.stop)
        row_slice = slice(
            first * rows_per_group, min(first + groups_per_micro_batch, local_groups.stop) * rows_per_group
        )
        context = BatchContext(step_number, 5, True, row_slice.start, rows_per_group, counts)
        unpaired = unpaired_part(rows, row_slice, estimates_kl=True) if learned == ANSWERS else None
        part = SequenceBatchPart(row_slice.start, *(field[row_slice] for field in rows), unpaired)
        micro_batches.append(SequencesBatch.from_part(part, context, layout))
    num_targets = int((rows.labels >= 0).sum())
    if learned == PAIRS:
        num_targets = int(((rows.documents.max(1) + 1) // 2).sum())
    if learned == ANSWERS:
        num_targets = int((rows.documents.max(1) + 1).sum())
    return RankBatch(step_number, micro_batches, num_targets, num_tokens)
