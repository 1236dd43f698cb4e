"""Gradients of weights that are deferred are bit by bit those of a whole backward pass."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.layers.linear import linear, product
from moe.parallel import DeferredGradients, Layout, discard_gradients
from tests.parity.combinations import model_of, train_of
from tests.parity.language_models import ATTENTIONS, dense, language_model, with_adapter
from tests.parity.trajectory import Degrees, Model, Shape, batch_of, state_of

SHAPE = Shape(groups=4, rows=1)
AT_ONCE = ("embedding", "output.weight", "router", "convolution", "head_weights", "shared.gate", "scale", "sinks",
           "dense.w_out.weight_lora")  # fmt: skip
"""Parts of names of the few parameters whose gradients are not deferred."""
MODELS: dict[str, Model] = {
    **{attention: language_model(attention) for attention in ATTENTIONS},
    "without experts": dense(language_model("MLA")),
    "translation": model_of(),
    "gated experts with biases, shared ones with a gate": model_of(
        router="softmax_topk", activation="swiglu", expert_bias=True, shared_hidden_dim=20, shared_gate=True
    ),
}


def gradients_of(spec: Model, dtype: str, degrees: Degrees, *, defers: bool) -> tuple[dict[str, Tensor], set[str]]:
    """Gradients of two micro-batches by name, in the second step, and the names of the parameters
    that have none before `compute`."""
    plan = degrees.plan(SHAPE.groups)
    layout = Layout.build(plan, "cpu")
    state, without_gradients = state_of(spec, train_of(dtype), layout), set[str]()
    for step_number in (1, 2):  # the second reuses the buffers of the first
        batch = batch_of(layout, plan, SHAPE, spec, step_number)
        assert len(batch.micro_batches) == 2
        discard_gradients(state.parameters)
        for number, micro_batch in enumerate(batch.micro_batches):
            deferred = DeferredGradients()
            if not defers:
                (state.task.loss(state.model, micro_batch).objective / batch.num_targets).backward()
                continue
            with deferred.deferring():
                (state.task.loss(state.model, micro_batch).objective / batch.num_targets).backward()
            if not number:
                without_gradients = {p.name for p in state.parameters if p.parameter.grad is None}
            deferred.compute()
    gradients = {p.name: p.parameter.grad for p in state.parameters if p.parameter.grad is not None}
    layout.close()
    return gradients, without_gradients


@pytest.mark.sample(7)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_whole_backward_pass(name: str, dtype: str) -> None:
    check(MODELS[name], dtype, Degrees(micro_batch_groups=2))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_passes_defer_too(recompute: str) -> None:
    check(MODELS["MLA"], "float32", Degrees(micro_batch_groups=2, recompute=recompute))


@pytest.mark.parametrize("options", [{}, {"dora": True, "targets": ["*.attention.*"], "dropout": 0.3}], ids=str)
def test_adapters_defer_too(options: dict[str, Any]) -> None:
    adapter = {"rank": 2, **options}
    check(with_adapter(language_model("MLA"), adapter), "float32", Degrees(micro_batch_groups=2))


def check(spec: Model, dtype: str, degrees: Degrees) -> None:
    expected, _ = gradients_of(spec, dtype, degrees, defers=False)
    gradients, deferred = gradients_of(spec, dtype, degrees, defers=True)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    matrices = {name for name, gradient in gradients.items() if gradient.dim() > 1}
    assert {name for name in matrices - deferred if not any(part in name for part in AT_ONCE)} == set()


def test_a_weight_that_is_no_parameter_is_not_deferred() -> None:
    x, leaf, deferred = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True), DeferredGradients()
    with deferred.deferring():
        (linear(x, leaf * 2).sum() + product(x, (leaf * 2).t()).sum()).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, 4 * x.sum(0).expand(5, 4))


def test_what_gradients_are_computed_from_is_freed_with_them() -> None:
    x, weight, deferred = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True), DeferredGradients()
    with deferred.deferring():
        linear(x, weight).sum().backward()
    freed = weakref.ref(x)
    expected = x.sum(0).expand(5, 4).clone()
    del x
    assert freed() is not None
    assert weight.grad is None
    deferred.compute()
    assert freed() is None
    torch.testing.assert_close(weight.grad, expected)
