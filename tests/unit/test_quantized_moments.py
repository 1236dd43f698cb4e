"""AdamW with 8-bit moments, against torch's AdamW and torchao's `AdamW8bit`."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moe.parallel import Layout, local_parameters
from moe.spec import AdamWSpec, JobSpec
from moe.spec.optimizer import moment_block_elements
from moe.train.checkpoint.spec_changes import state_changes
from moe.train.optimizer import quantized_moments
from moe.train.optimizer.build import build_optimizer, set_learning_rate
from moe.train.optimizer.dynamic_quantization import MIN_SCALE, code_values, dequantize, quantize
from moe.train.optimizer.quantized_moments import QuantizedMomentsAdamW
from tests.grid import num_cases
from tests.refusals import expect_problem

SHAPES = {"wide": (12, 512), "experts": (4, 8, 256), "odd": (3, 1536), "narrow": (70, 64), "ragged": (100, 50),
          "small": (3, 256), "vector": (300,), "scalar": (), "empty": (0, 256)}  # fmt: skip
BLOCKS = {"wide": 256, "experts": 256, "odd": 256, "narrow": 64}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def set_gradients(model: nn.Module, step: int) -> None:
    """Gradients of magnitudes between 0.02 and 5, so that torchao rounds no second moment to 0."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.grad = values.sign() * values.abs().clamp(0.02, 5)


def optimizer_of(model: nn.Module, **fields: Any) -> torch.optim.Optimizer:
    spec = AdamWSpec(name="adamw", beta2=0.95, eps=1e-8, weight_decay=0.1, moments="8bit", decay_vectors=True, **fields)
    return build_optimizer(spec, local_parameters(model), Layout.single())


def nearest_codes(scaled_values: Tensor, *, signed: bool) -> Tensor:
    """Of all codes, the nearest; never 0 for a positive second moment."""
    table = code_values(signed, torch.float32, scaled_values.device)
    distances = (scaled_values[..., None] - table).abs()
    distances[..., 0] += 9.0 * ((scaled_values > 0) & (not signed))
    return table[distances.argmin(-1)]


def test_equals_torchs_adamw_with_moments_quantized_after_each_step() -> None:
    model, reference = Model(), Model()
    optimizer = optimizer_of(model)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(4):
        set_gradients(model, step)
        set_gradients(reference, step)
        set_learning_rate(optimizer, 0.01)
        optimizer.step()
        expected.step()
        for name, block in BLOCKS.items():
            for slot, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                moment = expected.state[reference.get_parameter(name)][slot]
                blocks = moment.view(-1, block)
                scales = blocks.abs().amax(1, keepdim=True)
                moment.copy_((nearest_codes(blocks / scales, signed=signed) * scales).view(moment.shape))
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6, msg=name)
        assert (optimizer.state[parameter]["exp_avg"].dtype == torch.uint8) == (name in BLOCKS)


def test_found_inf_leaves_weights_and_state_unchanged() -> None:
    model, reference = Model(), Model()
    optimizer, expected = optimizer_of(model), optimizer_of(reference)
    for step, found_inf in enumerate((0.0, 1.0, 0.0)):
        set_gradients(model, step)
        if found_inf:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(float("nan"))
        optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
        optimizer.step()
        if not found_inf:
            set_gradients(reference, step)
            expected.step()
    for (name, parameter), other in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(parameter, other[1]), name
        for slot, tensor in optimizer.state[parameter].items():
            assert torch.equal(tensor, expected.state[other[1]][slot]), (name, slot)


@pytest.mark.slow
@pytest.mark.parametrize("elements_at_once", [1, 1000, 1 << 18])
def test_equals_torchaos_adamw_bit_by_bit(elements_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, codes and scales, with torchao's own step, without `torch.compile`, which rounds otherwise. torchao's
    blocks follow the flattened tensor: the same if they fill rows."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    monkeypatch.setitem(quantized_moments._ELEMENTS_AT_ONCE, "cpu", elements_at_once)
    model, reference = Model(), Model()
    optimizer = optimizer_of(model)
    states = {}
    for name, parameter in reference.named_parameters():
        block = BLOCKS.get(name)
        assert moment_block_elements(parameter.shape, of_experts=False) == block
        states[name] = [
            torch.zeros_like(parameter) if block is None
            else OptimState8bit.zeros(parameter.shape, signed, block, dtype=torch.float32)
            for signed in (True, False)
        ]  # fmt: skip
    for step in range(1, 6):
        lr = 0.01 / step
        set_gradients(model, step)
        set_gradients(reference, step)
        set_learning_rate(optimizer, lr)
        optimizer.step()
        for name, parameter in reference.named_parameters():
            with torch.no_grad():
                single_param_adam(parameter.detach(), parameter.grad, torch.tensor(float(step)), *states[name], None,
                                  torch.tensor(lr), 0.9, 0.95, 0.1, 1e-8, True, False)  # fmt: skip
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, other), name
        state = optimizer.state[parameter]
        for slot, expected in zip(("exp_avg", "exp_avg_sq"), states[name], strict=True):
            if name not in BLOCKS:
                assert torch.equal(state[slot], expected)
                continue
            assert torch.equal(state[slot], expected.codes)
            assert torch.equal(state[f"{slot}_scale"].reshape(-1), expected.scale)
            assert state[slot].numel() // state[f"{slot}_scale"].numel() == BLOCKS[name]


