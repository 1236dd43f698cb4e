"""Admission within capacity against the queues of routers, for blocks so small that every sum has several."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.kernels import capacity
from moe.kernels.capacity import AdmittedChoices, Capacity, admit_within
from moe.routing.assignments import Queues, queue_choices
from tests.kernels.cases import DEVICE


@dataclass(frozen=True)
class Case:
    """Choices `[G, S, K]` of real and of padded tokens."""

    expert: Tensor
    weight: Tensor
    is_real: Tensor
    num_experts: int
    capacity_rows: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts = draw(st.sampled_from((1, 3, 8, 33)))
    top_k = draw(st.integers(1, min(3, num_experts)))
    shape = (draw(st.integers(0, 3)), draw(st.sampled_from((1, 16, 40, 100))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_choosable = draw(st.integers(top_k, num_experts))  # the others get no rows
    expert = torch.rand(*shape, num_choosable, generator=generator).topk(top_k, dim=-1).indices
    is_real = torch.rand(*shape, 1, generator=generator) < draw(st.sampled_from((0.0, 0.7, 1.0)))
    weight = torch.rand(*shape, top_k, generator=generator) * is_real
    return Case(expert, weight, is_real.expand(expert.shape).contiguous(), num_experts, draw(st.integers(1, 50)))


def admit(case: Case) -> tuple[AdmittedChoices, Tensor, Tensor]:
    """(admitted choices, weights, which choices are kept)."""
    num_groups, _, top_k = case.expert.shape
    expert, weight, is_real = (
        tensor.reshape(-1, top_k).to(DEVICE, copy=True) for tensor in (case.expert, case.weight, case.is_real)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "block_choices", lambda num_experts: 16)
        patch.setattr(capacity, "_BLOCKS_PER_SCAN", 4)
        admitted = admit_within(Capacity(num_groups, case.capacity_rows), expert, weight, is_real, case.num_experts)
    return admitted, weight, admitted.kept_TK


@given(cases())
def test_choices_queue_as_in_the_routers(case: Case) -> None:
    admitted, weight, is_kept = admit(case)
    queues = queue_choices(case.expert, case.is_real, case.num_experts)
    expected = case.is_real & queues.admits(case.capacity_rows)
    slots: Queues = queues.within_capacity(case.capacity_rows)
    assert torch.equal(is_kept.cpu(), expected.view(is_kept.shape))
    assert torch.equal(weight.cpu(), torch.where(expected, case.weight, 0.0).view(weight.shape))
    position = torch.where(expected, queues.position, 0)
    assert torch.equal(admitted.position_TK.cpu(), position.reshape(is_kept.shape))
    assert torch.equal(admitted.length_GE.cpu(), slots.length)
    assert torch.equal(admitted.load_E.cpu(), slots.length.sum(0))


@given(cases())
def test_rows_are_sorted_by_expert_then_group_then_position(case: Case) -> None:
    admitted, _, is_kept = admit(case)
    num_groups, group_tokens, _ = case.expert.shape
    row, choice, first_row = (tensor.cpu() for tensor in admitted.rows)
    group = torch.arange(num_groups).view(-1, 1, 1).expand(case.expert.shape)
    position = admitted.position_TK.cpu().view(case.expert.shape)
    keys = (case.expert * num_groups + group) * max(1, group_tokens) + position
    kept_choices = is_kept.cpu().reshape(-1).nonzero().squeeze(1)
    order = kept_choices[keys.reshape(-1)[kept_choices].argsort()]
    num_rows = int(first_row[-1])
    assert torch.equal(choice[:num_rows].long(), order)
    assert torch.equal(row.reshape(-1)[order].long(), torch.arange(num_rows))
    assert (row.reshape(-1) >= 0).sum() == num_rows
    assert torch.equal(first_row.diff().long(), admitted.load_E.cpu())
    assert first_row[0] == 0
