"""Softmax attention against its definition: outputs and every gradient, whatever is seen, in every form it has."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.layers import softmax_attention
from moe.layers.attention_mask import AttentionMask
from moe.layers.flex_attention import flex_attend
from moe.layers.linear import uses_own_dtype
from moe.layers.softmax_attention import attend, attend_plainly, attend_reference
from moe.overrides import overriding
from tests.unit.layers.gradients import outputs_and_gradients


@dataclass(frozen=True)
class Case:
    inputs: tuple[Tensor, ...]
    """Queries, keys, values, and sinks where there are any."""
    visible: AttentionMask

    def run(
        self, function: Callable[..., Tensor], dtype: torch.dtype = torch.float64, given: torch.dtype = torch.float64
    ) -> list[Tensor]:
        """Outputs and gradients in `dtype` for inputs, and gradients of outputs, that `given` can hold."""
        scale = self.inputs[0].shape[-1] ** -0.5

        def of(queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
            return function(queries, keys, values, scale=scale, visible=self.visible, sinks=sinks)

        return outputs_and_gradients(of, *(each.to(given).to(dtype) for each in self.inputs), given=given)


@st.composite
def cases(draw: st.DrawFn, max_positions: int = 12) -> Case:
    rows, groups, of_keys = (draw(st.integers(1, 3)) for _ in range(3))
    num_keys = draw(st.integers(1, max_positions))
    num_queries = draw(st.one_of(st.just(num_keys), st.integers(1, num_keys)))
    wide, short = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, max_positions + 2)) if causal else None
    documents = first = None
    match draw(st.sampled_from(("neither", "documents", "first"))):
        case "documents":
            row = st.lists(st.integers(-1, 2), min_size=num_keys, max_size=num_keys)
            documents = torch.tensor([draw(st.one_of(row.map(sorted), row)) for _ in range(rows)])
        case "first":
            first = torch.tensor([draw(st.integers(0, num_keys)) for _ in range(rows)])
    torch.manual_seed(draw(st.integers(0, 999)))
    shapes = ((groups * of_keys, num_queries, wide), (of_keys, num_keys, wide), (of_keys, num_keys, short))
    inputs = [torch.randn(rows, *shape, dtype=torch.float64) for shape in shapes]
    order = draw(st.sampled_from(((1, 2), (2, 3), None)))
    if order is not None:  # the same numbers in another order in memory
        inputs = [each.transpose(*order).contiguous().transpose(*order) for each in inputs]
    if draw(st.booleans()):
        inputs.append(torch.randn(groups * of_keys, dtype=torch.float64) * 3)
    return Case(tuple(inputs), AttentionMask(causal, window, documents, first))


@given(case=cases())
def test_outputs_and_gradients_are_the_reference_s(case: Case) -> None:
    torch.testing.assert_close(case.run(attend), case.run(attend_reference), rtol=1e-10, atol=1e-10)


@given(
    st.sampled_from((1, 3, 7, 300)),
    st.integers(1, 9),
    st.integers(1, 2),
    st.sampled_from((1, 3)),
    st.sampled_from((4, 6)),
    st.booleans(),
    st.integers(0, 99),
)
def test_queries_attend_to_keys_of_another_sequence(
    num_queries: int, num_keys: int, of_keys: int, groups: int, width: int, has_sinks: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    shapes = [(groups * of_keys, num_queries, 4), (of_keys, num_keys, 4), (of_keys, num_keys, width)]
    inputs = tuple(torch.randn(2, *shape, dtype=torch.float64) for shape in shapes)
    if has_sinks:
        inputs = (*inputs, torch.randn(groups * of_keys, dtype=torch.float64))
    visible_keys = torch.rand(2, num_keys) < 0.6
    visible_keys[:, 0] = True
    case = Case(inputs, AttentionMask(causal=False, keys=visible_keys))
    torch.testing.assert_close(case.run(attend), case.run(attend_reference), rtol=1e-10, atol=1e-10)


@given(case=cases(), at_once=st.integers(1, 5))
def test_in_blocks_of_queries(case: Case, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:  # short sequences then have several blocks, as long ones do
        patch.setattr(softmax_attention, "QUERIES_AT_ONCE", at_once)
        torch.testing.assert_close(case.run(attend), case.run(attend_reference), rtol=1e-10, atol=1e-10)


def plainly(queries: Tensor, keys: Tensor, values: Tensor, **asked: Any) -> Tensor:
    return attend_plainly(queries, keys, values, **asked)


@given(case=cases(), at_once=st.integers(1, 5))
def test_in_plain_operations(case: Case, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:  # likewise
        patch.setattr(softmax_attention, "QUERIES_AT_ONCE", at_once)
        torch.testing.assert_close(case.run(plainly), case.run(attend_reference), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=20)  # each compiles nothing, but asks for every pair by itself
@given(case=cases())
def test_flex_attention_gives_the_reference_s_outputs(case: Case) -> None:
    queries, keys, values, *sinks = (each.float() for each in case.inputs)
    asked: dict[str, Any] = {"scale": 0.5, "visible": case.visible, "sinks": sinks[0] if sinks else None}
    with torch.no_grad():
        made = flex_attend(queries, keys, values, **asked)
    torch.testing.assert_close(made, attend_reference(queries, keys, values, **asked), rtol=1e-4, atol=1e-5)


@given(case=cases(max_positions=24), has_instructions=st.booleans())
def test_bfloat16_is_no_worse_than_plain_operations(case: Case, has_instructions: bool) -> None:
    narrow = torch.bfloat16
    exact, plain = case.run(attend_reference, given=narrow), case.run(attend_reference, narrow, narrow)
    # torch's bfloat16 kernel also runs without the instructions, only slower.
    with overriding({uses_own_dtype: lambda x: x.dtype != narrow or has_instructions}):
        ours = case.run(attend, narrow, narrow)
    biggest = max(float(each.norm()) for each in exact)
    for one, other, true in zip(ours, plain, exact, strict=True):
        assert one.dtype == narrow
        # Where plain operations happen to be exact, one rounding of what comes out remains; of the kernel of narrow
        # numbers those of the result and of its products with gradients, which its backward pass subtracts.
        rounding = 2**-6 * biggest if has_instructions else 2**-8 * true.norm() + 1e-6
        assert (one - true).norm() <= 2 * (other - true).norm() + rounding


@pytest.mark.parametrize("is_masked", [False, True])
def test_sinks_in_float64(is_masked: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 40, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    documents = torch.arange(40).div(15, rounding_mode="floor").expand(2, -1) if is_masked else None
    sinks = torch.tensor([-4.0, 0.0, 3.0, 40.0], dtype=torch.float64)
    case = Case((*inputs, sinks), AttentionMask(documents=documents))
    torch.testing.assert_close(case.run(attend), case.run(attend_reference), rtol=1e-12, atol=1e-12)


def test_sinks_gradcheck() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 5, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    visible = AttentionMask(window=3, documents=torch.tensor([[0, 0, 0, 0, -1], [0, 0, 1, 1, 1]]))
    assert torch.autograd.gradcheck(
        lambda q, k, v, sinks: attend(q, k, v, scale=0.6, visible=visible, sinks=sinks), (*inputs, sinks)
    )


@pytest.mark.parametrize("window", [16, None])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_sequences_longer_than_the_kernel_s_blocks(window: int | None, with_sinks: bool) -> None:
    """Whole blocks of keys are then hidden from a query, and blocks of queries see keys of their own."""
    torch.manual_seed(0)
    length = 700
    inputs = [torch.randn(1, heads, length, 8, dtype=torch.float64) for heads in (2, 1, 1)]
    documents = torch.arange(length).div(290, rounding_mode="floor")
    documents[-3:] = -1
    sinks = [torch.randn(2, dtype=torch.float64)] if with_sinks else []
    for visible in (AttentionMask(window=window, documents=documents[None]), AttentionMask(window=window)):
        case = Case((*inputs, *sinks), visible)
        torch.testing.assert_close(case.run(attend), case.run(plainly), rtol=1e-10, atol=1e-10)


def test_documents_packed_are_documents_alone() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 9, 4, dtype=torch.float64) for heads in (2, 1, 1)]
    documents = torch.tensor([[0, 0, 0, 0, 7, 7, 7, 7, 7]])
    together = attend(*inputs, scale=0.5, visible=AttentionMask(window=3, documents=documents))
    for part in (slice(0, 4), slice(4, 9)):
        alone = attend(*(each[:, :, part] for each in inputs), scale=0.5, visible=AttentionMask(window=3))
        torch.testing.assert_close(together[:, :, part], alone)


@pytest.mark.parametrize("window", [None, 3])
def test_token_by_token_behind_padding_is_the_whole(window: int | None) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 8, 4, dtype=torch.float64) for heads in (2, 1, 1)]
    visible = AttentionMask(window=window, first=torch.tensor([0, 3]))
    whole = attend(*inputs, scale=0.5, visible=visible)
    alone = attend(*(each[1:, :, 3:] for each in inputs), scale=0.5, visible=AttentionMask(window=window))
    torch.testing.assert_close(whole[1:, :, 3:], alone)
    queries, keys, values = inputs
    for stop in range(1, 9):
        one = attend(queries[:, :, stop - 1 : stop], keys[:, :, :stop], values[:, :, :stop], scale=0.5, visible=visible)
        torch.testing.assert_close(one, whole[:, :, stop - 1 : stop])


def test_padding_alone_has_numbers() -> None:
    inputs = [torch.randn(1, heads, 3, 4) for heads in (2, 1, 1)]
    made = Case((*inputs, torch.zeros(2)), AttentionMask(documents=torch.full((1, 3), -1))).run(attend)
    assert all(each.isfinite().all() for each in made)


def test_layers_share_masks() -> None:
    visible = AttentionMask(documents=torch.zeros(1, 6, dtype=torch.int64))
    narrow = visible.within(2)
    asked: tuple[Any, ...] = (6, 6, torch.float32, "cpu")
    assert narrow.bias(*asked) is visible.within(2).bias(*asked)
    assert narrow.bias(*asked) is not visible.bias(*asked)
    assert visible.within(None) is visible


@pytest.mark.parametrize(
    ("visible", "num_queries", "needed"),
    [
        (AttentionMask(), 6, False),
        (AttentionMask(), 1, False),
        (AttentionMask(), 2, True),
        (AttentionMask(window=6), 6, False),
        (AttentionMask(window=5), 6, True),
        (AttentionMask(causal=False), 3, False),
        (AttentionMask(first=torch.tensor([0])), 6, True),
    ],
)
def test_masks_are_made_where_they_hide_something_else(visible: AttentionMask, num_queries: int, needed: bool) -> None:
    assert visible.needs_mask(num_queries, 6) == needed


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="window"):
        AttentionMask(causal=False, window=3)
    with pytest.raises(ValueError, match="window"):
        AttentionMask(window=0)
    x = torch.randn(1, 3, 4, 2)
    with pytest.raises(ValueError, match="multiple"):
        attend(x, x[:, :2], x[:, :2], scale=1, visible=AttentionMask())
    with pytest.raises(ValueError, match="last positions"):
        attend(x, x[:, :, :2], x[:, :, :2], scale=1, visible=AttentionMask())
