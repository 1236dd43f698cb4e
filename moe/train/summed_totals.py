"""Totals of a step over all ranks: whether they are finite, and the step's record."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from moe.parallel.accelerator import accelerator
from moe.records import LayerRecord, StepRecord
from moe.tasks.task import IndexerLoss, RankBatch
from moe.train.moe_layers import LayerFacts
from moe.train.signals import Signals

ROUTING_COLUMNS = ("aux_loss", "aux_units", "z_loss", "entropy", "tokens", "rejected", "dropped", "choices")
TRAFFIC_COLUMNS = ("all_to_all_bytes", "all_to_all_s", "waiting_s")
COLUMNS = (*ROUTING_COLUMNS, *TRAFFIC_COLUMNS)
"""Sums of each MoE layer; its experts' loads and choices follow, with as many columns each as the largest layer has
experts."""


@dataclass(frozen=True)
class DeviceTotals:
    """Totals in device memory: float64, the same on all ranks."""

    losses: Tensor
    """`[3]`: objective, negative log-likelihood and the indexers' divergence."""
    rows: Tensor
    """`[layers, columns]`"""
    signals: Tensor
    """`[5]`, or `[0]` if the hosts sum them."""
    means: Mapping[str, Tensor]
    """Sums and counts `[2]`, by name."""
    grad_norm: Tensor | None
    """Scalar."""
    numbers: Mapping[str, Tensor]
    """A user module's scalars, on any device."""

    def found_inf(self) -> Tensor:
        """1.0 (float32 scalar) if the loss or the gradient norm is not finite, else 0.0: what `record.is_finite` tells
        the host."""
        auxiliary = (self.rows[:, COLUMNS.index(name)] for name in ("aux_loss", "z_loss"))
        parts = [self.losses[::2], *auxiliary, *([] if self.grad_norm is None else [self.grad_norm.view(1)])]
        return (~torch.cat(parts).isfinite().all()).to(torch.float32)

    def to_tensor(self) -> Tensor:
        """All totals, one after the other."""
        scalars = [*([] if self.grad_norm is None else [self.grad_norm]), *self.numbers.values()]
        # A user's scalars may be elsewhere.
        scalar_values = [scalar.detach().to(self.losses).view(1) for scalar in scalars]
        return torch.cat((self.signals, self.losses, *self.means.values(), self.rows.flatten(), *scalar_values))


class SummedTotals:
    """Totals of a step over all ranks, which are copied to the host at once, and waited for when they are read."""

    def __init__(
        self,
        totals: DeviceTotals,
        host_signals: Signals | None,
        facts: Sequence[LayerFacts],
        batch: RankBatch[Any],
        indexer: IndexerLoss | None,
    ) -> None:
        """`host_signals`: summed signals if they are not among the totals."""
        self._totals, self._host_signals, self._facts, self._batch = totals, host_signals, facts, batch
        self._indexer = indexer
        tensor = totals.to_tensor()
        self._copy_on_host = accelerator(tensor.device).begin_copy_to_host(tensor)

    def found_inf(self) -> Tensor:
        """1.0 (float32 scalar on the device) if the record is not finite, else 0.0. The host waits for nothing."""
        return self._totals.found_inf()

    @property
    def signals(self) -> Signals:
        """Signals summed over ranks."""
        if self._host_signals is not None:
            return self._host_signals
        return Signals.from_numbers(self._values[: self._totals.signals.numel()])

    @cached_property
    def _values(self) -> list[float]:
        values: list[float] = self._copy_on_host().tolist()
        return values

    @cached_property
    def record(self) -> StepRecord:
        """Record of the global batch's losses and layers, without learning rate and timings. Waits for the step's
        gradients, not for later work."""
        values = iter(self._values[self._totals.signals.numel() :])
        objective, nll = (next(values) / self._batch.num_targets for _ in range(2))
        divergence = next(values) / max(1, self._batch.num_tokens)
        means = {name: (next(values), next(values)) for name in self._totals.means}
        width = self._totals.rows.shape[1]
        layer_records = [_layer_record(facts, list(islice(values, width))) for facts in self._facts]
        norm = None if self._totals.grad_norm is None else next(values)
        weighted_divergence = 0.0 if self._indexer is None else self._indexer.coefficient * divergence
        return StepRecord(
            step=self._batch.step + 1,
            loss=objective + _auxiliary(self._facts, layer_records) + weighted_divergence,
            nll=nll,
            aux_loss=math.fsum(layer_record.aux_loss or 0.0 for layer_record in layer_records)
            / max(1, len(layer_records)),
            z_loss=math.fsum(layer_record.z_loss or 0.0 for layer_record in layer_records) / max(1, len(layer_records)),
            indexer_loss=None if self._indexer is None else divergence / self._indexer.num_layers,
            layers=tuple(layer_records),
            tokens=self._batch.num_tokens,
            grad_norm=norm,
            numbers={
                **dict(zip(self._totals.numbers, values, strict=True)),
                **{name: total / number if number else None for name, (total, number) in means.items()},
            }
            or None,
        )


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
    sums = dict(zip(COLUMNS, row, strict=False))
    load = tuple(int(count) for count in row[len(COLUMNS) : len(COLUMNS) + facts.num_experts])
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
