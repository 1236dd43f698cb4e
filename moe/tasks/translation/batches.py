"""Micro-batches of sentence pairs: one rank's part of each global batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.data.pairs import PairBatchPart, Sampler, TokenStore
from moe.data.tokenizer import PAD
from moe.parallel import Layout
from moe.parallel.accelerator import accelerator
from moe.plan import Plan
from moe.routing import BatchCounts
from moe.spec import JobSpec
from moe.tasks.batch_context import BatchContext, label_positions
from moe.tasks.task import RankBatch


@dataclass(frozen=True)
class PairsBatch:
    """Token groups of one micro-batch; possibly none."""

    source: Tensor
    """int64 [b, L]"""
    target_in: Tensor
    """int64 [b, N]"""
    target_out: Tensor
    """int64 [b, N]: next token of each position of `target_in`."""
    context: BatchContext
    label_positions: Tensor | None = None
    """int64 `[n]`: positions that predict a token, in this tensor rank's share of `target_out`; None: not known yet."""

    @classmethod
    def from_part(cls, part: PairBatchPart, context: BatchContext, layout: Layout) -> "PairsBatch":
        """Move a part of a global batch to the layout's device."""
        source, target_in, target_out = (
            accelerator(layout.device).take(torch.from_numpy(rows))
            for rows in (part.source, part.target_in, part.target_out)
        )
        return cls(source, target_in, target_out, context, label_positions(part.target_out, PAD, layout))

    @classmethod
    def dummy_batch(cls, num_rows: int, num_tokens: int, vocab_size: int, layout: Layout) -> "PairsBatch":
        """Random rows on both sides, as one token group."""
        tokens = torch.randint(5, vocab_size, (num_rows, num_tokens), device=layout.device)
        return cls(tokens, tokens, tokens, BatchContext(rows_per_group=num_rows))


class PairsBatches:
    """Function from step to this rank's batch."""

    def __init__(self, store: TokenStore, spec: JobSpec, plan: Plan, layout: Layout) -> None:
        self._sampler = Sampler(store, spec)
        self._seed, self._options, self._layout = spec.train.seed, plan.options, layout

    def __call__(self, step: int) -> RankBatch[PairsBatch]:
        """Batch of `step`, with the same number of micro-batches on every rank; some may be empty."""
        batch = self._sampler.batch(step)
        source_counts, target_counts = (
            BatchCounts(batch.num_groups, batch.num_groups * batch.rows_per_group, num_tokens)
            for num_tokens in (batch.num_source_tokens, batch.num_target_tokens)
        )
        own_groups, micro_batch_groups = (self._layout.local_groups(batch.num_groups), self._options.micro_batch_groups)
        micro_batches = []
        for index in range(self._options.num_micro_batches):
            first = min(own_groups.start + index * micro_batch_groups, own_groups.stop)
            part = batch.part(first, min(first + micro_batch_groups, own_groups.stop))
            context = BatchContext(
                step, self._seed, True, part.first_row, batch.rows_per_group, target_counts, source_counts
            )
            micro_batches.append(PairsBatch.from_part(part, context, self._layout))
        return RankBatch(step, micro_batches, batch.num_target_tokens, batch.num_tokens)
