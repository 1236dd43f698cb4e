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


@pytest.mark.parametrize(("activation", "num_weight_gradients"), [("swiglu", 3), ("relu", 2)])
def test_a_layer_is_a_dozen_kernels_and_no_wait(ranks: Pools, activation: str, num_weight_gradients: int) -> None:
    spec = MoESpec(
        num_experts=4, model_dim=16, hidden_dim=24, group_tokens=32, router="softmax_topk", top_k=2,
        activation=activation,
    )  # fmt: skip
    ((launches, waits),) = ranks[1].run(launches_and_waits, spec)
    assert waits == {"forward": {}, "backward": {}}
    assert launches == {"forward": FORWARD, "backward": {**BACKWARD, "weight_gradient": num_weight_gradients}}
