"""Codes of narrower forms beside a plain reading of their definitions, whatever part of a matrix is coded at a time."""

from random import Random
from statistics import NormalDist
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
from moe.spec.form import kept, kept_bytes
from moe.spec.parameter import Dim, Form, Parameter
from tests.unit import plain_codes
from tests.unit.plain_codes import through_codes

FORMS: tuple[Form, ...] = ("bfloat16", "int8", "nf4")
CODED: tuple[Form, ...] = ("int8", "nf4")


def test_the_code_book_is_the_published_one_of_quantiles() -> None:
    """Eight quantiles of one half of a normal distribution and nine of the other, zero in both, over the largest."""
    assert list(NF4) == plain_codes.NF4
    furthest, normal = 0.9677083, NormalDist()

    def quantiles(number: int) -> list[float]:
        return [normal.inv_cdf(furthest + (0.5 - furthest) * at / (number - 1)) for at in range(number - 1)]

    values = sorted([*quantiles(9), 0.0, *(-each for each in quantiles(8))])
    assert [each / max(values) for each in values] == pytest.approx(NF4, abs=1e-6)


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=2)


lengths = st.integers(1, 150) | st.sampled_from([63, 64, 127, 128, 192])
"""Along blocks: of whole ones, which there are kernels for, and others."""


def without_kernels(*_: object, **__: object) -> None:
    """As where bitsandbytes is not installed."""


@pytest.mark.parametrize("is_plain", [False, True], ids=["by kernels", "plainly"])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(others=shapes, length=lengths, form=st.sampled_from(FORMS), data=st.data())
def test_what_is_decoded_is_what_the_definition_says(
    monkeypatch: pytest.MonkeyPatch, is_plain: bool, others: list[int], length: int, form: Form, data: st.DataObject
) -> None:
    if is_plain:  # what decodes where the library is not installed, which it is wherever tests run
        monkeypatch.setattr(quantized, "dequantize_with_kernel", without_kernels)
    dim, seed = data.draw(st.integers(0, len(others))), data.draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*others[:dim], length, *others[dim:], generator=generator, dtype=torch.float64)
    values *= 10.0 ** data.draw(st.integers(-20, 20))
    if data.draw(st.booleans()):
        values[torch.rand(values.shape, generator=generator) < 0.9] = 0.0  # also whole blocks
    scheme = QuantScheme(form, dim, length)
    found = QuantizedWeight(*quantize(values, scheme), scheme)
    assert found.shape == tuple(values.shape)
    decoded = found.dequantize(torch.float32)
    assert torch.equal(decoded, through_codes(values, form, dim))
    assert torch.equal(found.dequantize(torch.float64), decoded.double())
    for narrow in (torch.bfloat16, torch.float16):
        assert torch.equal(found.dequantize(narrow), decoded.to(narrow))
    again = QuantizedWeight(*quantize(decoded, scheme), scheme).dequantize(torch.float32)
    assert (again - decoded).abs().max() <= 1e-6 * decoded.abs().max()


