"""Softmax attention in every form against its definition: outputs and every gradient, under every mask."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.layers import cpu_flash, softmax_attention
from moe.layers.attention_mask import AttentionMask
from moe.layers.flex_attention import flex_attend
from moe.layers.linear import uses_own_dtype
from moe.layers.softmax_attention import attend, attend_reference, attend_unfused
from moe.overrides import overriding
from tests.unit.layers.gradients import outputs_and_gradients


@dataclass(frozen=True)
class Case:
    inputs: tuple[Tensor, ...]
    """Queries, keys, values, and sinks where there are any."""
    mask: AttentionMask

    def run(
        self,
        function: Callable[..., Tensor],
        dtype: torch.dtype = torch.float64,
        input_dtype: torch.dtype = torch.float64,
    ) -> list[Tensor]:
        """Outputs and gradients in `dtype` for inputs, and gradients of outputs, that `input_dtype` can represent."""
        scale = self.inputs[0].shape[-1] ** -0.5

        def apply(queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
            return function(queries, keys, values, scale=scale, attention_mask=self.mask, sinks=sinks)

        return outputs_and_gradients(
            apply, *(tensor.to(input_dtype).to(dtype) for tensor in self.inputs), gradient_dtype=input_dtype
        )

    def assert_equal(self, function: Callable[..., Tensor], tolerance: float = 1e-10) -> None:
        actual, expected = self.run(function), self.run(attend_reference)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


SELF_ATTENTION = ("all", "documents", "first")
"""Which positions are visible; in cross-attention those of `keys`."""


@st.composite
def cases(
    draw: st.DrawFn,
    max_positions: int = 12,
    kinds: tuple[str, ...] = (*SELF_ATTENTION, "keys"),
    *,
    has_chunks: bool = False,
) -> Case:
    rows, groups, key_heads = (draw(st.integers(1, 3)) for _ in range(3))
    num_keys = draw(st.integers(1, max_positions))
    num_queries = draw(st.one_of(st.just(num_keys), st.integers(1, num_keys)))
    wide, short = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    causal = has_chunks or draw(st.booleans())
    window = draw(st.none() | st.integers(1, max_positions + 2)) if causal and not has_chunks else None
    documents = first = keys = None
    match draw(st.sampled_from(kinds)):
        case "documents":
            row = st.lists(st.integers(-1, 2), min_size=num_keys, max_size=num_keys)
            orders = row.map(sorted) if has_chunks else st.one_of(row.map(sorted), row)
            documents = torch.tensor([draw(orders) for _ in range(rows)])
        case "first":
            first = torch.tensor([draw(st.integers(0, num_keys)) for _ in range(rows)])
        case "keys":
            causal, window, num_queries = False, None, draw(st.sampled_from((1, 3, 7, 300)))
            later_keys = st.lists(st.booleans(), min_size=num_keys - 1, max_size=num_keys - 1)
            keys = torch.tensor([[True, *draw(later_keys)] for _ in range(rows)])
    torch.manual_seed(draw(st.integers(0, 999)))
    shapes = ((groups * key_heads, num_queries, wide), (key_heads, num_keys, wide), (key_heads, num_keys, short))
    inputs = [torch.randn(rows, *shape, dtype=torch.float64) for shape in shapes]
    order = draw(st.sampled_from(((1, 2), (2, 3), None)))
    if order is not None:  # the same numbers in another memory layout
        inputs = [tensor.transpose(*order).contiguous().transpose(*order) for tensor in inputs]
    if draw(st.booleans()):
        inputs.append(torch.randn(groups * key_heads, dtype=torch.float64) * 3)
    mask = AttentionMask(causal, window, documents=documents, first=first, keys=keys)
    if has_chunks:
        first_key = draw(st.integers(0, 9)) if documents is None and first is None else 0
        mask = mask.with_chunk(draw(st.integers(1, max_positions + 2)), first_key)
    return Case(tuple(inputs), mask)


@pytest.mark.parametrize("function", [attend, attend_unfused])
@given(case=cases(), queries_at_once=st.integers(1, 5) | st.just(softmax_attention.QUERIES_AT_ONCE))
def test_outputs_and_gradients_equal_the_reference(
    function: Callable[..., Tensor], case: Case, queries_at_once: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:  # short sequences then have several blocks, as long ones do
        patch.setattr(softmax_attention, "QUERIES_AT_ONCE", queries_at_once)
        patch.setattr(cpu_flash, "QUERIES_PER_TILE", queries_at_once)
        case.assert_equal(function)


@given(case=cases(kinds=SELF_ATTENTION, has_chunks=True))
def test_chunks_equal_the_reference(case: Case) -> None:
    case.assert_equal(attend)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=20)  # uncompiled, each evaluates the mask pair by pair
@given(case=cases(kinds=SELF_ATTENTION))
def test_flex_attention_outputs_equal_the_reference(case: Case) -> None:
    queries, keys, values, *sinks = (tensor.float() for tensor in case.inputs)
    arguments: dict[str, Any] = {"scale": 0.5, "attention_mask": case.mask, "sinks": sinks[0] if sinks else None}
    with torch.no_grad():
        outputs = flex_attend(queries, keys, values, **arguments)
    expected = attend_reference(queries, keys, values, **arguments)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


@given(case=cases(max_positions=24, kinds=SELF_ATTENTION), has_instructions=st.booleans())
def test_bfloat16_is_no_worse_than_plain_operations(case: Case, has_instructions: bool) -> None:
    narrow = torch.bfloat16
    exact, plain = case.run(attend_reference, input_dtype=narrow), case.run(attend_reference, narrow, narrow)
    # torch's bfloat16 kernel also runs without the instructions, only slower.
    with overriding({uses_own_dtype: lambda x: x.dtype != narrow or has_instructions}):
        actual = case.run(attend, narrow, narrow)
    largest_norm = max(float(tensor.norm()) for tensor in exact)
    for tensor, by_plain, expected in zip(actual, plain, exact, strict=True):
        assert tensor.dtype == narrow
        # Where plain operations happen to be exact, only the output is rounded. The bfloat16 kernel also rounds the
        # output's products with gradients, which its backward pass subtracts.
        rounding = 2**-6 * largest_norm if has_instructions else 2**-8 * expected.norm() + 1e-6
        assert (tensor - expected).norm() <= 2 * (by_plain - expected).norm() + rounding


@pytest.mark.parametrize("window", [16, None])
@pytest.mark.parametrize("sinks", [(), (0.0, 40.0)], ids=["", "sinks"])
@pytest.mark.parametrize("has_documents", [False, True])
def test_sequences_longer_than_the_kernel_s_blocks(
    window: int | None, sinks: tuple[float, ...], has_documents: bool
) -> None:
    """Some queries see none of a block of keys, and blocks of queries see different keys."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 700, 8, dtype=torch.float64) for heads in (2, 1, 1)]
    documents = torch.arange(700).div(290, rounding_mode="floor")[None]
    documents[:, -3:] = -1
    inputs += [torch.tensor(sinks, dtype=torch.float64)] * bool(sinks)
    case = Case(tuple(inputs), AttentionMask(window=window, documents=documents if has_documents else None))
    torch.testing.assert_close(case.run(attend), case.run(attend_unfused), rtol=1e-10, atol=1e-10)


