"""Totals of a step: sums over micro-batches and ranks, in one all-reduce that also carries signals."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe.dispatch.rows import Traffic
from moe.parallel import Layout, collective
from moe.records import LayerRecord, StepRecord
from moe.routing import Routing
from moe.spec import TranslationModelSpec
from moe.train.batches import RankBatch
from moe.train.control import Request

_REQUESTS: tuple[Request | None, ...] = (None, "pause", "cancel")

_COLUMNS = (
    "aux_loss", "aux_units", "z_loss", "entropy", "tokens", "rejected", "dropped", "choices",
    "all_to_all_bytes", "all_to_all_s", "waiting_s",
)  # fmt: skip
"""Sums kept for each MoE layer; the loads and choices of its experts stand behind them."""


@dataclass(frozen=True)
class Signals:
    """What a rank tells the others at a step, so that all of them act on it at the same step.

    Rank 0 alone passes a request on; the counts are of ranks.
    """

    request: Request | None = None
    num_saved: int = 0
    num_save_failed: int = 0

    def to_numbers(self) -> list[float]:
        return [_REQUESTS.index(self.request), self.num_saved, self.num_save_failed]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> "Signals":
        request, num_saved, num_save_failed = (int(number) for number in numbers)
        return cls(_REQUESTS[request], num_saved, num_save_failed)


class StepTotals:
    """Adds up one step's losses and routing; `reduce` makes them those of the global batch."""

    def __init__(self, spec: TranslationModelSpec, batch: RankBatch, layout: Layout) -> None:
        self._spec, self._batch, self._layout = spec, batch, layout
        self._losses = torch.zeros(2, dtype=torch.float64, device=layout.device)
        self._num_experts = spec.moe.num_experts if spec.moe is not None else 0
        self._layers = self._losses.new_zeros(len(spec.moe_layers), len(_COLUMNS) + 2 * self._num_experts)

    def add(self, smoothed: Tensor, nll: Tensor, routings: list[Routing]) -> None:
        """Count one micro-batch. Means are weighted by what they are means over, so that no accumulation and no
        layout changes the sums."""
        self._losses += torch.stack((smoothed.detach(), nll.detach()))
        if self._layout.index("tensor"):
            return  # ranks that share tokens have the same routing: the first counts it
        for row, routing in zip(self._layers, routings, strict=True):
            counts = torch.stack((routing.num_tokens, routing.num_choices)).to(row.dtype)
            found = torch.stack(
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
            row[: len(found)] += found
            row[len(_COLUMNS) :] += torch.cat((routing.load, routing.chosen))

    def add_traffic(self, traffic: list[Traffic]) -> None:
        """What each layer exchanged, forward and backward. Seconds are means over the ranks."""
        first, ranks = _COLUMNS.index("all_to_all_bytes"), self._layout.world_size
        for row, each in zip(self._layers, traffic, strict=True):
            found = (each.num_bytes, each.transfer_s / ranks, each.waiting_s / ranks)
            row[first : first + 3] += row.new_tensor(found)

    def reduce(self, signals: Signals) -> tuple[StepRecord, Signals]:
        """(record of the global batch's losses and layers, every rank's signals summed). All ranks together."""
        parts = (self._losses.new_tensor(signals.to_numbers()), self._losses, self._layers.view(-1))
        sums = torch.cat(parts)
        if self._layout.world_group is not None:
            with collective("all-reduce of the step's totals"):
                dist.all_reduce(sums, group=self._layout.world_group)
        numbers, losses, layers = sums.split([part.numel() for part in parts])
        smoothed, nll = (losses / self._batch.target.num_tokens).tolist()
        self._layers = layers.view_as(self._layers)
        shown = [
            self._layer_record(layer, row)
            for layer, row in zip(self._spec.moe_layers, self._layers.tolist(), strict=True)
        ]
        aux_loss, z_loss = (
            math.fsum(getattr(each, name) for each in shown) for name in ("aux_loss", "z_loss")
        )
        moe, auxiliary = self._spec.moe, 0.0
        if moe is not None:
            coefficient, _ = moe.routing.auxiliary_loss
            auxiliary = coefficient * aux_loss + moe.z_coefficient * z_loss
        record = StepRecord(
            step=self._batch.step + 1,
            loss=smoothed + auxiliary,
            nll=nll,
            aux_loss=aux_loss / max(1, len(shown)),
            z_loss=z_loss / max(1, len(shown)),
            layers=tuple(shown),
            tokens=self._batch.num_tokens,
        )
        return record, Signals.from_numbers(numbers.tolist())

    @property
    def chosen(self) -> Tensor:
        """`[layers, E]`, once reduced: the choices of each expert before capacity decided."""
        return self._layers[:, len(_COLUMNS) + self._num_experts :]

    def _layer_record(self, layer: int, row: list[float]) -> LayerRecord:
        sums = dict(zip(_COLUMNS, row, strict=False))
        load = tuple(int(count) for count in row[len(_COLUMNS) : len(_COLUMNS) + self._num_experts])
        return LayerRecord(
            layer=layer,
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
