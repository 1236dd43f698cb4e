"""Totals of a step, summed over micro-batches and ranks in one all-reduce that also carries signals."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.parallel import Layout, collective
from moe.parallel.accelerator import accelerator
from moe.records import LayerRecord, StepRecord
from moe.routing import Routing
from moe.tasks.task import IndexerLoss, Loss, RankBatch
from moe.train.control import RequestedAction
from moe.train.moe_layers import LayerFacts, MoELayers

_ASKS: tuple[RequestedAction | None, ...] = (None, "pause", "cancel", "finish")

_ROUTING_COLUMNS = ("aux_loss", "aux_units", "z_loss", "entropy", "tokens", "rejected", "dropped", "choices")
_TRAFFIC_COLUMNS = ("all_to_all_bytes", "all_to_all_s", "waiting_s")
_COLUMNS = (*_ROUTING_COLUMNS, *_TRAFFIC_COLUMNS)
"""Sums of each MoE layer; its experts' loads and choices follow, with as many columns each as the largest layer has
experts."""


@dataclass(frozen=True)
class Signals:
    """Signals in a step's all-reduce, so that all ranks act on them at the same step.

    Only rank 0 sets `request`; the counts are of ranks.
    """

    request: RequestedAction | None = None
    num_saved: int = 0
    num_save_failed: int = 0

    def to_numbers(self) -> list[float]:
        return [_ASKS.index(self.request), self.num_saved, self.num_save_failed]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> "Signals":
        request, num_saved, num_save_failed = (int(number) for number in numbers)
        return cls(_ASKS[request], num_saved, num_save_failed)


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

    With sequence parallelism (`shares_tokens`) tensor ranks have losses of different tokens, otherwise the same
    losses. Every rank has a row for each MoE layer of the model, zero for layers elsewhere.
    """

    def __init__(self, layers: MoELayers, batch: RankBatch[Any], layout: Layout, *, shares_tokens: bool) -> None:
        self._layers, self._batch, self._layout, self._shares_tokens = layers, batch, layout, shares_tokens
        self._losses = torch.zeros(3, dtype=torch.float64, device=layout.device)
        self._indexer: IndexerLoss | None = None
        self._max_experts = layers.max_experts
        self._rows = self._losses.new_zeros(len(layers.facts), len(_COLUMNS) + 2 * self._max_experts)
        self._numbers: dict[str, Tensor] = {}
        """Scalars of the last micro-batch; a user module has one micro-batch per step."""
        self._means: dict[str, Tensor] = {}
        """Sums and counts `[2]`."""
        self._index = {facts.layer: place for place, facts in enumerate(layers.facts)}

    def add(self, loss: Loss, routings: list[tuple[int, Routing]]) -> None:
        """Add one micro-batch, with means weighted by their counts."""
        is_first = self._layout.index("tensor") == 0
        # Tensor ranks have the same routing in either case.
        self.add_sums(MicroBatchSums.of(loss, routings if is_first else [], self._max_experts))

    def add_sums(self, sums: MicroBatchSums) -> None:
        """Add one micro-batch's sums."""
        self._numbers |= sums.numbers
        self._indexer = sums.indexer
        if self._layout.index("tensor") == 0 or self._shares_tokens:
            self._losses += sums.losses
        for name, mean in sums.means.items():
            counts = self._layout.index("tensor") == 0 or self._shares_tokens
            self._means[name] = self._means.get(name, 0.0) + mean.to(self._losses) * counts
        if sums.rows is not None:
            index = self._to_device([self._index[number] for number in sums.layers], torch.int64)
            self._rows.index_add_(0, index, sums.rows)

    def reduce(self, signals: Signals, grad_norm: Tensor | None = None) -> tuple[StepRecord, Signals]:
        """(record of the global batch's losses and layers, signals summed over ranks). Collective. `grad_norm` scalar,
        the same on all ranks, is read with the totals: on a GPU, each reading waits for all its work."""
        self._add_traffic()
        sums = torch.cat((
            self._to_device(signals.to_numbers()), self._losses, *self._means.values(), self._rows.view(-1),
        ))  # fmt: skip
        if self._layout.world_group is not None:
            with collective("all-reduce of the step's totals"):
                dist.all_reduce(sums, group=self._layout.world_group)
        self._rows = sums[-self._rows.numel() :].view_as(self._rows) if self._rows.numel() else self._rows
        scalars = [*([] if grad_norm is None else [grad_norm]), *self._numbers.values()]
        scalar_values = [scalar.detach().to(sums).view(1) for scalar in scalars]  # users' may be elsewhere
        values = iter(torch.cat((sums, *scalar_values)).tolist())  # one transfer, which waits for the GPU
        numbers = [next(values) for _ in signals.to_numbers()]
        objective, nll = (next(values) / self._batch.num_targets for _ in range(2))
        divergence = next(values) / max(1, self._batch.num_tokens)
        means = {name: (next(values), next(values)) for name in self._means}
        width = self._rows.shape[1]
        layer_records = [_layer_record(facts, list(islice(values, width))) for facts in self._layers.facts]
        norm = None if grad_norm is None else next(values)
        weighted_divergence = 0.0 if self._indexer is None else self._indexer.coefficient * divergence
        record = StepRecord(
            step=self._batch.step + 1,
            loss=objective + _auxiliary(self._layers.facts, layer_records) + weighted_divergence,
            nll=nll,
            aux_loss=math.fsum(layer_record.aux_loss or 0.0 for layer_record in layer_records)
            / max(1, len(layer_records)),
            z_loss=math.fsum(layer_record.z_loss or 0.0 for layer_record in layer_records) / max(1, len(layer_records)),
            indexer_loss=None if self._indexer is None else divergence / self._indexer.num_layers,
            layers=tuple(layer_records),
            tokens=self._batch.num_tokens,
            grad_norm=norm,
            numbers={
                **dict(zip(self._numbers, values, strict=True)),
                **{name: total / number if number else None for name, (total, number) in means.items()},
            }
            or None,
        )
        return record, Signals.from_numbers(numbers)

    def expert_choices(self, layer: int) -> Tensor:
        """`[E]`: choices of each expert of a layer before capacity limits; after `reduce`."""
        place = self._index[layer]
        num_experts = self._layers.facts[place].num_experts
        return self._rows[place, len(_COLUMNS) + self._max_experts :][:num_experts]

    def _add_traffic(self) -> None:
        """Add all-to-all traffic of this rank's layers; seconds are means over ranks."""
        first, ranks = _COLUMNS.index("all_to_all_bytes"), self._layout.world_size
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
    no_traffic = routing_sums.new_zeros(len(routings), len(_TRAFFIC_COLUMNS))
    load = _stack_by_expert([routing.load for routing in routings], max_experts)
    chosen = _stack_by_expert([routing.chosen for routing in routings], max_experts)
    return torch.cat((routing_sums, no_traffic, load, chosen), dim=1)


