"""Fused experts against the reference, in outputs and all gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from moe.experts import ExpertWeights, build_activation
from moe.experts.weights import ExpertSettings
from moe.kernels.configs import Configs
from moe.kernels.experts import FusedComputation
from moe.kernels.rows import RowMap
from moe.layers import MoELayer
from moe.parallel.buffers import Buffers
from moe.spec import MoESpec
from tests.kernels.cases import DEVICE, SMALL, SMALL_TMA, Case, cases, inputs_of, reference
from tests.kernels.enabled import kernels_everywhere


def computation_of(case: Case, *, recompute: bool = False, configs: Configs = SMALL) -> FusedComputation:
    rows = RowMap.from_choices(case.expert.to(DEVICE), case.kept.to(DEVICE), case.num_experts)
    return FusedComputation(rows, case.activation, configs, recompute)


def results_of(case: Case, *, recompute: bool = False, configs: Configs = SMALL) -> list[Tensor]:
    """Sums by token, and gradients of tokens, of the choices' weights and of the experts' weights."""
    x, weight, tensors = inputs_of(case)
    computation = computation_of(case, recompute=recompute, configs=configs)
    y = computation.run(x, weight, ExpertWeights.from_tensors(tensors, case.settings))
    leaves = [x, weight, *(tensor for tensor in tensors if tensor is not None)]
    return [y, *torch.autograd.grad(y, leaves, case.d_y.to(DEVICE))]


def errors_of(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Largest error of each result, relative to its largest value."""
    return [
        ((result.double() - value).abs().max() / value.abs().max().clamp(min=1e-3)).item() if value.numel() else 0.0
        for result, value in zip(results, exact, strict=True)
    ]


@given(cases())
def test_sums_and_gradients_are_those_of_the_reference(case: Case) -> None:
    results, exact = results_of(case), reference(case)
    assert [result.dtype for result in results[:2]] == [case.x.dtype] * 2
    assert all(result.dtype == torch.float32 for result in results[2:])
    # In bfloat16, saved products are rounded, then their gradients, then the sums of those.
    assert max(errors_of(results, exact)) < (2e-5 if case.x.dtype == torch.float32 else 6e-2)


