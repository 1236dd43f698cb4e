"""Top-k routing by softmax or sigmoid scores: scores, choices, weights, loads and losses in three kernels, or six with
capacity, and their gradients in one.

A program routes tokens of one balancing scope. Sums over tokens are added up by block in a fixed order, so results are
the same in every run.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.capacity import AdmittedChoices, Capacity, admit_within
from moe.kernels.launch import launching_on
from moe.kernels.routing_programs import SUMS, balance, route, route_backward, summarize
from moe.routing.choices import DeviceRows

_SCORES = 1 << 11
"""Scores of one program, of which its registers hold several forms."""
_BLOCKS_AT_ONCE = 64
_EXPERTS_AT_ONCE = 16


def block_tokens(num_experts: int) -> int:
    """Tokens of one program."""
    return max(2, min(16, _SCORES // triton.next_power_of_2(num_experts)))


@dataclass(frozen=True)
class TopKConstants:
    """Constants of a router, which its kernels are compiled for."""

    top_k: int
    scores: str
    """`softmax` or `sigmoid`."""
    renormalizes: bool
    """Whether weights are divided by their sum; under softmax, that of the chosen logits."""
    scaling_factor: float
    num_groups: int = 1
    """Groups of consecutive experts; above 1, both it and the number of experts are powers of 2."""
    groups_per_token: int = 1
    num_best: int = 1
    """Number of a group's best scores, one or two, whose sum is its rank."""
    is_balanced_by_last_load: bool = False
    """Whether probabilities are balanced by the previous step's loads, in one scope of all tokens."""

    def for_kernel(self, num_experts: int) -> dict[str, Any]:
        return {
            "TOP_K": self.top_k, "SCORES": self.scores, "RENORMALIZES": self.renormalizes,
            "NUM_EXPERTS": num_experts, "EXPERTS": triton.next_power_of_2(num_experts),
            "CHOICES": triton.next_power_of_2(self.top_k), "BLOCK": block_tokens(num_experts),
        }  # fmt: skip


@dataclass(frozen=True)
class LossScales:
    """Coefficients of both losses, and the units and tokens of the whole batch that their means are over; 0 for those
    of this call."""

    aux: float = 0.0
    z: float = 0.0
    aux_units: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class RoutedTokens:
    """Choices of T tokens, and what balances them. Weights and losses are differentiable."""

    expert: Tensor
    """int64 `[T, K]`, by preference."""
    weight: Tensor
    """float32 `[T, K]`; 0 where not kept."""
    kept: Tensor
    """bool `[T, K]`: False for padding, and beyond capacity."""
    chosen: Tensor
    """int64 `[E]`: choices of real tokens."""
    aux_loss: Tensor
    """Scalar, as the next three; the mean over scopes with real tokens (`moe.routing.balance`)."""
    z_loss: Tensor
    weighted_loss: Tensor
    """This call's share of both losses times their coefficients."""
    entropy: Tensor
    scalars: Tensor
    """float32 `[3]`: fractions of rejected and dropped choices, and the constant 1; one kernel writes all three."""
    counts: Tensor
    """int64 `[3]`: scopes with real tokens, real tokens, and their choices."""
    admitted: AdmittedChoices | None = None
    """None without capacity."""


def route_top_k(
    logits_UTE: Tensor,
    padding_UT: Tensor | None,
    constants: TopKConstants,
    *,
    bias_E: Tensor | None = None,
    last_load_E: Tensor | None = None,
    scales: LossScales = LossScales(),
    capacity: Capacity | None = None,
) -> RoutedTokens:
    """Route U scopes of tokens by float32 logits `[U, T, E]`. `padding_UT` bool is True for padding."""
    padding = None if padding_UT is None else padding_UT.contiguous()
    with launching_on(logits_UTE.device):  # in the backward pass, autograd makes it current
        tensors = _TopK.apply(logits_UTE.contiguous(), padding, constants, bias_E, last_load_E, scales, capacity)
    routed = RoutedTokens(*tensors[:_NUM_ROUTED])
    if capacity is None:
        return routed
    position, length, load, *rows = tensors[_NUM_ROUTED:]
    return replace(routed, admitted=AdmittedChoices(routed.kept, position, length, load, DeviceRows(*rows)))


