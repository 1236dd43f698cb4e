"""The x, ids, padding and shares that a layer accepts, and its messages for any others."""

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.layers import TokenContext
from moe.parallel import SequenceShard
from moe.routing import BatchCounts
from moe.spec.routers import ROUTERS
from tests.unit.test_moe_layer import layer_of, router_layer
from tests.unit.test_routing_mistakes import in_inference_mode, zeros_dtensor


@pytest.mark.parametrize("of_x", [(24, 1), (1, 24)])
def test_groups_may_be_x_reversed_where_that_is_the_same_order(of_x: tuple[int, int]) -> None:
    x, padding = torch.randn(24, 6, dtype=torch.float64), torch.arange(24) % 5 == 0
    layer = layer_of()
    tokens = TokenContext(torch.arange(24).view(of_x[::-1]), padding.view(of_x[::-1]))
    expected, _ = layer(x, tokens)
    assert torch.equal(layer(x.view(*of_x, 6), tokens)[0].view(24, 6), expected)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 6, 8, 12, 24]), max_size=3).map(tuple)


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Swap the first two dimensions, if there are two."""
    return x.transpose(0, 1) if x.dim() > 1 else x


KINDS: list[Callable[[torch.Tensor], object]] = [
    torch.Tensor.to_sparse, torch.Tensor.tolist, lambda x: numpy.ones(tuple(x.shape)), lambda x: x.to("meta"),
    lambda x: zeros_dtensor(tuple(x.shape)),
    lambda x: torch.nested.nested_tensor([x[None]], layout=torch.jagged), lambda x: None,
    lambda x: torch.nn.Parameter(x, requires_grad=False), in_inference_mode, transpose,
    lambda x: transpose(transpose(x).contiguous()),
]  # fmt: skip
"""What a tensor may be given as, where it is not as it should be: in few calls, or no other mistake would be met."""
WHATEVER: list[object] = [3, "x", {}, {"ids": None}, [], torch.ones(2), TokenContext, object()]
SHARES = [SequenceShard("x"), SequenceShard(-1), SequenceShard(1.5), SequenceShard(8, "x"), SequenceShard(8, label=3)]


@st.composite
def calls(draw: st.DrawFn) -> tuple[object, object, object]:
    """x, tokens and shares of a call to a layer, correct or mistaken."""

    def seldom(mistakes: list[Any], otherwise: Any) -> Any:
        return draw(st.sampled_from(mistakes)) if draw(st.integers(0, 11)) == 7 else otherwise

    def draw_tensor(shape: tuple[int, ...], dtypes: list[torch.dtype]) -> object:
        shape, dtype = draw(st.one_of(st.just(shape), SHAPES)), draw(st.sampled_from([None, *dtypes]))
        return None if dtype is None else seldom(KINDS, lambda x: x)(torch.zeros(shape, dtype=dtype))

    shape = draw(SHAPES)
    x_shape = (*shape, draw(st.sampled_from([6, 6, 6, 5]))) if draw(st.integers(0, 9)) else shape
    x = seldom(KINDS, lambda x: x)(torch.ones(x_shape, dtype=draw(st.sampled_from(DTYPES))))
    length = draw(st.sampled_from([None, None, 1, 4, 0, -1, 1.5, True]))
    step = draw(st.sampled_from([0, 7, 2**70, None, 0.5]))
    ids = draw_tensor(shape, [torch.int64, torch.int64, torch.int32, torch.float32])
    padding = draw_tensor(shape, [torch.bool, torch.bool, torch.int64, torch.float32])
    counts = [draw(st.sampled_from([1, 1, 1, 5, 2**70, 0, -1, 1.5, "3", None, True])) for _ in range(3)]
    batch = seldom([*WHATEVER, BatchCounts(*counts)], draw(st.sampled_from([None, BatchCounts(9, 9, 99)])))
    training = seldom([*WHATEVER, None, 0], draw(st.booleans()))
    tokens = TokenContext(ids, padding, step, training=training, sequence_tokens=length, batch=batch)
    return x, seldom([*WHATEVER, None], tokens), seldom([*WHATEVER, *SHARES, SequenceShard(8)], None)


@given(calls(), st.sampled_from(sorted(ROUTERS)), st.sampled_from(["group", "sequence", "global_batch"]))
def test_what_a_layer_cannot_take_is_a_value_error_in_words(call, router, scope) -> None:
    x, tokens, shard = call
    layer = router_layer(router, **({"aux_scope": scope} if "aux_scope" in ROUTERS[router].model_fields else {}))
    try:
        y, routing = layer(x, tokens, shard)
    except ValueError as error:
        message = str(error)
    else:
        message = None
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        padding = None if tokens is None else tokens.padding
        real = x.shape[:-1].numel() if padding is None else int((~padding).sum())
        assert routing.num_tokens == real
    assert message is None or re.match(r"(x|ids|tokens|groups|shard)\b.* (must|are not|do not) ", message), message


def padding_of(*shape: int) -> TokenContext:
    return TokenContext(padding=torch.zeros(shape, dtype=torch.bool))


def padding_case(of_padding: tuple[int, ...], of_x: tuple[int, ...], remedy: str) -> tuple[Any, ...]:
    """A case of padding that has neither the shape of groups nor that of x, though the same number of tokens."""
    message = rf"{re.escape(f'{of_padding} must have the shape {of_x} of x without M')}.*: {remedy} them$"
    return torch.zeros(*of_x, 6), padding_of(*of_padding), None, message


X = torch.ones(4, 6, 6)
MISTAKES: list[tuple[Any, ...]] = [
    (torch.zeros(24, 7), TokenContext(), None, r"must end in model_dim \(=6\)"),
    (torch.zeros(24, 6), TokenContext(torch.zeros(2, 12, dtype=torch.int64), torch.zeros(24, dtype=torch.bool)), None,
     "must have the shape of padding"),
    padding_case((4, 3, 2), (2, 3, 4), "transpose"), padding_case((3, 2, 4), (2, 3, 4), "reshape"),
    padding_case((2, 2, 6), (4, 6), "reshape"), padding_case((2, 2, 6), (24,), "reshape"),
    padding_case((20,), (4, 6), "reshape"),
    (torch.zeros(24, 6), padding_of(2, 8), None, "do not describe x"),
    (torch.zeros(24, 6), padding_of(3, 12), None, "do not describe x"),
    (transpose(X), None, SequenceShard("x"), r"shard\.num_tokens \(=.*\) must be "),
    (transpose(X), None, SequenceShard(True), r"shard\.num_tokens \(=.*\) must be "),
    (transpose(X), None, SequenceShard(6, "x"), r"shard\.group \(=.*\) must be "),
    (in_inference_mode(X.double()), None, None, "x .* must not be passed while gradients are tracked; clone it"),
    (X, TokenContext(padding=in_inference_mode(torch.ones(4, 6).bool())), None,
     r"tokens\.padding .* must not be passed while gradients are tracked; clone it"),
    (X, TokenContext(torch.arange(24).view(4, 6).t()), None,
     r"ids and padding \(6, 4\) must have the shape \(4, 6\) of x without M, .*: pass x flat, \[T, M\], if "
     r"rows are groups, or transpose them if they are not$"),
    (X, TokenContext(padding=torch.ones(6, 4).bool()), None, r"\(6, 4\) must have the shape \(4, 6\)"),
]  # fmt: skip
"""(x, tokens, shard of the sequence, message)"""


@pytest.mark.parametrize(("x", "tokens", "shard", "message"), MISTAKES)
def test_mistakes_are_described(x: Any, tokens: Any, shard: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_of()(x if x.is_inference() else x.double(), tokens, shard)


def test_ids_of_inference_mode_are_no_part_of_the_backward_pass() -> None:
    layer = router_layer("gshard_top2", second_expert="sampling", shared_hidden_dim=5)
    x, ids = torch.randn(4, 6, 6, dtype=torch.float64, requires_grad=True), torch.arange(24).view(4, 6)
    expected = torch.autograd.grad(layer(x, TokenContext(ids))[0].sum(), x)
    assert torch.equal(torch.autograd.grad(layer(x, TokenContext(in_inference_mode(ids)))[0].sum(), x)[0], *expected)


def test_inference_mode_takes_its_own_tensors() -> None:
    layer = layer_of(shared_hidden_dim=5)
    x = in_inference_mode(torch.ones(4, 6, 6, dtype=torch.float64))
    tokens = TokenContext(padding=in_inference_mode(torch.ones(4, 6).tril().bool()))
    with torch.no_grad():
        assert layer(x, tokens)[0].shape == x.shape
    with torch.inference_mode():
        assert layer(x, tokens)[0].shape == x.shape
    layer.requires_grad_(False)
    assert layer(x, tokens)[0].shape == x.shape
    with pytest.raises(ValueError, match=r"tokens\.padding .* must not be passed while gradients are tracked"):
        layer(x.clone().requires_grad_(), tokens)
    layer.experts.requires_grad_(True)
    with pytest.raises(ValueError, match=r"x .* must not be passed while gradients are tracked"):
        layer(x, tokens)


@pytest.mark.parametrize("length", [0, -1, 1.5, True, "4"])
def test_the_length_of_sequences_is_a_whole_number_above_0(length: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens\.sequence_tokens"):
        router_layer("softmax_topk")(X, TokenContext(sequence_tokens=length))
