"""The host launches a fixed number of kernels for a layer, and waits for none."""

import importlib.util
import os

import pytest

from moe.spec import MoESpec
from tests.parity.gloo_ranks import Pools
from tests.rehearsal.kernels import launches_and_waits

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
]

SORT = {"_count_choices": 1, "_scan_counts": 1, "_scatter_choices": 1}
ROUTE = {"_route": 1, "_balance": 1, "_summarize": 1}
FORWARD = {**ROUTE, **SORT, "first_products": 1, "product": 1, "combine": 1}
BACKWARD = {"_route_backward": 1, "hidden_gradients": 1, "gradients_of_weights": 1, "product": 1, "combine": 1}


FORWARD_OF_TORCH = {"_to_copy": 1, "mm": 1}
BACKWARD_OF_TORCH = {"ones": 1, "mm": 2, "_to_copy": 1, "add": 1}
WITHOUT_PADDING = ({**FORWARD_OF_TORCH, "arange": 1}, BACKWARD_OF_TORCH)
WITH_PADDING = ({**FORWARD_OF_TORCH, "masked_fill": 1}, {**BACKWARD_OF_TORCH, "masked_fill": 1})
"""Router logits, tokens in float32 for them, and ids or padding; the gradients of those and of the losses."""
MAX_FORWARD, MAX_BACKWARD = 12, 14


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize(("activation", "num_weight_gradients"), [("swiglu", 3), ("relu", 2)])
def test_a_layer_is_a_dozen_kernels_and_no_wait(
    ranks: Pools, activation: str, num_weight_gradients: int, has_padding: bool
) -> None:
    spec = MoESpec(
        num_experts=4, model_dim=16, hidden_dim=24, group_tokens=32, router="softmax_topk", top_k=2,
        activation=activation,
    )  # fmt: skip
    ((launches, torch_launches, waits),) = ranks[1].run(launches_and_waits, spec, has_padding)
    assert waits == {"forward": {}, "backward": {}}
    assert launches == {"forward": FORWARD, "backward": {**BACKWARD, "weight_gradient": num_weight_gradients}}
    assert (torch_launches["forward"], torch_launches["backward"]) == (WITH_PADDING if has_padding else WITHOUT_PADDING)
    for direction, most in (("forward", MAX_FORWARD), ("backward", MAX_BACKWARD)):
        assert sum(launches[direction].values()) + sum(torch_launches[direction].values()) <= most
