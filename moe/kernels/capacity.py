"""Admission of choices within the experts' capacity, and the rows of the admitted ones, in three kernels.

As in `moe.routing.assignments.queue_choices`, a group's choices queue for their experts: first choices before second
ones, then in token order. Sums are of integers, so results are the same in every run.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.rows import block_choices, experts_of, scan_blocks
from moe.routing.choices import DeviceRows

_BLOCKS_PER_SCAN, _EXPERTS_PER_SCAN = 64, 16
NUM_WARPS = 8
"""Warps of `_admit`, which would spill registers with fewer."""


@dataclass(frozen=True)
class Capacity:
    """Most rows that an expert accepts from each of `num_groups` equal groups of tokens."""

    num_groups: int
    max_rows: int


@dataclass(frozen=True)
class AdmittedChoices:
    """Choices within capacity, and their rows."""

    kept_TK: Tensor
    """bool `[T, K]`"""
    position_TK: Tensor
    """int64 `[T, K]`: position in the expert's buffer for the token's group; 0 where not kept."""
    length_GE: Tensor
    """int64 `[G, E]`: admitted choices."""
    load_E: Tensor
    """int64 `[E]`: admitted choices of all groups."""
    rows: DeviceRows


def admit_within(
    capacity: Capacity, expert_TK: Tensor, weight_TK: Tensor, real_TK: Tensor, num_experts: int
) -> AdmittedChoices:
    """Admit choices `expert_TK` int64 of real tokens, which `real_TK` bool marks. Weights of all others are set to 0 in
    place. Tensors are contiguous, `[T, K]`."""
    (num_tokens, top_k), num_groups, device = expert_TK.shape, capacity.num_groups, expert_TK.device
    group_tokens, block = num_tokens // max(1, num_groups), block_choices(num_experts)
    blocks_per_choice = triton.cdiv(group_tokens, block)
    num_blocks, padded_experts = top_k * blocks_per_choice, triton.next_power_of_2(num_experts)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    counts, group_row_GE = empty(num_groups, num_blocks, num_experts), empty(num_groups, num_experts)
    length_GE, load_E = empty(num_groups, num_experts, dtype=torch.int64), empty(num_experts, dtype=torch.int64)
    kept_TK, position_TK = torch.empty_like(real_TK), empty(num_tokens, top_k, dtype=torch.int64)
    rows = DeviceRows(empty(num_tokens, top_k), empty(num_tokens * top_k), empty(num_experts + 1))
    grid, blocks = (max(1, blocks_per_choice), top_k, max(1, num_groups)), {"EXPERTS": padded_experts, "BLOCK": block}
    if num_tokens:
        _count_queued[grid](expert_TK, real_TK, counts, group_tokens, num_experts, TOP_K=top_k, **blocks)
    _scan_queued[triton.cdiv(num_experts, _EXPERTS_PER_SCAN),](
        counts, length_GE, group_row_GE, load_E, num_groups, num_blocks, num_experts, capacity.max_rows,
        BLOCKS=_BLOCKS_PER_SCAN, EXPERTS=_EXPERTS_PER_SCAN,
    )  # fmt: skip
    _admit[grid](
        expert_TK, real_TK, weight_TK, counts, group_row_GE, load_E, kept_TK, position_TK, *rows, group_tokens,
        num_experts, capacity.max_rows, TOP_K=top_k, **blocks, num_warps=NUM_WARPS,
    )  # fmt: skip
    return AdmittedChoices(kept_TK, position_TK, length_GE, load_E, rows)


@triton.jit(do_not_specialize=["group_tokens"])
def _count_queued(
    expert_ptr, real_ptr, counts_ptr, group_tokens, num_experts, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Choices of each expert in a block of one group's k-th choices: `counts` `[G, K · blocks, E]`. Moves the choices
    once."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    choice, is_choice = _choices(token, group_tokens, TOP_K)
    expert = experts_of(expert_ptr, real_ptr, choice, is_choice)
    experts = tl.arange(0, EXPERTS)
    count = tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + _row_of_block() * num_experts + experts, count, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_groups", "num_blocks", "capacity"])
def _scan_queued(
    counts_ptr, length_ptr, group_row_ptr, load_ptr, num_groups, num_blocks, num_experts, capacity,
    BLOCKS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Replace counts by those of the group's earlier blocks; write `length` `[G, E]`, `group_row` `[G, E]`, which is
    the number of rows of earlier groups, and `load` `[E]`. Moves the counts twice."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    load = tl.zeros((EXPERTS,), tl.int32)
    for group in range(num_groups):
        group_counts_ptr = counts_ptr + group * num_blocks * num_experts
        total = scan_blocks(group_counts_ptr, expert, num_blocks, num_experts, BLOCKS, EXPERTS)
        length = tl.minimum(total, capacity)
        tl.store(length_ptr + group * num_experts + expert, length.to(tl.int64), mask=is_expert)
        tl.store(group_row_ptr + group * num_experts + expert, load, mask=is_expert)
        load += length
    tl.store(load_ptr + expert, load.to(tl.int64), mask=is_expert)


@triton.jit(do_not_specialize=["group_tokens", "capacity"])
def _admit(
    expert_ptr, real_ptr, weight_ptr, before_ptr, group_row_ptr, load_ptr, kept_ptr, position_ptr, row_ptr, choice_ptr,
    first_row_ptr, group_tokens, num_experts, capacity, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Decide which choices of a block are kept, with their positions and rows. Reads the choices once, and writes each
    result once."""
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    choice, is_choice = _choices(token, group_tokens, TOP_K)
    expert = experts_of(expert_ptr, real_ptr, choice, is_choice)
    earlier_choice, is_earlier = _choices(token, group_tokens, TOP_K)
    earlier_expert = experts_of(expert_ptr, real_ptr, earlier_choice, is_earlier)
    is_ahead = (earlier_expert[None, :] == expert[:, None]) & (token[None, :] < token[:, None])
    is_real = expert >= 0
    position = tl.load(before_ptr + _row_of_block() * num_experts + expert, mask=is_real, other=0)
    position += tl.sum(is_ahead.to(tl.int32), axis=1)
    is_kept = is_real & (position < capacity)

    experts = tl.arange(0, EXPERTS)
    load = tl.load(load_ptr + experts, mask=experts < num_experts, other=0).to(tl.int32)
    end = tl.cumsum(load, axis=0)
    row = tl.sum(tl.where(expert[:, None] == experts[None, :], (end - load)[None, :], 0), axis=1)
    row += tl.load(group_row_ptr + tl.program_id(2) * num_experts + expert, mask=is_kept, other=0) + position
    weight = tl.load(weight_ptr + choice, mask=is_choice, other=0.0)
    tl.store(weight_ptr + choice, tl.where(is_kept, weight, 0.0), mask=is_choice)
    tl.store(kept_ptr + choice, is_kept, mask=is_choice)
    tl.store(position_ptr + choice, tl.where(is_kept, position, 0).to(tl.int64), mask=is_choice)
    tl.store(row_ptr + choice, tl.where(is_kept, row, -1), mask=is_choice)
    tl.store(choice_ptr + row, choice.to(tl.int32), mask=is_kept)
    if (block == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(first_row_ptr + experts, end - load, mask=experts < num_experts)
        tl.store(first_row_ptr + num_experts + tl.arange(0, 1), tl.sum(load, axis=0) + tl.zeros((1,), tl.int32))


@triton.jit
def _choices(token, group_tokens, TOP_K: tl.constexpr):
    """(index t · K + k of this program's k-th choices, whether each exists)."""
    choice = (tl.program_id(2).to(tl.int64) * group_tokens + token) * TOP_K + tl.program_id(1)
    return choice, token < group_tokens


@triton.jit
def _row_of_block():
    """Row of this program's counts: by group, preference, and block of tokens."""
    row = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    return row * tl.num_programs(0) + tl.program_id(0)
