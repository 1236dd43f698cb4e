"""The AdamW kernel: updates, clipping, narrow copies and state, against torch's AdamW."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moe.kernels.adamw import BLOCK, AdamWFactors, AdamWTensors, BlockTable, launch_adamw
from moe.parallel import Layout, local_parameters, narrow
from moe.spec import AdafactorSpec, AdamWSpec
from moe.storage.folder import Folder
from moe.train.checkpoint.checkpointer import Checkpointer
from moe.train.checkpoint.state import run_tensors
from moe.train.optimizer import build
from moe.train.optimizer.fused_adamw import FusedAdamW
from moe.train.recorder import MemoryRecorder
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
    for step in (1, 2, 3):
        gradients, factor = data.draw(tensors_like(shapes)), data.draw(st.sampled_from((None, 1.0, 0.25, 1e-3)))
        for parameter, gradient in zip(exact, gradients, strict=True):
            parameter.grad = gradient.double() * (1 if factor is None else factor)
        optimizer.step()
        factors = AdamWFactors.of_step(step, beta1=beta1, beta2=beta2, **constants)
        on_device = None if factor is None else torch.tensor(factor, dtype=torch.float64, device=DEVICE)
        operands = AdamWTensors(weights, gradients, moments1, moments2, copies)
        skipped = replace(operands, gradients=[gradient * float("nan") for gradient in gradients])
        found_inf = torch.tensor(1.0, device=DEVICE)
        launch_adamw(skipped, BlockTable(weights), factors, on_device, found_inf)  # changes nothing
        launch_adamw(
            operands, BlockTable(weights), factors, on_device, data.draw(st.sampled_from((None, 0 * found_inf)))
        )
    for parameter, weight, moment1, moment2, copy in zip(exact, weights, moments1, moments2, copies, strict=True):
        state = optimizer.state[parameter]
        for result, expected in (
            (weight, parameter.detach()),
            (moment1, state["exp_avg"]),
            (moment2, state["exp_avg_sq"]),
        ):
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
        if copy is not None:  # the interpreter truncates, GPUs round
            torch.testing.assert_close(copy.float(), weight, rtol=2**-7, atol=0.0)


def test_factors_are_those_of_float64_early_and_late_in_a_run() -> None:
    """Bias corrections computed in float32 would lose digits."""
    for step in (1, 10_000):
        factors = AdamWFactors.of_step(step, lr=0.1, beta1=0.9, beta2=0.99999, eps=0.0, weight_decay=0.2)
        assert factors.decay == 1 - 0.1 * 0.2
        assert factors.step_size == pytest.approx(0.1 / (1 - 0.9**step), rel=1e-12)
        assert factors.denominator_factor**-2 == pytest.approx(1 - 0.99999**step, rel=1e-9)
        assert (factors.gradient_weight1, factors.gradient_weight2) == (1 - 0.9, 1 - 0.99999)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.frozen = nn.Linear(40, 60, bias=False), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(5))
        self.to(DEVICE, dtype)


def optimizer_of(model: Model, *, by_kernel: bool) -> torch.optim.Optimizer:
    with kernels_everywhere() if by_kernel else nullcontext():
        optimizer = build.build_optimizer(SPEC, local_parameters(model), Layout.single(DEVICE))
    assert isinstance(optimizer, FusedAdamW) == by_kernel
    return optimizer


def step(optimizer: torch.optim.Optimizer, model: Model, number: int) -> None:
    """One update, with gradients and a clip factor that depend on its number."""
    generator = torch.Generator().manual_seed(number)
    for parameter in (model.dense.weight, model.scale):
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE)
    factor = torch.tensor(0.1**number, dtype=torch.float64, device=DEVICE)
    build.update_parameters(optimizer, local_parameters(model), 0.1, factor)


def assert_same(model: Model, optimizer: torch.optim.Optimizer, other: Model, its_optimizer: Any) -> None:
    """Parameters and state agree to a few roundings."""
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
    slots, expected_slots = (
        {(name, slot): tensor for name, slot, tensor, _ in build.moments(optimizer, local_parameters(model))}
        for optimizer, model in ((optimizer, model), (its_optimizer, other))
    )
    assert slots.keys() == expected_slots.keys()
    assert len(slots) == 4
    for name, tensor in slots.items():
        torch.testing.assert_close(tensor, expected_slots[name], rtol=1e-5, atol=1e-6)


def test_a_step_clips_and_refreshes_narrow_copies_without_a_pass_of_its_own() -> None:
    model, plain = Model(), Model()
    optimizer, plain_optimizer = optimizer_of(model, by_kernel=True), optimizer_of(plain, by_kernel=False)
    copies = [narrow(model.dense.weight, torch.bfloat16), narrow(model.scale, torch.float16)]
    for number in (1, 2, 3):
        step(optimizer, model, number)
        step(plain_optimizer, plain, number)
        for copy, parameter in zip(copies, (model.dense.weight, model.scale), strict=True):
            assert narrow(parameter, copy.dtype) is copy
            torch.testing.assert_close(copy.float(), parameter.detach(), rtol=2**-7, atol=0.0)
    assert_same(model, optimizer, plain, plain_optimizer)


def test_a_gradient_may_have_another_memory_order() -> None:
    models = [Model(), Model()]
    for number, model in enumerate(models):
        optimizer, gradient = optimizer_of(model, by_kernel=True), torch.linspace(-1, 1, 2400).to(DEVICE).view(60, 40)
        model.dense.weight.grad = gradient.T.contiguous().T if number else gradient
        model.scale.grad = torch.ones_like(model.scale)
        optimizer.step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("saved_by_kernel", [True, False])
@pytest.mark.parametrize("resumed_by_kernel", [True, False])
def test_a_checkpoint_of_one_resumes_with_the_other(
    tmp_path: Path, saved_by_kernel: bool, resumed_by_kernel: bool
) -> None:
    model, resumed = Model(), Model()
    optimizer = optimizer_of(model, by_kernel=saved_by_kernel)
    resumed_optimizer = optimizer_of(resumed, by_kernel=resumed_by_kernel)

    def checkpointer_of(model: Model, optimizer: torch.optim.Optimizer) -> Checkpointer:
        layout = Layout.single(DEVICE)
        return Checkpointer(
            Folder(str(tmp_path)), layout, run_tensors(model, local_parameters(model), optimizer, layout), attempt=1,
            group=0, keep=1, files={}, recorder=MemoryRecorder(),
        )  # fmt: skip

    for number in (1, 2):
        step(optimizer, model, number)
    checkpointer_of(model, optimizer).save(2, b"{}")
    marker = checkpointer_of(resumed, resumed_optimizer).restore()
    assert marker is not None
    build.set_step(resumed_optimizer, marker.step)
    for trained, its_optimizer in ((model, optimizer), (resumed, resumed_optimizer)):
        step(its_optimizer, trained, 3)
    assert_same(resumed, resumed_optimizer, model, optimizer)
    if saved_by_kernel == resumed_by_kernel:
        assert all(map(torch.equal, resumed.parameters(), model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_keep_the_optimizer_of_torch(dtype: torch.dtype) -> None:
    with kernels_everywhere():
        optimizer = build.build_optimizer(SPEC, local_parameters(Model(dtype)), Layout.single())
        other = build.build_optimizer(AdafactorSpec(name="adafactor"), local_parameters(Model()), Layout.single())
    assert type(optimizer) is torch.optim.AdamW
    assert not isinstance(other, FusedAdamW)
