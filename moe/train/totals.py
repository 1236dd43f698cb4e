"""Totals of a step, summed over micro-batches and ranks in one all-reduce that also carries signals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.parallel import Layout, collective
from moe.parallel.accelerator import accelerator
from moe.routing import Routing
from moe.tasks.task import IndexerLoss, Loss, RankBatch
from moe.train.moe_layers import MoELayers
from moe.train.signals import Signals
from moe.train.summed_totals import COLUMNS, TRAFFIC_COLUMNS, DeviceTotals, SummedTotals


@dataclass(frozen=True)
class MicroBatchSums:
    """One micro-batch's losses and routing statistics on this rank, in device memory."""

    losses: Tensor
    """`[3]`: objective, negative log-likelihood and the indexers' divergence."""
    layers: tuple[int, ...]
    """Numbers of the MoE layers, which may repeat."""
    rows: Tensor | None
    """float64 `[layers, columns]` of `StepTotals`; None without layers."""
    numbers: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    indexer: IndexerLoss | None

    @classmethod
    def of(cls, loss: Loss, routings: list[tuple[int, Routing]], max_experts: int) -> "MicroBatchSums":
        """Sums of one forward pass. `max_experts`: experts of the largest layer."""
        divergence = torch.zeros_like(loss.nll) if loss.indexer is None else loss.indexer.divergence
        losses = torch.stack((loss.objective.detach(), loss.nll.detach(), divergence))
        rows = _rows_of([routing for _, routing in routings], max_experts) if routings else None
        return cls(losses, tuple(number for number, _ in routings), rows, loss.numbers, loss.means, loss.indexer)


class StepTotals:
    """Sums one step's losses and routing statistics over micro-batches and, in `reduce`, over ranks.

    With sequence parallelism (`shares_tokens`) tensor and context ranks have losses of different tokens, otherwise the
    same losses; in a pipeline, only the last stage has losses. Every rank has a row for each MoE layer of the model,
    zero for layers elsewhere.
    """

    def __init__(self, layers: MoELayers, batch: RankBatch[Any], layout: Layout, *, shares_tokens: bool) -> None:
        self._layers, self._batch, self._layout = layers, batch, layout
        self._counts_tokens = shares_tokens or layout.is_first_with_rows
        """Whether this rank's values of tokens are not those of an earlier rank."""
        self._losses = torch.zeros(3, dtype=torch.float64, device=layout.device)
        self._indexer: IndexerLoss | None = None
        self._max_experts = layers.max_experts
        self._rows = self._losses.new_zeros(len(layers.facts), len(COLUMNS) + 2 * self._max_experts)
        self._numbers: dict[str, Tensor] = {}
        """Scalars of the last micro-batch; a user module has one micro-batch per step."""
        self._means: dict[str, Tensor] = {}
        """Sums and counts `[2]`."""
        self._index = {facts.layer: place for place, facts in enumerate(layers.facts)}

    def add(self, loss: Loss, routings: list[tuple[int, Routing]], *, has_loss: bool = True) -> None:
        """Add a forward pass of one micro-batch, with means weighted by their counts. `has_loss`: whether it ran the
        last pipeline stage."""
        # Tensor and context ranks have the same routing in either case.
        is_first = self._layout.is_first_with_rows
        self.add_sums(MicroBatchSums.of(loss, routings if is_first else [], self._max_experts), has_loss=has_loss)

    def add_sums(self, sums: MicroBatchSums, *, has_loss: bool = True) -> None:
        """Add the sums of `add`."""
        self._numbers |= sums.numbers
        self._indexer = sums.indexer
        counts_loss = self._counts_tokens and has_loss
        if counts_loss:
            self._losses += sums.losses
        elif self._counts_tokens:
            self._losses[2] += sums.losses[2]  # this stage's indexers have a loss of their own
        for name, mean in sums.means.items():
            self._means[name] = self._means.get(name, 0.0) + mean.to(self._losses) * counts_loss
        if sums.rows is not None:
            index = self._to_device([self._index[number] for number in sums.layers], torch.int64)
            self._rows.index_add_(0, index, sums.rows)

    def reduce(self, signals: Signals, grad_norm: Tensor | None = None) -> SummedTotals:
        """Sum the losses, the layers' statistics and the signals over ranks. Collective. `grad_norm` scalar, the same
        on all ranks, joins them, so that all are copied to the host at once."""
        self._add_traffic()
        host_signals, numbers = None, signals.to_numbers()
        if accelerator(self._layout.device).runs_ahead:
            # They are acted on at once, and the totals are read a step later.
            host_signals, numbers = signals if self._layout.world_group is None else signals.all_reduce_sum(), []
        parts = [self._to_device(numbers), self._losses, *self._means.values(), self._rows.view(-1)]
        sums = torch.cat(parts)
        if self._layout.world_group is not None:
            with collective("all-reduce of the step's totals"):
                dist.all_reduce(sums, group=self._layout.world_group)
        signal_sums, losses, *means, rows = sums.split([part.numel() for part in parts])
        self._rows = rows.view_as(self._rows)
        totals = DeviceTotals(
            losses, self._rows, signal_sums, dict(zip(self._means, means, strict=True)), grad_norm, self._numbers
        )
        return SummedTotals(totals, host_signals, self._layers.facts, self._batch, self._indexer)

    def expert_choices(self, layer: int) -> Tensor:
        """`[E]`: choices of each expert of a layer before capacity limits; after `reduce`."""
        place = self._index[layer]
        num_experts = self._layers.facts[place].num_experts
        return self._rows[place, len(COLUMNS) + self._max_experts :][:num_experts]

    def _add_traffic(self) -> None:
        """Add all-to-all traffic of this rank's layers; seconds are means over ranks."""
        first, ranks = COLUMNS.index("all_to_all_bytes"), self._layout.world_size
        traffic_rows = [[0.0, 0.0, 0.0] for _ in self._layers.facts]
        for number, layer in self._layers.local_layers.items():
            traffic = layer.dispatch.take_traffic()
            seconds = (traffic.transfer_s / ranks, traffic.waiting_s / ranks)
            traffic_rows[self._index[number]] = [traffic.num_bytes, *seconds]
        if traffic_rows:
            self._rows[:, first : first + 3] += self._to_device(traffic_rows)

    def _to_device(self, numbers: list[Any], dtype: torch.dtype = torch.float64) -> Tensor:
        return accelerator(self._layout.device).take(torch.tensor(numbers, dtype=dtype))


