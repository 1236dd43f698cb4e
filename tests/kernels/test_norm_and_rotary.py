"""RMS norms and rotations by kernels against plain operations, on tensors of any shape and memory order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.layers.norm import RMSNorm, rms_norm, rms_norm_reference
from moe.layers.rotary import rotate, rotate_reference
from tests.kernels.cases import DEVICE
from tests.kernels.enabled import kernels_everywhere

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


@given(st.data())
def test_norms_are_those_of_the_reference(data: st.DataObject) -> None:
    dtype, weight_dtype = data.draw(DTYPES), data.draw(DTYPES)
    shape = data.draw(st.sampled_from(((0, 8), (1, 1), (7, 33), (2, 3, 64), (3, 4, 5, 16), (9,), (40, 200))))
    x = data.draw(strided(*shape, dtype=dtype)).detach().requires_grad_()
    weight = data.draw(strided(shape[-1], dtype=weight_dtype)).detach().requires_grad_()
    d_y = data.draw(strided(*shape, dtype=dtype))
    eps, one_plus = data.draw(st.sampled_from((1e-6, 0.1))), data.draw(st.booleans())
    with kernels_everywhere():
        y = rms_norm(x, weight, eps, one_plus)
        results = (y, *torch.autograd.grad(y, (x, weight), d_y))
    assert [result.dtype for result in results] == [dtype, dtype, weight_dtype]
    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    exact = rms_norm_reference(wide_x, wide_weight, eps, one_plus)
    exact_gradients = torch.autograd.grad(exact, (wide_x, wide_weight), d_y.double())
    limit = max(tolerance(dtype), tolerance(weight_dtype))
    assert max(differences(results, (exact, *exact_gradients)), default=0) < limit


def test_a_norm_of_many_rows_sums_the_gradient_of_its_weight_in_parts_of_the_same_order() -> None:
    norm = RMSNorm()
    norm.weight = torch.nn.Parameter(torch.linspace(-1, 1, 4096, device=DEVICE))
    x = torch.randn(600, 4096, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradients = []
    with kernels_everywhere():
        for _ in range(2):
            norm.weight.grad = None
            norm(x).square().sum().backward()
            gradients.append(norm.weight.grad)
    assert torch.equal(*gradients)
    wide_weight = norm.weight.detach().double().requires_grad_()
    rms_norm_reference(x.double(), wide_weight, norm.eps).square().sum().backward()
    assert max(differences((gradients[0],), (wide_weight.grad,))) < 1e-5


@given(st.data())
def test_rotations_are_those_of_the_reference(data: st.DataObject) -> None:
    dtype = data.draw(DTYPES)
    num_rows, num_heads, num_positions = (data.draw(st.integers(1, 4)) for _ in range(3))
    num_pairs = data.draw(st.sampled_from((1, 4, 12)))
    head_dim = 2 * num_pairs + data.draw(st.sampled_from((0, 3)))
    table_shape = (data.draw(st.sampled_from((1, num_rows))), 1, num_positions, num_pairs)
    cos, sin = (data.draw(strided(*table_shape, dtype=torch.float32)) for _ in range(2))
    pairing = data.draw(st.sampled_from(("half", "interleaved")))
    shape = num_rows, num_heads, num_positions, head_dim
    x = data.draw(strided(*shape, dtype=dtype)).detach().requires_grad_()
    d_y = data.draw(strided(*shape, dtype=dtype))
    with kernels_everywhere():
        y = rotate(x, cos, sin, pairing)
        results = (y, *torch.autograd.grad(y, x, d_y))
    wide_x = x.detach().double().requires_grad_()
    exact = rotate_reference(wide_x, cos.double(), sin.double(), pairing)
    assert max(differences(results, (exact, *torch.autograd.grad(exact, wide_x, d_y.double())))) < tolerance(dtype)


@pytest.mark.parametrize("shape", [(2, 6, 8), (2, 3, 6, 8)])
def test_what_the_kernel_does_not_take_is_rotated_as_on_a_cpu(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64 if len(shape) == 4 else torch.float32)
    cos, sin = torch.randn(6, 4), torch.randn(6, 4)
    expected = rotate(x, cos, sin)
    with kernels_everywhere():
        assert torch.equal(rotate(x, cos, sin), expected)
