"""Experts of one layer on this rank."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from moe.experts.activation import Activation
from moe.experts.choice import Costs, cheapest
from moe.experts.feed_forward import Work
from moe.experts.weights import ExpertSettings, ExpertWeights
from moe.parallel import Layout, QuantizedWeight, first_of, matrix_of, part_of

_NAMES = (
    "w_in", "w_out", "w_gate", "b_in", "b_out", "b_gate",
    "w_in_lora_a", "w_in_lora_b", "w_gate_lora_b", "w_out_lora_a", "w_out_lora_b",
    "w_in_scales", "w_gate_scales", "w_out_scales",
)  # fmt: skip
"""Parameters, in the order of `ExpertWeights.tensors`."""
_CODED = ("w_in", "w_out", "w_gate", "w_in_scales", "w_gate_scales", "w_out_scales")
"""Parameters that are quantized weights or their scales, if the layer is quantized."""

RunRows = Callable[[Tensor, Tensor, ExpertWeights], Tensor]
"""Computes outputs `[n, M]` from rows `[n, M]`, their weights `[n]` and the experts' weights."""


class LocalExperts(Protocol):
    """Experts as dispatchers use them."""

    @property
    def activation(self) -> Activation: ...

    def __call__(self, rows: Tensor, weight: Tensor, run: RunRows) -> Tensor:
        """Return `run(rows, weight, weights)` with unsharded weights."""

    def work_on(self, counts: list[int]) -> Work:
        """Fastest computation for `counts` rows per expert; it may require padding."""

    @property
    def weights(self) -> ExpertWeights:
        """All weights as stored."""


class Experts(nn.Module):
    """This rank's share of a layer's experts: two matrices and an activation each (GShard, section 2.1), or three if
    the activation is gated (arXiv 2002.05202)."""

    w_in: nn.Parameter
    """`[E, M, H]`, or its quantized codes (`ExpertWeights`); likewise the next two."""
    w_gate: nn.Parameter | None
    """`[E, M, H]`"""
    w_out: nn.Parameter
    """`[E, H, M]`"""
    b_in: nn.Parameter | None
    """`[E, H]`"""
    b_gate: nn.Parameter | None
    """`[E, H]`"""
    b_out: nn.Parameter | None
    """`[E, M]`, or some of its columns if an expert is split into parts, whose outputs are summed."""

    lora_scale = 0.0
    """Scale of the LoRA adapters, whose tensors `ExpertWeights` names."""
    recompute = False
    """Recompute hidden states from the rows in the backward pass."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.costs: Costs = {}
        """Measured cost of each backend for these experts; if empty, `segments` is used."""
        for name in _NAMES:
            self.register_parameter(name, None)
        self._b_out_first = 0

    def wire(self, layout: Layout) -> None:
        self.recompute = layout.recompute == "selective"
        if self.b_out is not None:
            self._b_out_first = first_of(part_of(self.b_out), layout)[1]

    def forward(self, rows: Tensor, weight: Tensor, run: RunRows) -> Tensor:
        """Return `run(rows, weight, weights)` with unsharded weights, which FSDP gathers for this call only."""
        return run(rows, weight, self.weights)

    def work_on(self, counts: list[int]) -> Work:
        """Fastest computation for `counts` rows per expert. `Work.counts` includes the padding it requires, rows of
        weight zero."""
        counts = cheapest(self.costs, counts).padded(counts)
        return Work(counts, self.activation, cheapest(self.costs, counts), self.recompute)

    def lay_out_for_few_rows(self, dtype: torch.dtype) -> None:
        """Convert weights to `dtype` and lay matrices out in memory for few rows, without changing shapes: `w_in` and
        `w_gate` adjacent, for one product, and matrices with more inputs than outputs transposed. For inference only:
        optimizers and kernels for many rows need the original layout. Quantized weights are unchanged."""
        # One, two, three rows by [512, 256] on one EPYC core: 46, 73, 82 us transposed, 60, 88, 113 us not. By [256,
        # 512] the reverse: 56, 82, 118 and 55, 62, 96. Two of the former side by side, transposed: 86 us for one row,
        # against 100 us for two products.
        is_coded = self.weights.is_coded
        for name, parameter in self.named_parameters():
            if not (is_coded and name in _CODED):
                parameter.data = parameter.detach().to(dtype)
        if is_coded:
            return
        firsts = [self.w_in] if self.w_gate is None else [self.w_in, self.w_gate]
        _, num_inputs, num_outputs = self.w_in.shape
        if num_inputs > num_outputs:
            pair = torch.cat([matrix.detach().transpose(1, 2) for matrix in firsts], dim=1).transpose(1, 2)
        else:
            pair = torch.cat([matrix.detach() for matrix in firsts], dim=2)
        if num_inputs < num_outputs:
            self.w_out.data = self.w_out.detach().transpose(1, 2).contiguous().transpose(1, 2)
        for matrix, part in zip(firsts, pair.chunk(len(firsts), dim=2), strict=True):
            matrix.data = part

    @property
    def weights(self) -> ExpertWeights:
        """All weights as stored."""
        tensors = [getattr(self, name) for name in _NAMES]
        codings = (
            matrix.coding if isinstance(matrix, QuantizedWeight) else None for matrix in self._in_and_out
        )
        return ExpertWeights.from_tensors(
            tensors, ExpertSettings(self._b_out_first, self.lora_scale, *codings)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, M, H) on this rank."""
        return tuple(self._in_and_out[0].shape)

    @property
    def _in_and_out(self) -> tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight]:
        return matrix_of(self, "w_in"), matrix_of(self, "w_out")
