"""This rank's share of each global batch, made ready one step ahead of the step that needs it."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.data.pairs import Sampler, TokenStore
from moe.parallel import Layout
from moe.plan import Plan
from moe.routing import BatchCounts
from moe.spec import JobSpec
from moe.tasks.translation import BatchContext
from moe.train.background import Background


@dataclass(frozen=True)
class MicroBatch:
    """Whole groups that one forward and backward pass takes; possibly none."""

    source: Tensor
    """int64 [b, L]"""
    target_in: Tensor
    """int64 [b, N]"""
    target_out: Tensor
    """int64 [b, N]: the token after each of `target_in`."""
    context: BatchContext


@dataclass(frozen=True)
class RankBatch:
    """One rank's micro-batches of the global batch of a step, with the counts that its losses divide by."""

    step: int
    micro_batches: list[MicroBatch]
    source: BatchCounts
    """Of the global batch, as are the targets'."""
    target: BatchCounts

    @property
    def num_tokens(self) -> int:
        """Real tokens on both sides, padding left out."""
        return self.source.num_tokens + self.target.num_tokens


class BatchesAhead:
    """Hands out the batches of a run in order of steps, while a thread makes the next one ready."""

    def __init__(self, store: TokenStore, spec: JobSpec, plan: Plan, layout: Layout) -> None:
        self._sampler = Sampler(store, spec)
        self._seed, self._plan, self._layout = spec.train.seed, plan, layout
        self._ahead: tuple[int, Background[RankBatch]] | None = None
        self.waited_s = 0.0
        """How long the last `take` waited for its batch."""

    def take(self, step: int) -> RankBatch:
        """The batch of `step`; the one after it is begun. Raises what making the batch raised."""
        began = time.perf_counter()
        if self._ahead is not None and self._ahead[0] == step:
            batch = self._ahead[1].result()
        else:
            batch = self._make(step)
        self.waited_s = time.perf_counter() - began
        self._ahead = (step + 1, Background(lambda: self._make(step + 1), "next-batch"))
        return batch

    def close(self) -> None:
        """Wait for the batch that is being made and nobody will take."""
        if self._ahead is not None:
            self._ahead[1].wait()

    def _make(self, step: int) -> RankBatch:
        """Every rank makes the same number of micro-batches: those with fewer groups have empty ones."""
        batch = self._sampler.batch(step)
        source_counts, target_counts = (
            BatchCounts(batch.num_groups, batch.num_groups * batch.rows_per_group, num_tokens)
            for num_tokens in (batch.num_source_tokens, batch.num_target_tokens)
        )
        here, each = self._layout.groups_here(batch.num_groups), self._plan.micro_batch_groups
        micro_batches = []
        for index in range(self._plan.num_micro_batches):
            first = min(here.start + index * each, here.stop)
            part = batch.part(first, min(first + each, here.stop))
            context = BatchContext(
                step, self._seed, True, part.first_row, batch.rows_per_group, source_counts, target_counts
            )
            source, target_in, target_out = (
                torch.from_numpy(rows).to(self._layout.device)
                for rows in (part.source, part.target_in, part.target_out)
            )
            micro_batches.append(MicroBatch(source, target_in, target_out, context))
        return RankBatch(step, micro_batches, source_counts, target_counts)