@given(data=st.data(), form=st.sampled_from(FORMS), of_scales=st.booleans())
def test_a_part_of_codes_is_made_of_a_part_of_the_matrix(data: st.DataObject, form: Form, of_scales: bool) -> None:
    """Wherever it begins and ends, also within a block, block by block in any order."""
    of_scales = of_scales and form != "bfloat16"
    shape = [data.draw(st.integers(1, 6)), data.draw(st.integers(1, 200)), data.draw(st.integers(1, 4))]
    dim, seed = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2**32))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    scheme = QuantScheme(form, dim, shape[dim])
    whole = quantize(values, scheme)[of_scales]
    assert whole is not None
    within = []
    for size in whole.shape:
        first = data.draw(st.integers(0, size))
        within.append((first, data.draw(st.integers(first, size))))
    matrix, origin = scheme.values_of(tuple(within), of_scales=of_scales), [first for first, _ in within]
    part = torch.full_like(cut(whole, tuple(within)), 99)
    order = data.draw(st.permutations(range(3)))
    with pytest.MonkeyPatch.context() as patch:
        # The same code on fewer values at a time, where one part of millions would take minutes.
        patch.setitem(quantized._AT_ONCE, "cpu", data.draw(st.integers(1, 300)))
        for block in blocks(matrix, dim, "cpu", order):
            some = quantize(cut(values, block), scheme)[of_scales]
            assert some is not None
            put(some, scheme.codes_of(block, of_scales=of_scales), part, origin)
    assert torch.equal(part, cut(whole, tuple(within)))


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_are_kernels_for_whole_blocks(form: Form, dtype: torch.dtype) -> None:
    """Along any dimension; what is no whole number of blocks is left to plain torch."""
    assert runs_on(torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for dim in range(3):
        for length in (128, 127, 65, 63, 40):
            shape = [3, 5, 2]
            shape[dim] = length
            scheme = QuantScheme(form, dim, length)
            codes, scales = quantize(torch.randn(shape, generator=generator), scheme)
            assert scales is not None
            found = dequantize_with_kernel(codes, scales, form=form, dim=dim, length=length, dtype=dtype)
            assert (found is None) == (length != 128)
            if found is not None:
                assert torch.equal(found, dequantize_reference(codes, scales, scheme, length).to(dtype))


def test_a_library_that_does_not_come_out_right_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Tensor:
        raise RuntimeError("built for another device")

    for operators in (
        None,
        SimpleNamespace(dequantize_blockwise=failing, dequantize_4bit=failing),
        SimpleNamespace(),
        SimpleNamespace(
            dequantize_blockwise=lambda codes, *_: torch.zeros(codes.shape),
            dequantize_4bit=lambda codes, *_: torch.zeros(2 * codes.numel()),
        ),
    ):
        # Libraries that this machine cannot have: missing, without its device, broken, of another packing.
        monkeypatch.setattr(block_kernels, "_operators", lambda operators=operators: operators)
        assert not runs_on.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("at_once", [1, 100, 5000])
def test_it_is_decoded_alike_however_much_at_a_time(form: Form, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = QuantScheme(form, 1, 131)
    made = QuantizedWeight(
        *quantize(torch.randn(7, 131, 5, generator=torch.Generator().manual_seed(1)), scheme), scheme
    )
    whole = made.dequantize(torch.float32)
    # The same code on fewer values at a time, where one part of millions would take minutes.
    monkeypatch.setitem(quantized._AT_ONCE, "cpu", at_once)
    assert torch.equal(made.dequantize(torch.float32), whole)


@pytest.mark.parametrize("form", FORMS)
def test_a_table_says_what_is_kept(form: Form) -> None:
    random = Random(form)
    dims: list[tuple[Dim, ...]] = [("heads", "model"), ("model", "hidden"), ("expert", "model", "expert_hidden")]
    for each in dims:
        for _ in range(20):
            shape = tuple(random.randint(1, 200) for _ in each)
            parameter = Parameter("w", shape, each, 1.0, frozen=True, form=form)
            scheme = QuantScheme.from_parameter(parameter)
            assert scheme is not None
            assert each[scheme.dim] == "model", "no layout cuts what shares a scale"
            made = [one for one in quantize(torch.randn(shape), scheme) if one is not None]
            table = list(kept(parameter))
            assert [one.shape for one, _ in table] == [tuple(one.shape) for one in made]
            assert [getattr(torch, str(dtype)) for _, dtype in table] == [one.dtype for one in made]
            assert kept_bytes(parameter, 4) == sum(one.nbytes for one in made)
    assert kept_bytes(Parameter("w", (3, 5), ("heads", "model")), 8) == 8 * 15


@pytest.mark.parametrize("form", ["full", *FORMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(0, 5), (3, 0), (0,)])
def test_a_rank_without_tokens_has_no_gradient_of_them(form: Form, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    matrix, scheme = torch.randn(64, 64), None if form == "full" else QuantScheme(form, 1, 64)
    w = matrix if scheme is None else QuantizedWeight(*quantize(matrix, scheme), scheme)
    x = torch.empty(*rows, 64, dtype=dtype, requires_grad=True)
    linear(x, w).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
