"""Parts of a model for which there are no kernels are named once."""

from typing import Any

import pytest
import torch
from torch import nn

from moe.kernels.configs import MAX_NORM_WIDTH
from moe.layers import MoELayer
from moe.layers.norm import RMSNorm
from moe.spec import MoESpec
from moe.train.kernel_notes import kernel_notes, notes_where


def notes(*modules: nn.Module, dtype: torch.dtype = torch.bfloat16, unused: str | None = None) -> list[str]:
    return list(notes_where(lambda kind: kind != unused, nn.ModuleList(modules), dtype))


def layers(**fields: Any) -> list[MoELayer]:
    spec = MoESpec(**{"num_experts": 4, "model_dim": 8, "hidden_dim": 8, "group_tokens": 16, "router": "softmax_topk",
                      "activation": "swiglu", **fields})  # fmt: skip
    return [MoELayer(spec, number) for number in (1, 2)]


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"router": "sinkhorn_topk"}, "routing", "router sinkhorn_topk"),
        ({"router": "sparsemixer"}, "routing", "router sparsemixer"),
        ({"capacity_factor": 1.0, "drop_by": "probability"}, "routing", "drop_by probability"),
        ({"num_experts": 6, "num_expert_groups": 3, "expert_groups_per_token": 2}, "routing", "6 experts in 3 groups"),
        ({"num_experts": 1024, "model_dim": 1, "hidden_dim": 1}, "experts", "1024 experts"),
        ({"router": "sigmoid_topk", "renormalize_eps": 0.5}, "routing", "renormalize_eps 0.5"),
    ],
    ids=str,
)
def test_layers_of_one_kind_are_named_once(fields: dict[str, Any], kind: str, value: str) -> None:
    lines = [line for line in notes(*layers(**fields)) if line.startswith(f"kernels for {kind} ")]
    assert len(lines) == 1
    assert value in lines[0]
    assert lines[0] not in notes(*layers(**fields), unused=kind)


def test_supported_layers_are_not_named() -> None:
    for capacity_factor in (None, 1.0):
        assert notes(*layers(capacity_factor=capacity_factor, num_expert_groups=2, expert_groups_per_token=1)) == []


def test_wide_norms_and_products_without_tensor_cores_are_named() -> None:
    wide, narrow = RMSNorm(), RMSNorm()
    wide.weight, narrow.weight = nn.Parameter(torch.ones(MAX_NORM_WIDTH + 1)), nn.Parameter(torch.ones(MAX_NORM_WIDTH))
    (line,) = notes(wide, wide, narrow)
    assert str(MAX_NORM_WIDTH + 1) in line
    (line,) = notes(*layers(), dtype=torch.float32)
    assert "float32" in line


def test_nothing_is_said_where_no_kernel_runs() -> None:
    assert kernel_notes(nn.ModuleList(layers(router="sinkhorn_topk")), torch.device("cpu"), torch.float32) == []
