"""The host launches a fixed number of kernels for a layer, and waits for none."""

import importlib.util
import os
from collections import Counter

import pytest

from moe.spec import LanguageModelSpec, MoESpec
from tests.parity.combinations import train_of
from tests.parity.gloo_ranks import Pools
from tests.rehearsal.kernels import launches_and_waits, launches_and_waits_of_step

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
]

SORT = {"_count_choices": 1, "_scan_counts": 1, "_scatter_choices": 1}
ADMIT = {"_count_queued": 1, "_scan_queued": 1, "_admit": 1}
"""Instead of `SORT`, with capacity."""
ROUTE = {"route": 1, "balance": 1, "summarize": 1}
FORWARD = {**ROUTE, **SORT, "first_products": 1, "product": 1, "combine": 1}
BACKWARD = {"route_backward": 1, "hidden_gradients": 1, "gradients_of_weights": 1, "product": 1, "combine": 1}


FORWARD_OF_TORCH = {"_to_copy": 1, "mm": 1}
BACKWARD_OF_TORCH = {"mm": 2, "_to_copy": 2, "add": 1}
WITHOUT_PADDING = ({**FORWARD_OF_TORCH, "arange": 1}, BACKWARD_OF_TORCH)
WITH_PADDING = ({**FORWARD_OF_TORCH, "masked_fill": 1}, {**BACKWARD_OF_TORCH, "masked_fill": 1})
"""Forward: router logits, the float32 tokens they need, and token ids or the padding mask. Backward: their gradients,
with the tokens cast again. With those of the kernels, at most 12 launches forward and 14 backward."""
PASSES_OVER_WEIGHTS = {"_fused_adamw_", "_foreach_mul_", "_foreach_copy_"}
"""Operations of torch's AdamW, clipping and narrow copies, which one kernel replaces."""
MAX_TORCH_LAUNCHES_PER_LAYER = 67
"""Torch launches that one decoder layer adds to a step: both passes, with plain attention, and its statistics."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("router", ["softmax_topk", "sigmoid_topk"])
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize(("activation", "num_weight_gradients"), [("swiglu", 3), ("relu", 2)])
def test_a_layer_is_a_dozen_kernels_and_no_wait(
    ranks: Pools,
    activation: str,
    num_weight_gradients: int,
    has_padding: bool,
    capacity_factor: float | None,
    router: str,
) -> None:
    spec = MoESpec(
        num_experts=4, model_dim=16, hidden_dim=24, group_tokens=32, router=router, top_k=2,
        activation=activation, capacity_factor=capacity_factor,
    )  # fmt: skip
    forward = FORWARD
    if capacity_factor is not None:
        forward = {name: number for name, number in FORWARD.items() if name not in SORT} | ADMIT
    ((launches, torch_launches, waits),) = ranks[1].run(launches_and_waits, spec, has_padding)
    assert waits == {"forward": {}, "backward": {}}
    assert launches == {"forward": forward, "backward": {**BACKWARD, "weight_gradient": num_weight_gradients}}
    assert (torch_launches["forward"], torch_launches["backward"]) == (WITH_PADDING if has_padding else WITHOUT_PADDING)
    num_launches = {name: sum(launches[name].values()) + sum(torch_launches[name].values()) for name in launches}
    assert num_launches["forward"] <= 12
    assert num_launches["backward"] <= 14


def decoder(num_layers: int) -> LanguageModelSpec:
    """A small model in the shape of Qwen3-MoE."""
    return LanguageModelSpec(
        kind="language", model_dim=16, num_layers=num_layers, ffn_dim=16, vocab_size=300,
        attention={"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "query_key_norm": "head"},
        moe=MoESpec(
            num_experts=4, model_dim=16, hidden_dim=16, group_tokens=64, router="softmax_topk", top_k=2,
            activation="swiglu",
        ),
    )  # fmt: skip


def test_the_host_waits_for_nothing_in_a_step_of_a_decoder_and_a_layer_adds_few_launches(ranks: Pools) -> None:
    shallow, deep = (
        ranks[1].run(launches_and_waits_of_step, decoder(num_layers), train_of("bfloat16"))[0] for num_layers in (1, 2)
    )
    (launches, torch_launches, waits), (shallow_launches, shallow_torch_launches, _) = deep, shallow
    assert waits == {}
    by_layer = Counter(FORWARD) + Counter({**BACKWARD, "weight_gradient": 3})
    by_layer.update({"normalize": 4, "normalize_backward": 4, "rotate_rows": 4})
    assert Counter(launches) - Counter(shallow_launches) == by_layer
    assert sum(torch_launches.values()) - sum(shallow_torch_launches.values()) <= MAX_TORCH_LAUNCHES_PER_LAYER
    assert launches["adamw_kernel"] == shallow_launches["adamw_kernel"] == 1
    assert not PASSES_OVER_WEIGHTS & {*torch_launches}
