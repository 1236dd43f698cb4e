"""AdamW by one kernel: updates, clipping and narrow copies, against torch's AdamW in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moe.kernels.adamw import BLOCK, AdamWFactors, AdamWTensors, BlockTable, update
from moe.parallel import Layout, local_parameters, narrow
from moe.spec import AdafactorSpec, AdamWSpec
from moe.train.optimizer import build
from moe.train.optimizer.fused_adamw import FusedAdamW
from tests.kernels.cases import DEVICE
from tests.kernels.enabled import kernels_everywhere

SHAPES = st.sampled_from([(), (0, 3), (1,), (7, 5), (BLOCK,), (2, BLOCK), (3, 701), (BLOCK + 1,)])
SPEC = AdamWSpec(name="adamw", peak_lr=0.01, beta2=0.95, weight_decay=0.1)


@st.composite
def tensors_like(draw: st.DrawFn, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Normal values, some of them at addresses that are no multiples of 16 bytes."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    offset = draw(st.sampled_from((0, 0, 1)))
    return [torch.randn(offset + torch.Size(shape).numel(), generator=generator).to(DEVICE)[offset:].view(shape)
            for shape in shapes]  # fmt: skip


@given(st.data())
def test_updates_are_those_of_adamw(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=5))
    constants: dict[str, Any] = {
        "lr": data.draw(st.sampled_from((1e-3, 0.1))),
        "eps": data.draw(st.sampled_from((1e-8, 1e-2))),
        "weight_decay": data.draw(st.sampled_from((0.0, 0.1))),
    }
    beta1, beta2 = data.draw(st.sampled_from(((0.9, 0.95), (0.0, 0.999), (0.5, 0.9))))
    weights, moments1, moments2 = (data.draw(tensors_like(shapes)) for _ in range(3))
    for moments in (moments1, moments2):
        for moment in moments:
            moment.zero_()
    copies = [weight.bfloat16() if data.draw(st.booleans()) else None for weight in weights]
    exact = [weight.double().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(exact, betas=(beta1, beta2), **constants)
    factor = data.draw(st.sampled_from((None, 0.25)))
    on_device = None if factor is None else torch.tensor(factor, dtype=torch.float64, device=DEVICE)
    for step in (1, 2, 3):
        gradients = data.draw(tensors_like(shapes))
        for parameter, gradient in zip(exact, gradients, strict=True):
            parameter.grad = gradient.double() * (factor or 1)
        optimizer.step()
        factors = AdamWFactors.of_step(step, beta1=beta1, beta2=beta2, **constants)
        update(AdamWTensors(weights, gradients, moments1, moments2, copies), BlockTable(weights), factors, on_device)
    for weight, parameter, copy in zip(weights, exact, copies, strict=True):
        torch.testing.assert_close(weight.double(), parameter.detach(), rtol=1e-5, atol=1e-5)
        if copy is not None:  # the interpreter truncates, GPUs round
            torch.testing.assert_close(copy.float(), weight, rtol=2**-7, atol=0.0)


def test_moments_and_factors_late_in_a_run() -> None:
    """Powers of the betas would lose digits in float32."""
    weight, gradient = torch.ones(4, device=DEVICE), torch.full((4,), 2.0, device=DEVICE)
    moment1, moment2 = torch.full_like(weight, 0.5), torch.full_like(weight, 3.0)
    factors = AdamWFactors.of_step(10_000, lr=0.1, beta1=0.9, beta2=0.99999, eps=1e-12, weight_decay=0.0)
    update(AdamWTensors([weight], [gradient], [moment1], [moment2], [None]), BlockTable([weight]), factors, None)
    first, second = 0.9 * 0.5 + 0.1 * 2.0, 0.99999 * 3.0 + 0.00001 * 4.0
    expected = 1 - 0.1 * first / (second / (1 - 0.99999**10_000)) ** 0.5
    torch.testing.assert_close(weight, torch.full_like(weight, expected))
    torch.testing.assert_close(moment1, torch.full_like(weight, first))
    torch.testing.assert_close(moment2, torch.full_like(weight, second))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.frozen = nn.Linear(40, 60, bias=False), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(5))
        self.to(DEVICE, dtype)


def test_a_step_clips_and_refreshes_narrow_copies_without_a_pass_of_its_own() -> None:
    model, plain = Model(), Model()
    plain_parameters, parameters = local_parameters(plain), local_parameters(model)
    plain_optimizer = build.build_optimizer(SPEC, plain_parameters, Layout.single())
    with kernels_everywhere():
        optimizer = build.build_optimizer(SPEC, parameters, Layout.single())
    assert isinstance(optimizer, FusedAdamW)
    copy, factor = narrow(model.dense.weight, torch.bfloat16), torch.tensor(0.5, dtype=torch.float64, device=DEVICE)
    for _ in range(3):
        for module in (model, plain):
            module.dense.weight.grad = torch.linspace(-1, 1, 2400, device=DEVICE).view(60, 40)
            module.scale.grad = torch.full_like(module.scale, 3.0)
        model.dense.weight.grad = model.dense.weight.grad.T.contiguous().T
        build.update(optimizer, parameters, 0.1, factor)
        build.update(plain_optimizer, plain_parameters, 0.1, factor)
        assert narrow(model.dense.weight, torch.bfloat16) is copy
        torch.testing.assert_close(copy.float(), model.dense.weight.detach(), rtol=2**-7, atol=0.0)
    for parameter, plain_parameter in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, plain_parameter, rtol=1e-6, atol=1e-6)


def test_state_is_that_of_torch_and_resumes() -> None:
    """A run with the state of another goes on as that one does, bit for bit."""
    models = [Model(), Model()]
    with kernels_everywhere():
        built = [(build.build_optimizer(SPEC, local_parameters(model), Layout.single()), model) for model in models]
    plain_optimizer = build.build_optimizer(SPEC, local_parameters(Model()), Layout.single())

    def step(optimizer: torch.optim.Optimizer, model: Model, number: int) -> None:
        model.dense.weight.grad = torch.full_like(model.dense.weight, number)
        model.scale.grad = torch.full_like(model.scale, -number)
        build.update(optimizer, local_parameters(model), 0.1, None)

    (first, first_model), (second, second_model) = built
    step(first, first_model, 1)
    slots = [
        list(build.moments(optimizer, local_parameters(model)))
        for optimizer, model in ((first, first_model), (second, second_model), (plain_optimizer, Model()))
    ]
    assert all(len(state) == len(plain_optimizer.state[parameter])  # of other parameters than these
               for state, parameter in zip(first.state.values(), plain_optimizer.state, strict=True))  # fmt: skip
    for (_, _, source, _), (_, _, target, _) in zip(slots[0], slots[1], strict=True):
        target.copy_(source)
    second_model.load_state_dict(first_model.state_dict())
    build.set_step(second, 1)
    for optimizer, model in built:
        step(optimizer, model, 2)
    assert all(map(torch.equal, first_model.parameters(), second_model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_keep_the_optimizer_of_torch(dtype: torch.dtype) -> None:
    with kernels_everywhere():
        optimizer = build.build_optimizer(SPEC, local_parameters(Model(dtype)), Layout.single())
        other = build.build_optimizer(AdafactorSpec(name="adafactor"), local_parameters(Model()), Layout.single())
    assert type(optimizer) is torch.optim.AdamW
    assert not isinstance(other, FusedAdamW)
