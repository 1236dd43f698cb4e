"""The fused kernels on a GPU: results repeat bit for bit, and the host waits for nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from moe.dispatch import dispatcher
from moe.experts import LocalExperts
from moe.kernels.support import KernelKind, kernels_are_correct
from moe.layers import MoELayer
from moe.parallel import Layout, local_parameters, narrow
from moe.routing import Choices
from moe.spec import AdamWSpec, MoESpec
from moe.train.optimizer.build import build_optimizer, update_parameters
from moe.train.optimizer.fused_adamw import FusedAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]

SPECS = [
    MoESpec(num_experts=16, model_dim=256, hidden_dim=192, group_tokens=512, **fields)
    for fields in (
        {"router": "softmax_topk", "top_k": 4, "activation": "swiglu"},
        {"router": "softmax_topk", "top_k": 2, "capacity_factor": 0.7, "activation": "geglu"},
        {"router": "sigmoid_topk", "top_k": 2, "activation": "relu"},
    )
]


def layer_and_x(spec: MoESpec) -> tuple[MoELayer, Tensor]:
    layer = MoELayer(spec, layer=1).cuda()
    layer.experts.to(torch.bfloat16)
    x = torch.randn(4 * spec.group_tokens, spec.model_dim, generator=torch.Generator().manual_seed(0))
    return layer, x.to("cuda", torch.bfloat16).requires_grad_()


def results(layer: MoELayer, x: Tensor) -> list[Tensor]:
    y, _ = layer(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])]


@contextmanager
def refused_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_agree_with_plain_products_on_this_gpu() -> None:
    from moe.kernels import check

    device = torch.device("cuda", 0)
    limits: dict[KernelKind, float] = {
        "experts": 0.05,
        "routing": 1e-4,
        "norms": 0.01,
        "rotary": 0.01,
        "optimizer": 0.01,
    }
    for kind, limit in limits.items():
        assert kernels_are_correct(device, kind)
        assert check.CHECKS[kind](device) < limit


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.router}-{spec.activation}")
def test_a_layer_by_kernels_is_that_by_rows_and_repeats_bit_for_bit(
    spec: MoESpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = layer_and_x(spec)
    first, again = results(layer, x), results(layer, x)
    for result, repeated in zip(first, again, strict=True):
        assert torch.equal(result, repeated)

    def by_rows(x: Tensor, choices: Choices, experts: LocalExperts) -> None:
        return None

    monkeypatch.setattr(dispatcher, "fused_computation", by_rows)
    for result, expected in zip(first, results(layer, x), strict=True):
        assert (result - expected).abs().max() <= 0.03 * expected.abs().max()


def test_an_update_by_one_kernel_waits_for_nothing_and_repeats_bit_for_bit() -> None:
    results = []
    for _ in range(2):
        module = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 5)).cuda()
        for number, parameter in enumerate(module.parameters()):
            parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
            parameter.grad = torch.full_like(parameter, number - 1.5)
        parameters = local_parameters(module)
        optimizer = build_optimizer(AdamWSpec(name="adamw"), parameters, Layout.single("cuda"))
        assert isinstance(optimizer, FusedAdamW)
        copy, factor = narrow(module[0].weight, torch.bfloat16), torch.full((), 0.5, dtype=torch.float64, device="cuda")
        update_parameters(optimizer, parameters, 0.1, factor)  # compiles
        with refused_waits():
            update_parameters(optimizer, parameters, 0.1, factor)
        assert torch.equal(copy, module[0].weight.bfloat16()), "rounded"
        results.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.router}-{spec.activation}")
def test_the_host_waits_for_nothing_of_a_layer(spec: MoESpec) -> None:
    layer, x = layer_and_x(spec)
    results(layer, x)  # compiles
    with refused_waits():
        results(layer, x)
