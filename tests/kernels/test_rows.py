"""Rows sorted by expert on the device, against a stable sort."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.kernels.rows import RowMap
from tests.kernels.cases import DEVICE


@given(
    st.sampled_from((0, 1, 40, 131, 2100)),
    st.integers(1, 3),
    st.sampled_from((3, 17, 40, 300)),
    st.sampled_from((0.0, 0.7, 1.0)),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_rows_are_in_the_order_of_a_stable_sort(
    num_tokens: int, per_token: int, num_experts: int, share_kept: float, all_to_one: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    expert = scores.topk(per_token, dim=1).indices
    if all_to_one:
        expert = torch.arange(per_token).expand_as(expert)
    kept = torch.rand(num_tokens, per_token, generator=generator) < share_kept
    rows = RowMap.from_choices(expert.to(DEVICE), kept.to(DEVICE), num_experts)

    queue = torch.where(kept, expert, num_experts).reshape(-1)
    num_rows = int(kept.sum())
    choice = queue.argsort(stable=True)[:num_rows]
    row = torch.full_like(queue, -1).index_copy_(0, choice, torch.arange(num_rows))
    counts = torch.bincount(queue, minlength=num_experts + 1)[:num_experts]
    assert rows.choice_n[:num_rows].tolist() == choice.tolist()
    assert rows.row_TK.reshape(-1).tolist() == row.tolist()
    assert rows.first_row_E.tolist() == [0, *counts.cumsum(0).tolist()]