@pytest.mark.slow
@given(cases())
def test_weights_loaded_by_descriptors_give_the_same_results(case: Case) -> None:
    """Where alignment allows descriptors; other weights are loaded by pointers."""
    for result, expected in zip(results_of(case, configs=SMALL_TMA), results_of(case), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_products_load_aligned_weights_by_descriptors(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch_tiles = [], FusedComputation.launch_tiles

    def spy(self: FusedComputation, kernel: Any, *arguments: Any, **keywords: Any) -> None:
        launched.append((kernel.__name__, keywords["ACCESS"]))
        launch_tiles(self, kernel, *arguments, **keywords)

    monkeypatch.setattr(FusedComputation, "launch_tiles", spy)
    x, expert = (
        torch.ones(4, 16, device=DEVICE, requires_grad=True),
        torch.zeros(4, 1, dtype=torch.int64, device=DEVICE),
    )
    w_in, w_gate = (torch.ones(2, 16, 24, device=DEVICE, requires_grad=True) for _ in range(2))
    w_out = torch.ones(2, 24, 16, device=DEVICE, requires_grad=True)
    rows = RowMap.from_choices(expert, expert == 0, num_experts=2)
    computation = FusedComputation(rows, build_activation(activation), SMALL_TMA)
    weights = ExpertWeights(w_in, w_out, w_gate if activation == "swiglu" else None)
    computation.run(x, x.new_ones(4, 1), weights).sum().backward()
    assert launched == [
        ("first_products", "tma"), ("product", "tma"), ("hidden_gradients", "tma_transposed"),
        ("product", "tma_transposed"),
    ]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=5)
@given(cases(dtypes=(torch.float32,)))
def test_products_computed_again_give_the_same_gradients(case: Case) -> None:
    for result, again in zip(results_of(case), results_of(case, recompute=True), strict=True):
        assert torch.equal(result, again)


@pytest.mark.slow
@settings(max_examples=5)
@given(cases(dtypes=(torch.float32,)))
def test_gradients_are_added_to_buffers_and_frozen_weights_have_none(case: Case) -> None:
    """Two passes over experts with gradient buffers, of which every second is frozen, against the reference."""
    x, weight, tensors = inputs_of(case)
    parameters = [None if tensor is None else torch.nn.Parameter(tensor.detach()) for tensor in tensors]
    trained = [parameter for parameter in parameters if parameter is not None]
    for parameter in trained[1::2]:
        parameter.requires_grad_(False)
    for parameter in trained[::2]:
        parameter.moe_buffers = Buffers(keeps_narrow=False)
    weights = ExpertWeights.from_tensors(parameters, case.settings)
    for _ in range(2):
        computation_of(case).run(x, weight, weights).backward(case.d_y.to(DEVICE))
    exact = reference(case)[3:]
    for parameter, gradient in list(zip(trained, exact, strict=True))[::2]:
        assert errors_of([parameter.grad], [2 * gradient]) < [2e-5]
    assert [parameter.grad for parameter in trained[1::2]] == [None] * len(trained[1::2])


ROUTED = [
    MoESpec(num_experts=6, model_dim=16, hidden_dim=24, group_tokens=20, **fields)
    for fields in (
        {"router": "softmax_topk", "top_k": 2},
        {"router": "softmax_topk", "top_k": 3, "capacity_factor": 0.5, "activation": "geglu"},
        {"router": "softmax_topk", "top_k": 2, "capacity_factor": 0.5, "drop_by": "probability"},
        {"router": "sigmoid_topk", "top_k": 2, "num_expert_groups": 3, "expert_groups_per_token": 2},
        {"router": "gshard_top2"},
        {"router": "switch_top1", "capacity_factor": 1.0},
    )
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("spec", ROUTED, ids=lambda spec: f"{spec.router}-{spec.activation}")
def test_a_layer_is_the_same_by_kernels(spec: MoESpec, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MoELayer(spec, layer=1).to(DEVICE)
    x = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
    leaves = [x, *layer.parameters()]

    def run() -> list[Tensor]:
        y, routing = layer(x)
        return [y, routing.load, *torch.autograd.grad(y.square().sum(), leaves)]

    by_rows, num_runs, run_by_kernels = run(), 0, FusedComputation.run

    def counted_run(*arguments: Any) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        return run_by_kernels(*arguments)

    monkeypatch.setattr(FusedComputation, "run", counted_run)
    with kernels_everywhere():
        by_kernels = run()
    assert num_runs == 1
    for ours, theirs in zip(by_kernels, by_rows, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_tensors_may_be_views_of_any_strides() -> None:
    """Weights of the choices, biases and adapters as columns of larger tensors, `w_gate` laid out by column, and a
    gradient that is accumulated in a transposed tensor."""
    generator = torch.Generator().manual_seed(0)

    def strided(*shape: int) -> Tensor:
        wide = torch.randn(*shape[:-1], shape[-1] + 3, generator=generator).to(DEVICE) / shape[-2] ** 0.5
        return wide[..., 1:-2]

    w_in, w_gate = strided(3, 16, 24), strided(3, 24, 16).transpose(1, 2)
    tensors = [w_in, strided(3, 24, 16), w_gate, strided(3, 24), strided(3, 16), strided(3, 24),
               strided(3, 16, 4), strided(3, 4, 24), strided(3, 4, 24), strided(3, 24, 4), strided(3, 4, 16),
               None, None, None]  # fmt: skip
    x, weight, d_y = strided(9, 16).contiguous(), torch.rand(2, 9, generator=generator).to(DEVICE).t(), strided(9, 16)
    expert = torch.rand(9, 3, generator=generator).topk(2, dim=1).indices
    computation = FusedComputation(
        RowMap.from_choices(expert.to(DEVICE), torch.ones_like(expert, dtype=torch.bool).to(DEVICE), 3),
        build_activation("swiglu"),
        SMALL,
    )

    def run(*, contiguous: bool) -> list[Tensor | None]:
        copies = [
            None if tensor is None else torch.nn.Parameter(tensor.contiguous() if contiguous else tensor)
            for tensor in tensors
        ]
        w_out = copies[1]
        assert w_out is not None
        w_out.moe_buffers = Buffers(keeps_narrow=False)
        zeros = torch.zeros_like(w_out)
        w_out.grad = zeros if contiguous else zeros.transpose(1, 2).contiguous().transpose(1, 2)
        leaf, weights = x.clone().requires_grad_(), (weight.contiguous() if contiguous else weight).requires_grad_()
        settings = ExpertSettings(in_lora_scale=0.5, out_lora_scale=0.25)
        y = computation.run(leaf, weights, ExpertWeights.from_tensors(copies, settings))
        y.backward(d_y)
        return [y, leaf.grad, weights.grad, *(None if copy is None else copy.grad for copy in copies)]

    expected = run(contiguous=True)
    weight = weight.detach()
    for result, value in zip(run(contiguous=False), expected, strict=True):
        torch.testing.assert_close(result, value)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped"])
def test_nan_is_passed_on(activation: str) -> None:
    spec = MoESpec(
        num_experts=2, model_dim=8, hidden_dim=8, group_tokens=4, activation=activation, router="softmax_topk", top_k=2
    )
    layer = MoELayer(spec).to(DEVICE)
    x = torch.ones(4, 8, device=DEVICE)
    with torch.no_grad():
        layer.experts.w_in[1, 0, 0] = float("nan")
    with kernels_everywhere():
        y, _ = layer(x)
    assert y.isnan().all()


def test_experts_that_choose_are_dispatched_by_rows() -> None:
    spec = MoESpec(num_experts=2, model_dim=8, hidden_dim=8, group_tokens=4, router="expert_choice")
    layer = MoELayer(spec).to(DEVICE)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    by_rows, _ = layer(x)
    with kernels_everywhere():
        y, _ = layer(x)
    assert torch.equal(y, by_rows)
