"""Experts computed on a GPU by kernels with the row gather fused into the grouped matrix products.

Rows are never copied into expert order; on one rank the host never reads their counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe.dispatch.exchange import ChunkComputation, ChunkComputationChoice, SortedChunk, expert_of_arriving
from moe.experts import FUSED, Activation, ExpertComputation, ExpertWeights, LocalExperts
from moe.experts.feed_forward import SavedProducts
from moe.experts.weight_gradients import WeightGradients
from moe.kernels.support import ACTIVATIONS, MAX_EXPERTS, has_fast_products, has_kernels
from moe.routing import Choices
from moe.routing.choices import ChoicesOfTokens, DeviceRows

if TYPE_CHECKING:
    from moe.kernels.configs import Configs
    from moe.kernels.experts import FusedComputation


def fused_computation(
    x: Tensor, choices: Choices, experts: LocalExperts
) -> tuple[ChoicesOfTokens, ExpertComputation] | None:
    """(choices, computation that returns expert outputs summed by token, for tokens `x` `[T, M]` and the choices'
    weights). None where the kernels do not apply, if experts choose tokens, and if weights scale the inputs of several
    experts per token, which then have a row each."""
    by_token = choices.by_token
    if by_token is None or not _applies_to(x, experts):
        return None
    if experts.scales_inputs and by_token.weight.shape[1] > 1:
        return None
    return by_token, _computation_of(by_token.expert, by_token.kept, x, experts, choices.device_rows)


def chunk_computation(x: Tensor, experts: LocalExperts) -> ChunkComputationChoice:
    """Choose how to compute received rows of the device and dtype of `x` `[T, M]`: fused kernels where they apply, else
    sorted rows."""
    if not _applies_to(x, experts):
        return partial(SortedChunk.from_arriving, experts.local_computation)
    example = x.new_empty(0)  # holds no rows
    return lambda arriving, device: FusedChunk.from_arriving(example, experts, arriving, device)


@dataclass(frozen=True)
class FusedChunk(ChunkComputation):
    """Computation by the fused kernels, which treat each received row as a token with one expert."""

    computation: "FusedComputation"

    @classmethod
    def from_arriving(cls, x: Tensor, experts: LocalExperts, arriving: Tensor, device: torch.device) -> "FusedChunk":
        expert = expert_of_arriving(arriving, device)[:, None]
        return cls(_computation_of(expert, torch.ones_like(expert, dtype=torch.bool), x, experts))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.computation.rows.tensors

    @property
    def restore(self) -> Callable[[Sequence[Tensor | None]], ChunkComputation]:
        computation = self.computation
        return partial(_restore_fused, computation.activation, computation.configs, computation.recompute)

    def arrange(self, rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return rows.contiguous(), scale[:, None]

    def forward_pass(
        self, x: Tensor, weight: Tensor, weights: ExpertWeights, *, saves: bool
    ) -> tuple[Tensor, SavedProducts]:
        return self.computation.forward_pass(x, weight, weights, saves=saves and not self.computation.recompute)

    def backward_pass(
        self,
        d_out: Tensor,
        x: Tensor,
        weight: Tensor,
        weights: ExpertWeights,
        products: SavedProducts,
        gradients: WeightGradients,
    ) -> tuple[Tensor, Tensor]:
        d_x, d_weight = self.computation.backward_pass(d_out.contiguous(), x, weight, weights, products, gradients)
        return d_x, d_weight.squeeze(1)


def _restore_fused(
    activation: Activation, configs: "Configs", recompute: bool, tensors: Sequence[Tensor | None]
) -> FusedChunk:
    from moe.kernels.experts import FusedComputation
    from moe.kernels.rows import RowMap

    rows = RowMap(*tensors)  # type: ignore[arg-type]  # those of `FusedChunk.tensors`, of which none is missing
    return FusedChunk(FusedComputation(rows, activation, configs, recompute))


def _applies_to(x: Tensor, experts: LocalExperts) -> bool:
    """Whether the kernels compute `experts` for rows with the device and dtype of `x`. False on CPUs and
    unsupported GPUs, for other dtypes or activations, for quantized weights, and where kernels were measured to be
    slower."""
    return (
        has_kernels(x, "experts")
        and unsupported_experts(experts, x.dtype) is None
        and (not experts.costs or FUSED in experts.costs)
    )


def unsupported_experts(experts: LocalExperts, dtype: torch.dtype) -> str | None:
    """Property of experts for which there are no kernels in `dtype`; None if there are."""
    weights = experts.weights
    if not has_fast_products(dtype):
        return f"{str(dtype).removeprefix('torch.')} products without tensor cores"
    if experts.activation.name not in ACTIVATIONS:
        return f"activation {experts.activation.name}"
    if weights.is_quantized:
        return "quantized weights"
    num_experts = weights.w_in.shape[0]
    return f"{num_experts} experts on a rank, more than {MAX_EXPERTS}" if num_experts > MAX_EXPERTS else None


def _computation_of(
    expert: Tensor, is_kept: Tensor, x: Tensor, experts: LocalExperts, device_rows: DeviceRows | None = None
) -> "FusedComputation":
    from moe.kernels.configs import Configs
    from moe.kernels.experts import FusedComputation
    from moe.kernels.rows import RowMap

    if device_rows is None:
        rows = RowMap.from_choices(expert, is_kept, experts.weights.w_in.shape[0])
    else:
        rows = RowMap(expert, *device_rows)
    configs = Configs.for_device(x.device, x.dtype)
    overrides = experts.costs[FUSED].config_overrides if FUSED in experts.costs else None
    if overrides and _accepts_autotuned_configs(experts):
        configs = configs.with_overrides(Configs.valid_overrides(overrides, x.device, x.dtype))
    return FusedComputation(rows, experts.activation, configs, experts.recompute)


def _accepts_autotuned_configs(experts: LocalExperts) -> bool:
    """Whether autotuned configurations apply. With biases, adapters or clamps, some of them would spill registers."""
    weights = experts.weights
    extra = (weights.b_in, weights.b_gate, weights.b_out, weights.in_lora_a, weights.out_lora_a)
    return experts.activation.name != "swiglu_clamped" and all(tensor is None for tensor in extra)
