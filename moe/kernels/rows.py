"""Rows of the experts on the device: a stable counting sort of the choices, whose counts the host never reads.

Three kernels: counts by block of choices, their running sums, and the scatter of choices to rows. Sums are of integers,
so the result is the same in every run.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import launching_on

_COMPARISONS = 1 << 14
"""Most choices × experts that one program compares in registers."""
_BLOCKS_PER_SCAN, _EXPERTS_PER_SCAN = 64, 16
"""Blocks summed at once, and experts of one program, in the scan."""


def block_choices(num_experts: int) -> int:
    """Choices of one program when counting and scattering."""
    return max(16, min(128, _COMPARISONS // triton.next_power_of_2(num_experts)))


@dataclass(frozen=True)
class RowMap:
    """Rows of the kept choices, sorted by expert. Tensors are on the device."""

    expert_TK: Tensor
    """int64 `[T, K]`: expert of each choice."""
    row_TK: Tensor
    """int32 `[T, K]`: row of each choice; -1 where it is not kept."""
    choice_n: Tensor
    """int32 `[T · K]`: choice (t · K + k) of each row; undefined from row `first_row_E[E]` on."""
    first_row_E: Tensor
    """int32 `[E + 1]`: first row of each expert, then the total number of rows."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tensors of the fields, in order."""
        return self.expert_TK, self.row_TK, self.choice_n, self.first_row_E

    @classmethod
    def from_choices(cls, expert_TK: Tensor, kept_TK: Tensor, num_experts: int) -> "RowMap":
        """Sort choices by expert, then token. `expert_TK` int64 below `num_experts`, `kept_TK` bool, both `[T, K]`."""
        num_choices, device = expert_TK.numel(), expert_TK.device
        expert_TK, kept_TK = expert_TK.contiguous(), kept_TK.contiguous()
        block = block_choices(num_experts)
        num_blocks = triton.cdiv(num_choices, block)
        padded_experts = triton.next_power_of_2(num_experts)
        counts = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=device)
        total_E = torch.empty(num_experts, dtype=torch.int32, device=device)
        row_TK = torch.empty(expert_TK.shape, dtype=torch.int32, device=device)
        choice_n = torch.empty(num_choices, dtype=torch.int32, device=device)
        first_row_E = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        with launching_on(device):
            if num_blocks:
                _count_choices[num_blocks,](
                    expert_TK, kept_TK, counts, num_choices, num_experts, EXPERTS=padded_experts, BLOCK=block
                )
            _scan_counts[triton.cdiv(num_experts, _EXPERTS_PER_SCAN),](
                counts, total_E, num_blocks, num_experts, BLOCKS=_BLOCKS_PER_SCAN, EXPERTS=_EXPERTS_PER_SCAN
            )
            _scatter_choices[max(1, num_blocks),](
                expert_TK, kept_TK, counts, total_E, row_TK, choice_n, first_row_E, num_choices, num_experts,
                EXPERTS=padded_experts, BLOCK=block,
            )  # fmt: skip
        return cls(expert_TK, row_TK, choice_n, first_row_E)


@triton.jit(do_not_specialize=["num_choices"])
def _count_choices(
    expert_ptr, kept_ptr, counts_ptr, num_choices, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Kept choices of each expert in a block: `counts` `[blocks, E]`. Moves the choices once."""
    block = tl.program_id(0)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    expert = experts_of(expert_ptr, kept_ptr, choice, choice < num_choices)
    experts = tl.arange(0, EXPERTS)
    count = tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + block * num_experts + experts, count, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def _scan_counts(counts_ptr, total_ptr, num_blocks, num_experts, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Replace counts by those of all earlier blocks, and write each expert's total. Moves the counts twice."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = scan_blocks(counts_ptr, expert, num_blocks, num_experts, BLOCKS, EXPERTS)
    tl.store(total_ptr + expert, total, mask=expert < num_experts)


@triton.jit
def scan_blocks(counts_ptr, expert, num_blocks, num_experts, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Replace counts `[blocks, E]` of these experts by those of all earlier blocks, and return their totals."""
    before = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        pointers = counts_ptr + block[:, None] * num_experts + expert[None, :]
        mask = (block < num_blocks)[:, None] & (expert < num_experts)[None, :]
        count = tl.load(pointers, mask=mask, other=0)
        tl.store(pointers, before[None, :] + tl.cumsum(count, axis=0) - count, mask=mask)
        before += tl.sum(count, axis=0)
    return before


@triton.jit(do_not_specialize=["num_choices"])
def _scatter_choices(
    expert_ptr, kept_ptr, before_ptr, total_ptr, row_ptr, choice_ptr, first_row_ptr, num_choices, num_experts,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row of each choice and the choice of each row. Moves the choices once, and both results once."""
    block = tl.program_id(0)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    expert = experts_of(expert_ptr, kept_ptr, choice, choice < num_choices)
    is_kept = expert >= 0
    earlier = block * BLOCK + tl.arange(0, BLOCK)
    earlier_expert = experts_of(expert_ptr, kept_ptr, earlier, earlier < num_choices)
    is_ahead = (earlier_expert[None, :] == expert[:, None]) & (earlier[None, :] < choice[:, None])
    experts = tl.arange(0, EXPERTS)
    total = tl.load(total_ptr + experts, mask=experts < num_experts, other=0)
    end = tl.cumsum(total, axis=0)
    first_row = tl.sum(tl.where(expert[:, None] == experts[None, :], (end - total)[None, :], 0), axis=1)
    row = first_row + tl.load(before_ptr + block * num_experts + expert, mask=is_kept, other=0)
    row += tl.sum(is_ahead.to(tl.int32), axis=1)
    tl.store(row_ptr + choice, tl.where(is_kept, row, -1), mask=choice < num_choices)
    tl.store(choice_ptr + row, choice, mask=is_kept)
    if block == 0:
        tl.store(first_row_ptr + experts, end - total, mask=experts < num_experts)
        tl.store(first_row_ptr + num_experts + tl.arange(0, 1), tl.sum(total, axis=0) + tl.zeros((1,), tl.int32))


@triton.jit
def experts_of(expert_ptr, kept_ptr, choice, is_choice):
    """Expert of each choice; -1 where it is not kept, or does not exist."""
    expert = tl.load(expert_ptr + choice, mask=is_choice, other=0).to(tl.int32)
    is_kept = tl.load(kept_ptr + choice, mask=is_choice, other=0) != 0
    return tl.where(is_kept, expert, -1)