@pytest.mark.slow
def test_equals_torchaos_compiled_optimizer_to_rounding() -> None:
    """`torch.compile` fuses multiplications and additions; a code may differ by one where values lie between two."""
    from torchao.optim import AdamW8bit

    model, reference = (nn.Linear(512, 12, bias=False) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    optimizer = optimizer_of(model)
    expected = AdamW8bit(reference.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        set_gradients(model, step)
        set_gradients(reference, step)
        set_learning_rate(optimizer, 0.01)
        optimizer.step()
        expected.step()
    torch.testing.assert_close(model.weight, reference.weight, rtol=1e-5, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_torchao(signed: bool) -> None:
    from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap

    table = code_values(signed, torch.float32, torch.device("cpu"))
    assert torch.equal(table, torch.tensor(create_dynamic_map(signed=signed)))
    bounds = torch.cat((table, (table[1:] + table[:-1]) / 2))
    near = torch.cat([bounds, *(torch.nextafter(bounds, torch.full_like(bounds, end)) for end in (-2.0, 2.0))])
    values = torch.cat((near, torch.randn(10_000, generator=torch.Generator().manual_seed(1)))).clamp(-1, 1)
    values = values if signed else values.abs()
    expected = quantize_8bit_with_qmap(values, table)
    is_lost = (expected == 0) & (values > 0) & (not signed)
    assert torch.equal(quantize(values, signed=signed), torch.where(is_lost, 1, expected))
    assert bool(is_lost.any()) != signed


def test_small_second_moments_do_not_vanish() -> None:
    """An element whose gradient is a ten-thousandth of its block's largest, and then 0: with a second moment of 0, the
    update would be divided by eps."""
    model = nn.Linear(256, 16, bias=False)
    optimizer = optimizer_of(model)
    before = model.weight.detach().clone()
    for scale in (1.0, 0.0):
        model.weight.grad = torch.full((16, 256), scale)
        model.weight.grad[:, 7] *= 1e-4
        set_learning_rate(optimizer, 1e-3)
        optimizer.step()
    assert (model.weight - before).abs().max() < 5e-3


@settings(max_examples=num_cases(25), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-18, 6))
def test_codes_and_scales_stay_as_they_are_when_quantized_again(seed: int, exponent: int) -> None:
    """With their scale. So a moment that neither decays nor grows keeps every bit."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(4, 256, generator=generator) * 10.0**exponent
    for signed in (True, False):
        moments = values if signed else values.square()
        scale = moments.abs().amax(-1).clamp(min=MIN_SCALE)
        scaled_values = moments / scale[:, None]
        codes = quantize(scaled_values, signed=signed)
        again = dequantize(codes, torch.float32, signed=signed) * scale[:, None]
        assert torch.equal(quantize(again / scale[:, None], signed=signed), codes)
        error = (dequantize(codes, torch.float32, signed=signed) - scaled_values).abs()
        assert error.max() < 0.0075, "half of the widest step, and of the missing -1"


def test_the_spec_chooses_it_and_user_modules_refuse_it() -> None:
    optimizer = optimizer_of(Model(), offload=True)
    assert type(optimizer) is QuantizedMomentsAdamW
    raw_job = {
        "model": {"kind": "module", "build": "a.b:model"}, "data": {"corpus": "module", "batches": "a.b:batches"},
        "train": {"num_steps": 1, "optimizer": {"name": "adamw", "moments": "8bit"}},
    }  # fmt: skip
    with expect_problem("not_applicable", "train.optimizer.moments", "8bit"):
        JobSpec.parse(raw_job)


def test_a_job_from_another_ones_checkpoint_keeps_8_bit_moments() -> None:
    data = {"corpus": "packages", "max_tokens": 64}

    def spec(moments: str) -> JobSpec:
        return JobSpec.parse({
            "model": {"preset": "olmoe-1b-7b"}, "data": data,
            "train": {"num_steps": 1, "optimizer": {"name": "adamw", "beta2": 0.95, "moments": moments}},
        })  # fmt: skip

    for before, now, num_problems in (("8bit", "8bit", 0), ("8bit", "float32", 1), ("bfloat16", "8bit", 1),
                                      ("bfloat16", "float32", 0)):  # fmt: skip
        problems = state_changes(spec(before), spec(now))
        assert [problem.path for problem in problems] == ["train.optimizer.moments"] * num_problems


def test_moments_of_a_rank_take_a_byte_each_and_four_per_block() -> None:
    optimizer = optimizer_of(model := Model())
    spec = AdamWSpec(name="adamw", moments="8bit")
    for parameter in model.parameters():
        held = sum(tensor.nbytes for slot, tensor in optimizer.state[parameter].items() if slot != "step")
        shape = tuple(parameter.shape)
        assert held == spec.state_elements(shape, full_shape=shape, of_experts=False, is_hidden_matrix=False)
