"""A layer with kernels saves its tokens once, the first products, and routing metadata."""

import pytest
import torch

from moe.kernels.experts import FusedComputation
from moe.layers import MoELayer
from moe.parallel import Layout, keep_buffers, local_parameters
from moe.spec import MoESpec
from tests.kernels.cases import DEVICE
from tests.kernels.enabled import kernels_everywhere

M, H, E, K = 32, 24, 8, 2
"""Model width, expert width, number of experts, experts per token."""
SONIC_METADATA = 4 * 5 * K
"""Bytes per token that SonicMoE's functions save besides tokens and products: of each choice the score, the expert and
three indices (github.com/Dao-AILab/sonic-moe, 0a4d7dd, `moe_TC_softmax_topk_layer`)."""


def saved_bytes(num_tokens: int, activation: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that the forward pass of one layer in bfloat16 saves for backward, without parameters."""
    spec = MoESpec(
        num_experts=E, model_dim=M, hidden_dim=H, group_tokens=num_tokens, router="softmax_topk", top_k=K,
        activation=activation,
    )  # fmt: skip
    layer = MoELayer(spec).to(DEVICE)
    keep_buffers(local_parameters(layer), Layout.single(DEVICE))
    x = torch.randn(num_tokens, M, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    storages: dict[int, int] = {}

    def record_storage(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    run = FusedComputation.run

    def recorded_run(self: FusedComputation, *arguments: torch.Tensor) -> torch.Tensor:
        for tensor in self.rows.tensors:  # held by the graph too
            record_storage(tensor)
        return run(self, *arguments)

    monkeypatch.setattr(FusedComputation, "run", recorded_run)
    with kernels_everywhere(), torch.autograd.graph.saved_tensors_hooks(record_storage, lambda tensor: tensor):
        y, _ = layer(x)
    monkeypatch.undo()
    y.sum().backward()  # uses all of them
    return sum(storages.values())


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("activation", "num_products"), [("swiglu", 2), ("relu", 1)])
def test_tokens_are_saved_once_and_first_products_for_each_choice(
    activation: str, num_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2TM + 4TKH bytes with a gate, as of SonicMoE (arXiv 2512.14080), and routing metadata, of which only the logits
    are more than it saves."""
    tokens_and_products = 2 * M + 2 * num_products * K * H
    logits, choices, weights, row_map = 4 * E, 8 * K, 4 * K, 2 * 4 * K
    per_token = tokens_and_products + logits + choices + weights + row_map
    assert per_token <= tokens_and_products + SONIC_METADATA + logits
    few, many = 16, 48
    assert saved_bytes(many, activation, monkeypatch) - saved_bytes(few, activation, monkeypatch) == per_token * (
        many - few
    )