def test_a_row_of_padding_has_finite_outputs_and_gradients() -> None:
    inputs = [torch.randn(1, heads, 3, 4) for heads in (2, 1, 1)]
    mask = AttentionMask(documents=torch.full((1, 3), -1))
    assert all(tensor.isfinite().all() for tensor in Case((*inputs, torch.zeros(2)), mask).run(attend))


def test_layers_share_masks() -> None:
    mask = AttentionMask(documents=torch.zeros(1, 6, dtype=torch.int64))
    narrow = mask.with_window(2)
    shape: tuple[Any, ...] = (6, 6, torch.float32, "cpu")
    assert narrow.bias(*shape) is mask.with_window(2).bias(*shape)
    assert narrow.bias(*shape) is not mask.bias(*shape)
    assert mask.with_window(None) is mask


@pytest.mark.parametrize(
    ("mask", "num_queries", "is_needed"),
    [
        (AttentionMask(), 6, False), (AttentionMask(), 1, False), (AttentionMask(), 2, True),
        (AttentionMask(window=6), 6, False), (AttentionMask(window=5), 6, True),
        (AttentionMask(causal=False), 3, False), (AttentionMask(first=torch.tensor([0])), 6, True),
    ],
)  # fmt: skip
def test_masks_are_built_where_they_hide_more_than_later_keys(
    mask: AttentionMask, num_queries: int, is_needed: bool
) -> None:
    assert mask.needs_mask(num_queries, 6) == is_needed


def test_mistakes_are_refused() -> None:
    for fields in ({"causal": False, "window": 3}, {"window": 0}):
        with pytest.raises(ValueError, match="window"):
            AttentionMask(**fields)
    for fields in ({"causal": False, "chunk": 3}, {"chunk": 0}, {"chunk": 2, "window": 3}):
        with pytest.raises(ValueError, match="chunk"):
            AttentionMask(**fields)
    x = torch.randn(1, 3, 4, 2)
    for keys, words in ((x[:, :2], "multiple"), (x[:, :, :2], "last positions")):
        with pytest.raises(ValueError, match=words):
            attend(x, keys, keys, scale=1, attention_mask=AttentionMask())
