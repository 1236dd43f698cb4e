"""RMS norms and rotations by kernels against plain operations, on tensors of any shape and memory order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.kernels import check, norm, rotary, support
from moe.kernels.configs import MAX_NORM_WIDTH
from moe.layers.norm import RMSNorm, rms_norm, rms_norm_reference
from moe.layers.rotary import rotate, rotate_reference
from tests.kernels.cases import DEVICE
from tests.kernels.enabled import kernels_everywhere

MAX_PARTS = 8
DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))


@st.composite
def strided(draw: st.DrawFn, *shape: int, dtype: torch.dtype) -> Tensor:
    """Random values of a shape, as a part of a larger tensor in another memory order."""
    order = draw(st.permutations(range(len(shape))))
    extra = [draw(st.sampled_from((0, 0, 3))) for _ in shape]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    memory = torch.randn([shape[dim] + extra[dim] for dim in order], generator=generator).to(DEVICE, dtype)
    tensor = memory.permute([order.index(dim) for dim in range(len(shape))])
    for dim, size in enumerate(shape):
        tensor = tensor.narrow(dim, extra[dim], size)
    return tensor


def differences(results: tuple[Tensor | None, ...], exact: tuple[Tensor | None, ...]) -> list[float]:
    """Largest difference of each pair, relative to the largest value of at least 1."""
    values = []
    for result, value in zip(results, exact, strict=True):
        assert result is not None
        assert value is not None
        assert result.shape == value.shape
        if value.numel():
            values.append(((result.double() - value).abs().max() / value.abs().max().clamp(min=1)).item())
    return values


def tolerance(dtype: torch.dtype) -> float:
    """A few roundings."""
    return 8 * torch.finfo(dtype).eps


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows need more tiles than a backward pass has programs."""
    monkeypatch.setattr(norm, "MAX_PARTS", MAX_PARTS)


@given(st.data())
def test_norms_are_those_of_the_reference(data: st.DataObject) -> None:
    dtype, weight_dtype = data.draw(DTYPES), data.draw(DTYPES)
    shapes = ((0, 8), (1, 1), (7, 33), (2, 3, 64), (3, 4, 5, 16), (9,), (40, 200), (2, 5000), (3, 0))
    shape = data.draw(st.sampled_from(shapes))
    x = data.draw(strided(*shape, dtype=dtype)).detach().requires_grad_()
    weight = data.draw(strided(shape[-1], dtype=weight_dtype)).detach().requires_grad_()
    d_y = data.draw(strided(*shape, dtype=dtype))
    if data.draw(st.booleans()):
        d_y = torch.ones((), dtype=dtype, device=DEVICE).expand(shape)  # as of a sum
    eps, one_plus = data.draw(st.sampled_from((1e-6, 0.1))), data.draw(st.booleans())
    with kernels_everywhere():
        y = rms_norm(x, weight, eps, one_plus)
        results = (y, *torch.autograd.grad(y, (x, weight), d_y))
    assert [result.dtype for result in results] == [dtype, dtype, weight_dtype]
    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    exact = rms_norm_reference(wide_x, wide_weight, eps, one_plus)
    exact_gradients = torch.autograd.grad(exact, (wide_x, wide_weight), d_y.double())
    limits = (tolerance(dtype), tolerance(dtype), tolerance(weight_dtype))
    for difference, limit in zip(differences(results, (exact, *exact_gradients)), limits, strict=False):
        assert difference < limit


def test_the_weight_gradient_of_many_rows_is_deterministic() -> None:
    layer = RMSNorm()
    layer.weight = torch.nn.Parameter(torch.linspace(-1, 1, 2048, device=DEVICE))
    x = torch.randn(3 * MAX_PARTS + 1, 2048, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradients = []
    with kernels_everywhere():
        for _ in range(2):
            layer.weight.grad = None
            layer(x).square().sum().backward()
            gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)
    wide_weight = layer.weight.detach().double().requires_grad_()
    rms_norm_reference(x.double(), wide_weight, layer.eps).square().sum().backward()
    assert all(difference < 1e-5 for difference in differences((gradients[0],), (wide_weight.grad,)))