_NUM_ROUTED = 10
"""Tensors of `RoutedTokens` without those of `admitted`."""


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        padding: Tensor | None,
        constants: TopKConstants,
        bias: Tensor | None,
        last_load: Tensor | None,
        scales: LossScales,
        capacity: Capacity | None,
    ) -> tuple[Tensor | None, ...]:
        num_scopes, scope_tokens, num_experts = logits.shape
        num_tokens, num_blocks = num_scopes * scope_tokens, triton.cdiv(scope_tokens, block_tokens(num_experts))
        device = logits.device

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        expert, weight = empty(num_tokens, constants.top_k, dtype=torch.int64), empty(num_tokens, constants.top_k)
        is_kept = empty(num_tokens, constants.top_k, dtype=torch.bool)
        count = empty(num_scopes, num_blocks, num_experts, dtype=torch.int32)
        probability, sums = empty(num_scopes, num_blocks, num_experts), empty(num_scopes, num_blocks, SUMS.value)
        if num_tokens:
            route[num_blocks, num_scopes](
                logits, is_kept if padding is None else padding, logits if bias is None else bias, expert, weight,
                is_kept, count, probability, sums, scope_tokens, constants.scaling_factor,
                **constants.for_kernel(num_experts), HAS_PADDING=padding is not None, HAS_BIAS=bias is not None,
                GROUPS=constants.num_groups, GROUPS_PER_TOKEN=constants.groups_per_token, NUM_BEST=constants.num_best,
            )  # fmt: skip
        num_parts = triton.cdiv(num_experts, _EXPERTS_AT_ONCE)
        chosen, slope, parts = empty(num_experts, dtype=torch.int64), empty(num_scopes, num_experts), empty(num_parts)
        balance[num_parts,](
            count, probability, sums, chosen if last_load is None else last_load, chosen, slope, parts, num_scopes,
            num_blocks, TOP_K=constants.top_k, NUM_EXPERTS=num_experts,
            ALL_EXPERTS=triton.next_power_of_2(num_experts), EXPERTS=_EXPERTS_AT_ONCE, BLOCKS=_BLOCKS_AT_ONCE,
            BY_LAST_LOAD=constants.is_balanced_by_last_load, HAS_LAST_LOAD=last_load is not None,
        )  # fmt: skip
        admission: tuple[Tensor | None, ...] = (None,) * 6
        load = chosen
        if capacity is not None:
            admitted = admit_within(capacity, expert, weight, is_kept, num_experts)
            admission = (admitted.position_TK, admitted.length_GE, admitted.load_E, *admitted.rows)
            is_kept, load = admitted.kept_TK, admitted.load_E
        aux_loss, z_loss, weighted_loss, entropy = empty(), empty(), empty(), empty()
        scalars, counts = empty(3), empty(3, dtype=torch.int64)
        summarize[1,](
            sums, parts, load, aux_loss, z_loss, weighted_loss, entropy, scalars, counts, num_scopes, num_blocks,
            scales.aux, scales.z, float(scales.aux_units), float(scales.num_tokens), NUM_EXPERTS=num_experts,
            ALL_EXPERTS=triton.next_power_of_2(num_experts), NUM_PARTS=num_parts,
            PARTS=triton.next_power_of_2(num_parts), BLOCKS=_BLOCKS_AT_ONCE, TOP_K=constants.top_k,
            BY_LAST_LOAD=constants.is_balanced_by_last_load,
        )  # fmt: skip
        ctx.save_for_backward(logits, padding, expert, slope, counts, is_kept if capacity else None)
        ctx.constants, ctx.scales = constants, scales
        ctx.mark_non_differentiable(
            expert, is_kept, chosen, entropy, scalars, counts, *(tensor for tensor in admission if tensor is not None)
        )
        ctx.set_materialize_grads(False)
        routed = (expert, weight, is_kept, chosen, aux_loss, z_loss, weighted_loss, entropy, scalars, counts)
        return *routed, *admission

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, padding, expert, slope, counts, is_kept = ctx.saved_tensors
        constants: TopKConstants = ctx.constants
        scales: LossScales = ctx.scales
        _, d_weight, _, _, d_aux, d_z, d_weighted, *_ = gradients
        num_scopes, scope_tokens, num_experts = logits.shape
        d_logits = torch.empty_like(logits)
        if logits.numel():
            route_backward[triton.cdiv(scope_tokens, block_tokens(num_experts)), num_scopes](
                logits, logits if padding is None else padding, logits if is_kept is None else is_kept, expert, slope,
                counts, *(
                    logits if gradient is None else gradient.contiguous()
                    for gradient in (d_weight, d_aux, d_z, d_weighted)
                ),
                d_logits, scope_tokens, constants.scaling_factor, scales.aux, scales.z, float(scales.aux_units),
                float(scales.num_tokens), **constants.for_kernel(num_experts),
                HAS_PADDING=padding is not None, HAS_CAPACITY=is_kept is not None, HAS_WEIGHT=d_weight is not None,
                HAS_AUX=d_aux is not None, HAS_Z=d_z is not None,
                HAS_WEIGHTED=d_weighted is not None, BY_LAST_LOAD=constants.is_balanced_by_last_load,
            )  # fmt: skip
        return d_logits, None, None, None, None, None, None
