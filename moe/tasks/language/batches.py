"""Micro-batches of packed sequences: one rank's part of each global batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.data.sequences import SequenceBatchPart, SequenceSampler, SequenceStore
from moe.data.sequences.store import SequenceRows
from moe.parallel import Layout
from moe.parallel.accelerator import accelerator
from moe.plan import Plan
from moe.plan.candidate import Options
from moe.routing import BatchCounts
from moe.spec import JobSpec
from moe.tasks.batch_context import BatchContext, label_positions
from moe.tasks.task import RankBatch

IGNORE_INDEX = -1
"""Label of positions that predict no token."""


@dataclass(frozen=True)
class SequencesBatch:
    """Token groups of one micro-batch; possibly none."""

    tokens: Tensor
    """int64 `[b, L]`"""
    labels: Tensor
    """int64 `[b, L]`: next token of each position, -1 for none."""
    context: BatchContext
    label_positions: Tensor | None = None
    """int64 `[n]`: positions that predict a token, in this rank's share of the labels; None: not known yet."""
    projects_all: bool = False
    """Whether the loss projects all positions, so that shapes do not depend on the labels."""
    desirable: Tensor | None = None
    """bool `[b, P]`: labels of answers, of the documents of each row; None without them."""
    mismatched: "SequencesBatch | None" = None
    """For a KL estimate: the same prompts with completions of other records, for evaluation."""
    kl: Tensor | None = None
    """Scalar: KL estimate of the global batch, once it is known."""

    @classmethod
    def from_part(
        cls, part: SequenceBatchPart | SequenceRows, context: BatchContext, layout: Layout
    ) -> "SequencesBatch":
        """Move a part of a global batch to the layout's device and set the documents of `context`."""
        tokens, labels, documents = (
            accelerator(layout.device).take(torch.from_numpy(array))
            for array in (part.tokens, part.labels, part.documents)
        )
        # Rows that are one document each need only the causal mask.
        in_documents = documents if part.documents.any() else None
        positions = label_positions(part.labels, IGNORE_INDEX, layout)
        batch = cls(tokens, labels, context.with_documents(in_documents), positions)
        if not isinstance(part, SequenceBatchPart) or part.unpaired is None:
            return batch
        desirable, rows = torch.from_numpy(part.unpaired.desirable), part.unpaired.mismatched
        batch = replace(batch, desirable=accelerator(layout.device).take(desirable))
        if rows is None:
            return batch
        mismatched = cls.from_part(rows, replace(context, counts=None), layout)
        return replace(batch, mismatched=mismatched.for_evaluation())

    def for_evaluation(self) -> "SequencesBatch":
        """The same rows for evaluation, one row per token group."""
        context = replace(self.context, training=False, rows_per_group=1, counts=None)
        return replace(self, context=context)

    def graph_inputs(self, num_targets: int) -> tuple["SequencesBatch", Tensor]:
        """(the batch, `num_targets` as an int64 scalar), such that batches of the same shapes differ in tensors only:
        numbers that change are in device memory."""
        context = self.context
        assert isinstance(context.step, int)
        assert isinstance(context.first_row, int)
        numbers = [num_targets, context.step, context.first_row]
        if context.counts is not None:
            assert isinstance(context.counts.num_tokens, int)
            numbers.append(context.counts.num_tokens)
        targets, step, first_row, *num_tokens = accelerator(self.tokens.device).numbers(numbers).unbind()
        counts = None if context.counts is None else replace(context.counts, num_tokens=num_tokens[0])
        context = replace(context, step=step, first_row=first_row, counts=counts)
        return replace(self, context=context, label_positions=None, projects_all=True), targets

    @classmethod
    def dummy_batch(cls, num_rows: int, num_tokens: int, vocab_size: int, layout: Layout) -> "SequencesBatch":
        """Random rows as one token group."""
        tokens = torch.randint(vocab_size, (num_rows, num_tokens), device=layout.device)
        return cls(tokens, tokens, BatchContext(rows_per_group=num_rows))


class SequencesBatches:
    """Function from step to this rank's batch."""

    def __init__(self, store: SequenceStore, spec: JobSpec, plan: Plan, layout: Layout) -> None:
        self._sampler = SequenceSampler(store, spec)
        self._seed, self._options, self._layout = spec.train.seed, plan.options, layout

    def __call__(self, step: int) -> RankBatch[SequencesBatch]:
        """Batch of `step`, with the same number of micro-batches on every rank; some may be empty."""
        batch = self._sampler.batch(step)
        counts = BatchCounts(batch.num_groups, batch.num_groups * batch.rows_per_group, batch.num_tokens)
        micro_batches = micro_batches_of(batch.part, step, self._seed, counts, self._options, self._layout)
        return RankBatch(step, micro_batches, batch.num_targets, batch.num_tokens)


def micro_batches_of(
    part: Callable[[int, int], SequenceBatchPart],
    step: int,
    seed: int,
    counts: BatchCounts,
    options: Options,
    layout: Layout,
) -> list[SequencesBatch]:
    """This rank's micro-batches of a step, some possibly empty. `part` returns the rows of token groups, from the first
    to the last (exclusive); `counts` are those of the global batch."""
    own_groups, rows_per_group = layout.local_groups(counts.num_groups), counts.num_sequences // counts.num_groups
    micro_batches = []
    for index in range(options.num_micro_batches):
        first = min(own_groups.start + index * options.micro_batch_groups, own_groups.stop)
        rows = part(first, min(first + options.micro_batch_groups, own_groups.stop))
        context = BatchContext(step, seed, True, rows.first_row, rows_per_group, counts)
        micro_batches.append(SequencesBatch.from_part(rows, context, layout))
    return micro_batches
