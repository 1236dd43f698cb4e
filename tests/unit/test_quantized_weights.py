"""Quantized weights against a direct implementation of their definitions, for any part quantized at a time."""

from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.layers.linear import linear
from moe.parallel import QuantizedWeight, QuantScheme, block_kernels, quantized
from moe.parallel.block_kernels import dequantize_with_kernel, runs_on
from moe.parallel.quantized import NF4, blocks, cut, dequantize_reference, put, quantize
from moe.spec.form import stored_bytes, stored_tensors
from moe.spec.parameter import Dim, Form, Parameter
from tests.unit import reference_dequantization
from tests.unit.reference_dequantization import through_codes

FORMS: tuple[Form, ...] = ("bfloat16", "int8", "nf4")
lengths = st.integers(1, 150) | st.sampled_from([63, 64, 127, 128, 192])
"""Along blocks: of whole ones, which there are kernels for, and others."""


@pytest.mark.parametrize("is_plain", [False, True], ids=["by kernels", "plainly"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    other_sizes=st.lists(st.integers(1, 5), min_size=1, max_size=2), length=lengths, form=st.sampled_from(FORMS),
    at_once=st.sampled_from([1, 100, 1 << 20]), data=st.data(),
)  # fmt: skip
def test_dequantized_values_follow_the_definition(
    monkeypatch: pytest.MonkeyPatch, is_plain: bool, other_sizes: list[int], length: int, form: Form, at_once: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    if is_plain:  # as without bitsandbytes, which every test environment has
        monkeypatch.setattr(quantized, "dequantize_with_kernel", lambda *_, **__: None)
    # The same code on fewer values at a time: a part of millions would take minutes.
    monkeypatch.setitem(quantized._AT_ONCE, "cpu", at_once)
    assert list(NF4) == reference_dequantization.NF4
    dim, generator = (
        data.draw(st.integers(0, len(other_sizes))),
        torch.Generator().manual_seed(data.draw(st.integers(0, 99))),
    )
    values = torch.randn(*other_sizes[:dim], length, *other_sizes[dim:], generator=generator, dtype=torch.float64)
    values *= 10.0 ** data.draw(st.integers(-20, 20))
    if data.draw(st.booleans()):
        values[torch.rand(values.shape, generator=generator) < 0.9] = 0.0  # also whole blocks
    scheme = QuantScheme(form, dim, length)
    weight = QuantizedWeight(*quantize(values, scheme), scheme)
    assert weight.shape == tuple(values.shape)
    output = weight.dequantize(torch.float32)
    assert torch.equal(output, through_codes(values, form, dim))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(weight.dequantize(dtype), output.to(dtype))
    second_output = QuantizedWeight(*quantize(output, scheme), scheme).dequantize(torch.float32)
    assert (second_output - output).abs().max() <= 1e-6 * output.abs().max()


@given(data=st.data(), form=st.sampled_from(FORMS), of_scales=st.booleans())
def test_a_part_of_codes_needs_only_a_part_of_the_matrix(data: st.DataObject, form: Form, of_scales: bool) -> None:
    """For any begin and end, also within a block, and blocks in any order."""

    def rectangle(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        firsts = [data.draw(st.integers(0, size)) for size in shape]
        return tuple((first, data.draw(st.integers(first, size))) for first, size in zip(firsts, shape, strict=True))

    of_scales = of_scales and form != "bfloat16"
    shape = [data.draw(st.integers(1, limit)) for limit in (6, 200, 4)]
    dim = data.draw(st.integers(0, 2))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    scheme = QuantScheme(form, dim, shape[dim])
    full = quantize(values, scheme)[of_scales]
    assert full is not None
    region = rectangle(tuple(full.shape))
    matrix, origin = scheme.values_of(region, of_scales=of_scales), [first for first, _ in region]
    part = torch.full_like(cut(full, region), 99)
    with pytest.MonkeyPatch.context() as patch:
        # Small parts, as above.
        patch.setitem(quantized._AT_ONCE, "cpu", data.draw(st.integers(1, 300)))
        for block in blocks(matrix, dim, "cpu", data.draw(st.permutations(range(3)))):
            codes = quantize(cut(values, block), scheme)[of_scales]
            assert codes is not None
            put(codes, scheme.codes_of(block, of_scales=of_scales), part, origin)
    assert torch.equal(part, cut(full, region))


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", range(3))
def test_whole_blocks_are_dequantized_by_kernels(form: Form, dtype: torch.dtype, dim: int) -> None:
    """Other lengths are left to plain torch."""
    assert runs_on(torch.device("cpu"))
    for length in (128, 127, 65, 63, 40):
        shape = [3, 5, 2]
        shape[dim] = length
        scheme = QuantScheme(form, dim, length)
        codes, scales = quantize(torch.randn(shape), scheme)
        assert scales is not None
        values = dequantize_with_kernel(codes, scales, form=form, dim=dim, length=length, dtype=dtype)
        assert (values is None) == (length != 128)
        if values is not None:
            assert torch.equal(values, dequantize_reference(codes, scales, scheme, length).to(dtype))


def _fail(*_: object) -> Tensor:
    raise RuntimeError("built for another device")


@pytest.mark.parametrize(
    "operators",
    [
        None,
        SimpleNamespace(dequantize_blockwise=_fail, dequantize_4bit=_fail),
        SimpleNamespace(),
        SimpleNamespace(
            dequantize_blockwise=lambda codes, *_: torch.zeros(codes.shape),
            dequantize_4bit=lambda codes, *_: torch.zeros(2 * codes.numel()),
        ),
    ],
    ids=["missing", "for another device", "without operators", "of another packing"],
)
def test_a_library_with_wrong_results_is_not_used(operators: object, monkeypatch: pytest.MonkeyPatch) -> None:
    # Libraries that cannot be installed on this machine.
    monkeypatch.setattr(block_kernels, "_operators", lambda: operators)
    assert not runs_on.__wrapped__(torch.device("cpu"))


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [("heads", "model"), ("model", "hidden"), ("expert", "model", "expert_hidden")])
def test_stored_tensors_are_those_of_the_parameter_table(form: Form, dims: tuple[Dim, ...]) -> None:
    random = Random(form)
    for _ in range(20):
        shape = tuple(random.randint(1, 200) for _ in dims)
        parameter = Parameter("w", shape, dims, 1.0, frozen=True, form=form)
        scheme = QuantScheme.from_parameter(parameter)
        assert scheme is not None
        assert dims[scheme.dim] == "model", "no layout cuts what shares a scale"
        tensors = [tensor for tensor in quantize(torch.randn(shape), scheme) if tensor is not None]
        assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == [
            (part.shape, getattr(torch, str(dtype))) for part, dtype in stored_tensors(parameter)
        ]
        assert stored_bytes(parameter, 4) == sum(tensor.nbytes for tensor in tensors)
    assert stored_bytes(Parameter("w", (3, 5), ("heads", "model")), 8) == 8 * 15


@pytest.mark.parametrize("form", ["full", *FORMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(0, 5), (3, 0), (0,)])
def test_a_rank_without_tokens_has_an_empty_gradient(form: Form, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    matrix, scheme = torch.randn(64, 64), None if form == "full" else QuantScheme(form, 1, 64)
    w = matrix if scheme is None else QuantizedWeight(*quantize(matrix, scheme), scheme)
    x = torch.empty(*rows, 64, dtype=dtype, requires_grad=True)
    linear(x, w).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