@given(st.data())
def test_rotations_are_those_of_the_reference(data: st.DataObject) -> None:
    dtype = data.draw(DTYPES)
    num_rows, num_heads, num_positions = (data.draw(st.integers(0, 4)) for _ in range(3))
    num_pairs = data.draw(st.sampled_from((1, 4, 12)))
    head_dim = 2 * num_pairs + data.draw(st.sampled_from((0, 3, 70)))
    table_shape = (data.draw(st.sampled_from((1, num_rows))), 1, num_positions, num_pairs)
    cos, sin = (data.draw(strided(*table_shape, dtype=data.draw(DTYPES))) for _ in range(2))
    pairing = data.draw(st.sampled_from(("half", "interleaved")))
    shape = num_rows, num_heads, num_positions, head_dim
    x = data.draw(strided(*shape, dtype=dtype)).detach().requires_grad_()
    d_y = data.draw(strided(*shape, dtype=dtype))
    with kernels_everywhere():
        y = rotate(x, cos, sin, pairing)
        results = (y, *torch.autograd.grad(y, x, d_y))
    wide_x = x.detach().double().requires_grad_()
    exact = rotate_reference(wide_x, cos.double(), sin.double(), pairing)
    exact_results = (exact, *torch.autograd.grad(exact, wide_x, d_y.double()))
    assert all(difference < tolerance(dtype) for difference in differences(results, exact_results))


@pytest.mark.parametrize(
    ("shape", "table_shape", "dtype"),
    [
        ((2, 6, 8), (6, 4), torch.float32),
        ((2, 3, 6, 8), (6, 4), torch.float32),
        ((2, 3, 6, 8), (1, 3, 6, 4), torch.float32),
        ((2, 3, 6, 8), (1, 1, 6, 4), torch.float64),
    ],
)
def test_unsupported_rotations_fall_back_to_plain_operations(
    shape: tuple[int, ...], table_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, cos, sin = (torch.randn(size, dtype=dtype, device=DEVICE) for size in (shape, table_shape, table_shape))
    expected = rotate(x, cos, sin)
    with kernels_everywhere(), count_calls(rotary, "rotate") as calls:
        assert torch.equal(rotate(x, cos, sin), expected)
        assert calls == []
        rotate(torch.randn(2, 3, 6, 8, device=DEVICE), *torch.randn(2, 1, 1, 6, 4, device=DEVICE))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("width", "dtype"), [(8, torch.float64), (MAX_NORM_WIDTH + 1, torch.float32)], ids=["float64", "too wide"]
)
def test_unsupported_norms_fall_back_to_plain_operations(width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, width, dtype=dtype, device=DEVICE), torch.ones(width, device=DEVICE)
    expected = rms_norm(x, weight, 1e-6)
    with kernels_everywhere(), count_calls(norm, "rms_norm") as calls:
        assert torch.equal(rms_norm(x, weight, 1e-6), expected)
        assert calls == []
        rms_norm(x[:, :4].float(), weight[:4], 1e-6)
    assert len(calls) == 1


def test_a_weight_of_another_width_is_refused() -> None:
    with kernels_everywhere(), pytest.raises(RuntimeError, match="size of tensor"):
        rms_norm(torch.randn(2, 8, device=DEVICE), torch.ones(4, device=DEVICE), 1e-6)


@contextmanager
def count_calls(module: Any, name: str) -> Iterator[list[None]]:
    """Calls of a module's function within the context."""
    calls: list[None] = []
    function = getattr(module, name)

    def noted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        return function(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, noted)
        yield calls


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("function", "operand"), [(norm._NormalizeRows, 0), (norm._NormalizeRows, 1), (rotary._RotateRows, 0)], ids=str
)
@pytest.mark.parametrize("factor", [0.5, float("nan")])
def test_wrong_gradients_are_noticed(
    function: Any, operand: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = function.backward

    def wrong(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        results = [*backward(ctx, *gradients)]
        results[operand] = results[operand] * factor
        return tuple(results)

    kind = "norms" if function is norm._NormalizeRows else "rotary"
    monkeypatch.setattr(function, "backward", staticmethod(wrong))
    assert check.CHECKS[kind](torch.device(DEVICE)) > support.MAX_ERROR
