"""What a step reports: sums over micro-batches and ranks, in one all-reduce that also carries signals."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import Layout
from moe.routing import Routing
from moe.spec import ModelSpec
from moe.train.batches import RankBatch
from moe.train.control import Request

_REQUESTS: tuple[Request | None, ...] = (None, "pause", "cancel")


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

    def __init__(self, spec: ModelSpec, batch: RankBatch, layout: Layout) -> None:
        self._spec, self._batch, self._layout = spec, batch, layout
        self._losses = torch.zeros(2, dtype=torch.float64, device=layout.device)
        num_experts = spec.moe.num_experts if spec.moe is not None else 0
        # A row for each MoE layer: aux loss · groups, choices rejected, dropped, made, then the load [E].
        self._layers = self._losses.new_zeros(len(spec.moe_layers), 4 + num_experts)

    def add(self, smoothed: Tensor, nll: Tensor, routings: list[Routing]) -> Tensor:
        """Count one micro-batch; returns its share of the auxiliary losses, coefficients applied.

        A routing's aux loss is the mean over its own groups, so it counts as many as it has of all the
        batch's: no accumulation and no layout changes the sum.
        """
        self._losses += torch.stack((smoothed.detach(), nll.detach()))
        if not routings:
            return smoothed.new_zeros(())
        assert self._spec.moe is not None, "only MoE layers route"
        for row, routing in zip(self._layers, routings, strict=True):
            row[0] += routing.aux_loss.detach() * routing.num_groups
            row[1:4] += routing.num_choices * torch.stack(
                (routing.rejected, routing.dropped, torch.ones_like(routing.dropped))
            )
            row[4:] += routing.load
        aux_loss = torch.stack([routing.aux_loss * routing.num_groups for routing in routings]).sum()
        return aux_loss * (self._spec.moe.aux_coefficient / self._batch.num_groups)

    def reduce(self, signals: Signals) -> tuple[dict[str, Any], Signals]:
        """(values of the global batch, every rank's signals summed). All ranks together."""
        parts = (self._losses.new_tensor(signals.to_numbers()), self._losses, self._layers.view(-1))
        sums = torch.cat(parts)
        if self._layout.world_group is not None:
            dist.all_reduce(sums, group=self._layout.world_group)
        numbers, losses, layers = sums.split([part.numel() for part in parts])
        smoothed, nll = (losses / self._batch.num_target_tokens).tolist()
        rows = layers.view_as(self._layers).tolist()
        aux_losses = [row[0] / self._batch.num_groups for row in rows]
        coefficient = self._spec.moe.aux_coefficient if self._spec.moe is not None else 0.0
        values = {
            "loss": smoothed + coefficient * math.fsum(aux_losses),
            "nll": nll,
            "aux_loss": math.fsum(aux_losses) / max(1, len(aux_losses)),
            "layers": [
                {
                    "layer": layer,
                    "load": [int(count) for count in row[4:]],
                    "rejected": row[1] / max(1.0, row[3]),
                    "dropped": row[2] / max(1.0, row[3]),
                }
                for layer, row in zip(self._spec.moe_layers, rows, strict=True)
            ],
        }
        return values, Signals.from_numbers(numbers.tolist())