def _rows_of(routings: list[Routing], max_experts: int) -> Tensor:
    """Rows of `StepTotals`, in which means are weighted by their counts. All layers at once: on a GPU, each operation
    is a launch."""
    dtype = torch.float64
    tokens = torch.stack([routing.num_tokens for routing in routings]).to(dtype)
    choices = torch.stack([routing.num_choices for routing in routings]).to(dtype)
    aux_units = torch.stack([routing.aux_units for routing in routings])
    columns = (
        torch.stack([routing.aux_loss for routing in routings]) * aux_units,
        aux_units,
        torch.stack([routing.z_loss for routing in routings]) * tokens,
        torch.stack([routing.entropy for routing in routings]) * tokens,
        tokens,
        torch.stack([routing.rejected for routing in routings]) * choices,
        torch.stack([routing.dropped for routing in routings]) * choices,
        choices,
    )
    routing_sums = torch.stack([column.to(dtype) for column in columns], dim=1)
    no_traffic = routing_sums.new_zeros(len(routings), len(TRAFFIC_COLUMNS))
    load = _stack_by_expert([routing.load for routing in routings], max_experts)
    chosen = _stack_by_expert([routing.chosen for routing in routings], max_experts)
    return torch.cat((routing_sums, no_traffic, load, chosen), dim=1)


def _stack_by_expert(counts: list[Tensor], max_experts: int) -> Tensor:
    """Counts `[E]` of each layer as float64 rows, padded with zeros to `max_experts`."""
    padded = [functional.pad(count, (0, max_experts - len(count)))
              if len(count) < max_experts else count for count in counts]  # fmt: skip
    return torch.stack(padded).to(torch.float64)
