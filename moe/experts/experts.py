"""Experts of one layer on this rank, and the choice of the backend of their products by measured costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from moe.experts.activation import Activation
from moe.experts.batched import BatchedProducts
from moe.experts.feed_forward import ExpertComputation, LocalComputation
from moe.experts.grouped_mm import GroupedMM
from moe.experts.products import GroupedProducts, SegmentProducts
from moe.experts.weights import ExpertSettings, ExpertWeights
from moe.experts.widened import WidenedProducts
from moe.parallel import Layout, QuantizedWeight, matrix_of, shard_of, shard_offsets

BACKENDS: dict[str, GroupedProducts] = {
    "segments": SegmentProducts(),
    "batched": BatchedProducts(),
    "grouped_mm": GroupedMM(),
    "widened": WidenedProducts(),
}
FUSED = "fused"
"""Name of the fused kernels (`moe.kernels`) in measured costs; present only if a layer was faster with them."""
MAX_PADDING = 1.5
"""Batched products are excluded if padding to the busiest expert's rows exceeds this multiple of all rows."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a backend's three products, forward and backward, as a function of rows."""

    fixed_s: float
    per_row_s: float
    row_multiple: int = 1
    """The number of rows multiplied per expert is a multiple of this, or of a larger number for large counts."""
    config_overrides: Mapping[str, tuple[int, ...]] | None = None
    """Autotuned configurations of the fused kernels, where faster than the defaults."""

    def seconds(self, products: GroupedProducts, counts: list[int]) -> float:
        """Seconds for `counts` rows per expert on the backend `products`."""
        return self.fixed_s + self.per_row_s * sum(products.num_product_rows(counts, self.row_multiple))


Costs = dict[str, Cost]
"""Cost by backend name."""


def cheapest(costs: Costs, counts: list[int]) -> GroupedProducts:
    """Backend with the lowest predicted time for `counts`; `segments` without measurements."""
    rows = sum(counts)
    if not costs or not rows:
        return BACKENDS["segments"]
    padded_counts = BACKENDS["batched"].pad_counts(counts)
    backend_costs = {name: cost for name, cost in costs.items() if name in BACKENDS}
    predicted_s = {
        name: cost.seconds(BACKENDS[name], counts)
        for name, cost in backend_costs.items()
        if name != "batched" or sum(padded_counts) <= MAX_PADDING * rows or len(backend_costs) == 1
    }
    return BACKENDS[min(predicted_s, key=lambda name: predicted_s[name])]


_NAMES = (
    "w_in", "w_out", "w_gate", "b_in", "b_out", "b_gate",
    "w_in_lora_a", "w_in_lora_b", "w_gate_lora_b", "w_out_lora_a", "w_out_lora_b",
    "w_in_scales", "w_gate_scales", "w_out_scales",
)  # fmt: skip
"""Parameters, in the order of `ExpertWeights.tensors`."""
_QUANTIZED = ("w_in", "w_out", "w_gate", "w_in_scales", "w_gate_scales", "w_out_scales")
"""Parameters that are quantized weights or their scales, if the layer is quantized."""


class LocalExperts(Protocol):
    """Interface of experts for dispatchers."""

    @property
    def activation(self) -> Activation: ...

    @property
    def recompute(self) -> bool: ...

    @property
    def costs(self) -> Costs: ...

    @property
    def scales_inputs(self) -> bool:
        """Whether `scale` multiplies rows before the experts, instead of their outputs."""

    @property
    def weights(self) -> ExpertWeights:
        """All weights as stored."""

    def __call__(self, rows: Tensor, scale: Tensor, computation: ExpertComputation) -> Tensor:
        """Return `computation.run(rows, scale, weights)` with unsharded weights, of scaled rows if `scales_inputs`."""

    def local_computation(self, counts: list[int]) -> LocalComputation:
        """Fastest computation for `counts` rows per expert; it may require padding."""


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

    lora_scales: Mapping[str, float] = MappingProxyType({})
    """Scales of the LoRA adapters, whose tensors `ExpertWeights` names, by matrix name."""
    recompute = False
    """Recompute hidden states from the rows in the backward pass."""

    def __init__(self, activation: Activation, *, scales_inputs: bool = False) -> None:
        super().__init__()
        self.activation, self.scales_inputs = activation, scales_inputs
        self.costs: Costs = {}
        """Measured cost of each backend for these experts. If empty, fused kernels are used on a supported GPU, and
        `segments` elsewhere."""
        for name in _NAMES:
            self.register_parameter(name, None)
        self._b_out_first = 0

    def set_layout(self, layout: Layout) -> None:
        self.recompute = layout.recompute == "selective"
        if self.b_out is not None:
            self._b_out_first = shard_offsets(shard_of(self.b_out), layout)[1]

    def forward(self, rows: Tensor, scale: Tensor, computation: ExpertComputation) -> Tensor:
        """Return outputs `[n, M]` of `rows` `[n, M]`, times `scale` `[n]`, or of rows times scale if `scales_inputs`.
        FSDP gathers the weights for this call."""
        if self.scales_inputs:
            rows, scale = rows * scale.to(rows.dtype).view(-1, 1), torch.ones_like(scale)
        return computation.run(rows, scale, self.weights)

    def local_computation(self, counts: list[int]) -> LocalComputation:
        """Fastest computation for `counts` rows per expert. Its counts include the padding it requires, rows of scale
        zero."""
        products = cheapest(self.costs, counts)
        if (padded_counts := products.pad_counts(counts)) != counts:
            products = cheapest(self.costs, padded_counts)
        return LocalComputation(padded_counts, self.activation, products, self.recompute)

    def prepare_for_decoding(self, dtype: torch.dtype) -> None:
        """Convert weights to `dtype` and lay matrices out in memory for few rows, without changing shapes: `w_in` and
        `w_gate` adjacent, for one product, and matrices with more inputs than outputs transposed. For inference only:
        optimizers and kernels for many rows need the original layout. Quantized weights are unchanged."""
        # One, two, three rows by [512, 256] on one EPYC core: 46, 73, 82 us transposed, 60, 88, 113 us not. By [256,
        # 512] the reverse: 56, 82, 118 and 55, 62, 96. Two [512, 256] in one product, transposed: 86 us for one row,
        # against 100 us in two products.
        is_quantized = self.weights.is_quantized
        for name, parameter in self.named_parameters():
            if not (is_quantized and name in _QUANTIZED):
                parameter.data = parameter.detach().to(dtype)
        if is_quantized:
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
        schemes = (matrix.scheme if isinstance(matrix, QuantizedWeight) else None for matrix in self._matrices)
        in_scale, out_scale = (self.lora_scales.get(name, 0.0) for name in ("w_in", "w_out"))
        settings = ExpertSettings(self._b_out_first, in_scale, out_scale, *schemes)
        return ExpertWeights.from_tensors(tensors, settings)

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, M, H) on this rank."""
        return tuple(self._matrices[0].shape)

    @property
    def _matrices(self) -> tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight]:
        return matrix_of(self, "w_in"), matrix_of(self, "w_out")
