"""Valid and invalid logits, tokens, specs and states, and the messages about invalid ones."""

import re
from functools import cache
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

from moe.layers import MoELayer
from moe.routing import RoutingState, TokenContext, route
from moe.spec import MoESpec
from moe.spec.routers import ROUTERS

SPECS = {router: MoESpec(router=router, num_experts=4, model_dim=8, hidden_dim=8) for router in ROUTERS}


def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


@cache
def zeros_dtensor(shape: tuple[int, ...]) -> DTensor:
    """Zeros over a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return DTensor.from_local(torch.zeros(shape), DeviceMesh("cpu", [0]), [Replicate()], run_check=False)
    finally:
        dist.destroy_process_group()


LOGITS = torch.zeros(2, 3, 4)
DENSE = "must be a dense tensor of floating-point numbers"


@pytest.mark.parametrize(
    ("logits", "tokens", "message"),
    [
        (LOGITS, TokenContext(torch.arange(5)), r"tokens.ids \(5,\) must have the shape \(2, 3\)"),
        (LOGITS, TokenContext(padding=torch.zeros(2, 3)), "must be a dense tensor of torch.bool"),
        (LOGITS.long(), None, DENSE),
        (LOGITS.to_sparse(), None, DENSE),
        (LOGITS.to("meta"), None, r"logits \(=torch.float32, on meta\) must be a dense tensor"),
        (zeros_dtensor((2, 3, 4)), None, r"logits \(=torch.float32, a DTensor\) must be a dense tensor"),
        (LOGITS, {}, r"tokens \(=dict\) must be a TokenContext"),
        (LOGITS, TokenContext(batch=3), r"tokens.batch \(=3\) must be a BatchCounts"),
    ],
    ids=["ids of another length", "float padding", "whole numbers", "sparse", "meta", "DTensor", "a dict", "no counts"],
)
def test_wrong_arguments_are_refused(logits: torch.Tensor, tokens: TokenContext | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(logits, SPECS["gshard_top2"], tokens)


def test_a_layer_refuses_tensors_without_elements_here() -> None:
    layer = MoELayer(SPECS["gshard_top2"])
    with pytest.raises(ValueError, match=r"x \(=torch.float32, a DTensor\) must be a dense tensor"):
        layer(zeros_dtensor((6, 8)))
    with pytest.raises(ValueError, match=r"x \(=torch.float32, on meta\) must be a dense tensor"):
        layer.to("meta")(torch.zeros(6, 8, device="meta"))


@pytest.mark.parametrize("router", ROUTERS)
def test_tensors_of_inference_mode_are_routed_where_no_gradient_is_asked_for(router: str) -> None:
    logits, padding = torch.randn(2, 3, 4), torch.tensor([[0, 0, 1], [0, 1, 1]]).bool()
    expected = route(logits, SPECS[router], TokenContext(torch.arange(6), padding))
    tokens = TokenContext(in_inference_mode(torch.arange(6)), in_inference_mode(padding))
    for scores in (logits, in_inference_mode(logits)):
        assignments = route(scores, SPECS[router], tokens).assignments
        assert torch.equal(assignments.token, expected.assignments.token)
        assert torch.equal(assignments.weight, expected.assignments.weight)
    with pytest.raises(ValueError, match=r"tokens\.padding .* must not be passed while gradients are tracked"):
        route(logits.requires_grad_(), SPECS[router], tokens)
    with torch.inference_mode():
        logits = torch.randn(2, 3, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"logits .* must not be passed while gradients are tracked"):
        route(logits, SPECS[router])


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_no_tokens_are_routed_to_no_expert(router: str, shape: tuple[int, int], training: bool) -> None:
    logits = torch.zeros(*shape, 4, requires_grad=True)
    routing = route(logits, SPECS[router], TokenContext(training=training))
    assert routing.num_groups == shape[0]
    assert routing.num_tokens == routing.num_choices == 0
    assert not routing.load.any()
    (routing.aux_loss + routing.z_loss + routing.assignments.weight.sum()).backward()


@pytest.mark.parametrize("router", ROUTERS)
def test_whole_numbers_of_any_type_are_the_same_numbers(router: str) -> None:
    """Random choices depend on them."""
    logits = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
    tokens = TokenContext(step=3, seed=-1)
    expected = route(logits, SPECS[router], tokens, 5).assignments
    for kind in (numpy.int64, numpy.int8):
        same_tokens = TokenContext(step=kind(3), seed=kind(-1))
        assignments = route(logits, SPECS[router], same_tokens, kind(5)).assignments
        assert torch.equal(assignments.token, expected.token)


@st.composite
def routed_calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Logits, spec, tokens, layer and state, a tenth of them invalid."""

    def pick(right: list[Any], wrong: list[Any]) -> Any:
        return draw(st.sampled_from(wrong if draw(st.integers(0, 9)) == 4 else right))

    def of_tokens(dtype: torch.dtype) -> Any:
        valid = torch.zeros(2, 3, dtype=dtype)
        by_column = valid.t().contiguous().t()
        wrong = [valid.t(), valid[:, :2], valid[None], valid[0, 0], valid.to(torch.float32), valid.to_sparse(), "x", 3]
        return pick([None, valid, by_column, valid.view(6)], wrong)

    logits, of_experts = torch.zeros(2, 3, 4), torch.zeros(4)
    wrong = [None, "x", logits[0], logits[..., :3], logits.long(), [[]], logits.to("meta"),
             zeros_dtensor((2, 3, 4))]  # fmt: skip
    scores = pick([logits, logits.bfloat16(), in_inference_mode(logits)], wrong)
    spec = pick([*SPECS.values()], [None, "gshard_top2", {}, MoESpec])
    tokens = pick([None, TokenContext(of_tokens(torch.int64), of_tokens(torch.bool))], [3, {}, TokenContext])
    wrong_states = [of_experts[:3], of_experts[None], of_experts.to_sparse(), of_experts.to("meta"), "x", 1.0]
    state = RoutingState(*(pick([None, of_experts], wrong_states) for _ in range(2)))
    layer = pick([0, 7, numpy.int32(7)], ["x", None, 1.5])
    return scores, spec, tokens, layer, pick([None, state, state], [3, {}, "x"])


@given(routed_calls())
def test_what_cannot_be_routed_is_a_value_error_in_words(call: tuple[Any, ...]) -> None:
    try:
        routing = route(*call)
    except ValueError as error:
        message = str(error)
        assert re.match(r"(logits|spec|tokens|layer|state)\b.* must ", message), message
    else:
        assert routing.num_groups == 2