def _stack_by_expert(counts: list[Tensor], max_experts: int) -> Tensor:
    """Counts `[E]` of each layer as float64 rows, padded with zeros to `max_experts`."""
    padded = [functional.pad(count, (0, max_experts - len(count)))
              if len(count) < max_experts else count for count in counts]  # fmt: skip
    return torch.stack(padded).to(torch.float64)


def _auxiliary(layers: Iterable[LayerFacts], records: Iterable[LayerRecord]) -> float:
    """Sum of the weighted auxiliary losses; layers with equal coefficients are summed first."""
    kinds: dict[tuple[float, float], list[LayerRecord]] = {}
    for facts, record in zip(layers, records, strict=True):
        kinds.setdefault((facts.aux_coefficient, facts.z_coefficient), []).append(record)
    return sum(
        coefficient * math.fsum(record.aux_loss or 0.0 for record in of_kind)
        + z_coefficient * math.fsum(record.z_loss or 0.0 for record in of_kind)
        for (coefficient, z_coefficient), of_kind in kinds.items()
    )


def _layer_record(facts: LayerFacts, row: list[float]) -> LayerRecord:
    sums = dict(zip(_COLUMNS, row, strict=False))
    load = tuple(int(count) for count in row[len(_COLUMNS) : len(_COLUMNS) + facts.num_experts])
    return LayerRecord(
        layer=facts.layer,
        load=load,
        max_over_mean=max(load) * len(load) / max(1, sum(load)),
        rejected=sums["rejected"] / max(1.0, sums["choices"]),
        dropped=sums["dropped"] / max(1.0, sums["choices"]),
        entropy=sums["entropy"] / max(1.0, sums["tokens"]),
        aux_loss=sums["aux_loss"] / max(1.0, sums["aux_units"]),
        z_loss=sums["z_loss"] / max(1.0, sums["tokens"]),
        all_to_all_bytes=int(sums["all_to_all_bytes"]),
        all_to_all_s=sums["all_to_all_s"],
        waiting_s=sums["waiting_s"],
    )
