"""Totals of a step, summed over micro-batches and ranks in one all-reduce that also carries signals."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import Layout, collective
from moe.parallel.accelerator import accelerator
from moe.records import LayerRecord, StepRecord
from moe.routing import Routing
from moe.tasks.task import Loss, RankBatch
from moe.train.control import RequestedAction
from moe.train.moe_layers import LayerFacts, MoELayers

_ASKS: tuple[RequestedAction | None, ...] = (None, "pause", "cancel", "finish")

_COLUMNS = (
    "aux_loss", "aux_units", "z_loss", "entropy", "tokens", "rejected", "dropped", "choices",
    "all_to_all_bytes", "all_to_all_s", "waiting_s",
)  # fmt: skip
"""Sums of each MoE layer; its experts' loads and choices follow."""


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


class StepTotals:
    """Sums one step's losses and routing statistics over micro-batches and, in `reduce`, over ranks.

    With sequence parallelism (`shares_tokens`) tensor ranks have losses of different tokens, otherwise the same
    losses. Every rank has a row for each MoE layer of the model, zero for layers elsewhere.
    """

    def __init__(self, layers: MoELayers, batch: RankBatch[Any], layout: Layout, *, shares_tokens: bool) -> None:
        self._layers, self._batch, self._layout, self._shares_tokens = layers, batch, layout, shares_tokens
        self._losses = torch.zeros(2, dtype=torch.float64, device=layout.device)
        max_experts = max((facts.num_experts for facts in layers.facts), default=0)
        self._rows = self._losses.new_zeros(len(layers.facts), len(_COLUMNS) + 2 * max_experts)
        self._numbers: dict[str, Tensor] = {}
        """Scalars of the last micro-batch; a user module has one micro-batch per step."""
        self._index = {facts.layer: place for place, facts in enumerate(layers.facts)}

    def add(self, loss: Loss, routings: list[tuple[int, Routing]]) -> None:
        """Add one micro-batch, with means weighted by their counts."""
        self._numbers |= loss.numbers
        first = self._layout.index("tensor") == 0
        if first or self._shares_tokens:
            self._losses += torch.stack((loss.objective.detach(), loss.nll.detach()))
        if not first:
            return  # tensor ranks have the same routing in either case
        for number, routing in routings:
            row = self._rows[self._index[number]]
            counts = torch.stack((routing.num_tokens, routing.num_choices)).to(row.dtype)
            sums = torch.stack(
                (
                    routing.aux_loss * routing.aux_units,
                    routing.aux_units.to(row.dtype),
                    routing.z_loss * counts[0],
                    routing.entropy * counts[0],
                    counts[0],
                    routing.rejected * counts[1],
                    routing.dropped * counts[1],
                    counts[1],
                )
            )
            row[: len(sums)] += sums
            of_experts = torch.cat((routing.load, routing.chosen))
            row[len(_COLUMNS) : len(_COLUMNS) + len(of_experts)] += of_experts

    def reduce(self, signals: Signals) -> tuple[StepRecord, Signals]:
        """(record of the global batch's losses and layers, signals summed over ranks). Collective."""
        self._add_traffic()
        sums = torch.cat((self._to_device(signals.to_numbers()), self._losses, self._rows.view(-1)))
        if self._layout.world_group is not None:
            with collective("all-reduce of the step's totals"):
                dist.all_reduce(sums, group=self._layout.world_group)
        self._rows = sums[-self._rows.numel() :].view_as(self._rows) if self._rows.numel() else self._rows
        values = iter(sums.tolist())  # one transfer, which waits for the GPU
        numbers = [next(values) for _ in signals.to_numbers()]
        objective, nll = (next(values) / self._batch.num_targets for _ in range(2))
        width = self._rows.shape[1]
        layer_records = [_layer_record(facts, list(islice(values, width))) for facts in self._layers.facts]
        record = StepRecord(
            step=self._batch.step + 1,
            loss=objective + _auxiliary(self._layers.facts, layer_records),
            nll=nll,
            aux_loss=math.fsum(layer_record.aux_loss or 0.0 for layer_record in layer_records)
            / max(1, len(layer_records)),
            z_loss=math.fsum(layer_record.z_loss or 0.0 for layer_record in layer_records) / max(1, len(layer_records)),
            layers=tuple(layer_records),
            tokens=self._batch.num_tokens,
            numbers={name: float(number) for name, number in self._numbers.items()} or None,
        )
        return record, Signals.from_numbers(numbers)

    def expert_choices(self, layer: int) -> Tensor:
        """`[E]`: choices of each expert of a layer before capacity limits; after `reduce`."""
        place = self._index[layer]
        num_experts = self._layers.facts[place].num_experts
        return self._rows[place, len(_COLUMNS) + num_experts :][:num_experts]

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

    def _to_device(self, numbers: list[Any]) -> Tensor:
        return accelerator(self._layout.device).take(torch.tensor(numbers, dtype=torch.float64))


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
