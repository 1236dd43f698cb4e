"""The experts of one layer that live on this rank."""

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
"""Those that codes lie in, where matrices are kept so."""

RunRows = Callable[[Tensor, Tensor, ExpertWeights], Tensor]
"""Outputs `[n, M]` for rows `[n, M]` and what each weighs, `[n]`."""


class LocalExperts(Protocol):
    """Experts that a rank computes with."""

    @property
    def activation(self) -> Activation: ...

    def __call__(self, rows: Tensor, weight: Tensor, run: RunRows) -> Tensor:
        """`run(rows, weight, weights)`, which has the weights in full."""

    def work_on(self, counts: list[int]) -> Work:
        """The fastest way to multiply so many rows of each expert, which may want rows that fill up."""

    @property
    def weights(self) -> ExpertWeights:
        """All weights, as they are kept."""


class Experts(nn.Module):
    """This rank's share of a layer's experts: two matrices and an activation each (GShard, section 2.1), or three
    where the activation has a gate (arXiv 2002.05202)."""

    w_in: nn.Parameter
    """`[E, M, H]`, or its codes, as `ExpertWeights` has them; the next two likewise."""
    w_gate: nn.Parameter | None
    """`[E, M, H]`"""
    w_out: nn.Parameter
    """`[E, H, M]`"""
    b_in: nn.Parameter | None
    """`[E, H]`"""
    b_gate: nn.Parameter | None
    """`[E, H]`"""
    b_out: nn.Parameter | None
    """`[E, M]`. Each part of an expert adds some columns of it, as long as all parts are added up."""

    lora_scale = 0.0
    """Factor of what the adapters give, whose parts `ExpertWeights` names."""
    recompute = False
    """Hidden states are made again in the backward pass, from the rows alone."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.costs: Costs = {}
        """Measured costs of each backend for these experts; without any, there is one product an expert."""
        for name in _NAMES:
            self.register_parameter(name, None)
        self._b_out_first = 0

    def wire(self, layout: Layout) -> None:
        self.recompute = layout.recompute == "selective"
        if self.b_out is not None:
            self._b_out_first = first_of(part_of(self.b_out), layout)[1]

    def forward(self, rows: Tensor, weight: Tensor, run: RunRows) -> Tensor:
        """`run(rows, weight, weights)`, which has the weights in full: FSDP gathers them for this call alone."""
        return run(rows, weight, self.weights)

    def work_on(self, counts: list[int]) -> Work:
        """The fastest way to multiply so many rows of each expert, which may want rows that fill up: `Work.counts` says
        how many there must be. Those have a weight of zero."""
        counts = cheapest(self.costs, counts).padded(counts)
        return Work(counts, self.activation, cheapest(self.costs, counts), self.recompute)

    def lay_out_for_few_rows(self, dtype: torch.dtype) -> None:
        """Make weights as narrow as rows of this dtype, and lay matrices out anew in memory, whose shapes stay: those
        that rows are multiplied by first side by side, for one product of both, and turned around those with more
        inputs than outputs. For weights that are not trained any more: optimizers and kernels for many rows want them
        as they were. Matrices that are kept as codes stay so."""
        # One, two, three rows by [512, 256] on one core of an EPYC: 46, 73, 82 us so, and 60, 88, 113 as they were. By
        # [256, 512] it is the other way round: 56, 82, 118 and 55, 62, 96. Two of the former side by side, turned: 86
        # us for one row, where two products take 100.
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
        """All weights, as they are kept."""
        tensors = [getattr(self, name) for name in _NAMES]
        codings = (
            matrix.coding if isinstance(matrix, QuantizedWeight) else None for matrix in self._in_and_out
        )
        return ExpertWeights.from_tensors(
            tensors, ExpertSettings(self._b_out_first, self.lora_scale, *codings)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, M, H) here."""
        return tuple(self._in_and_out[0].shape)

    @property
    def _in_and_out(self) -> tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight]:
        return matrix_of(self, "w_in"), matrix_of(self, "w_out")
