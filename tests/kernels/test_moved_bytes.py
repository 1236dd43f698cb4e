"""Kernels move hardly more bytes than they must: each operand once, each result once."""

import os

import pytest
import torch

from moe.kernels.adamw import AdamWFactors, AdamWTensors, BlockTable, launch_adamw
from moe.kernels.products import hidden_gradients
from moe.layers import MoELayer
from moe.layers.norm import rms_norm
from moe.layers.rotary import rotate
from moe.spec import MoESpec
from tests.kernels.cases import MEDIUM
from tests.kernels.enabled import kernels_everywhere
from tests.kernels.moved_bytes import count_moved_bytes

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

MAX_RATIO = 1.15
T, K, E, M, H = 96, 2, 8, 32, 32
"""Tokens, choices of one, experts, and widths of the model and of the experts."""
N = T * K
WIDTH = 4
"""Bytes of an element of tokens, weights and gradients, here all float32."""
TOKENS, ROWS, HIDDEN, MATRIX, LOGITS = (WIDTH * size for size in (T * M, N * M, N * H, E * M * H, T * E))
EXPERTS, KEPT, WEIGHTS, MAP = 8 * N, N, WIDTH * N, 4 * N
"""By choice: its expert, whether it is kept, its weight, and its row or a row's choice."""
POSITIONS = 8 * N
FIRST_ROWS = 4 * (E + 1)
PARTS = WIDTH * N * (H // MEDIUM.for_kernel(hidden_gradients).block_columns)
"""Parts of the weights' gradients, by tile of columns."""

FORWARD = {
    "route": LOGITS + EXPERTS + KEPT + WEIGHTS,
    "_count_choices": EXPERTS + KEPT,
    "_scatter_choices": EXPERTS + KEPT + 2 * MAP,
    "first_products": TOKENS + MAP + FIRST_ROWS + 2 * MATRIX + 3 * HIDDEN,
    "product": HIDDEN + MATRIX + FIRST_ROWS + ROWS,
    "combine": ROWS + MAP + WEIGHTS + TOKENS,
}
"""Bytes that each kernel must move in the forward pass of a layer with a gated activation."""
BACKWARD = {
    "route_backward": 2 * LOGITS + EXPERTS + WEIGHTS,
    "hidden_gradients": TOKENS + MAP + WEIGHTS + FIRST_ROWS + MATRIX + 5 * HIDDEN + PARTS,
    "gradients_of_weights": MAP + PARTS + WEIGHTS,
    "product": 2 * HIDDEN + 2 * MATRIX + FIRST_ROWS + ROWS,
    "combine": ROWS + MAP + TOKENS,
    "weight_gradient": 3 * (TOKENS + MAP + HIDDEN + FIRST_ROWS + MATRIX),
}
WITH_CAPACITY = {"_count_queued": EXPERTS + KEPT, "_admit": EXPERTS + 2 * KEPT + 2 * WEIGHTS + POSITIONS + 2 * MAP}
"""Kernels that take the place of those that sort choices by expert."""
SUMS_BY_BLOCK = {"balance", "summarize", "_scan_counts", "_scan_queued"}
"""Kernels that read results of others by block of tokens or choices, which are a few percent of what those move."""
CACHED = {"first_products", "product", "hidden_gradients", "weight_gradient", "_scatter_choices", "_admit"}
"""Kernels that read memory again while caches hold it: tiles of products, and choices of a block."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("capacity_factor", [None, 8.0])
def test_a_layer_s_kernels_move_what_they_must(capacity_factor: float | None) -> None:
    """With a capacity that drops no choice, so that all are rows."""
    spec = MoESpec(
        num_experts=E, model_dim=M, hidden_dim=H, group_tokens=T, router="softmax_topk", top_k=K, activation="swiglu",
        capacity_factor=capacity_factor,
    )  # fmt: skip
    required_forward, required_backward = FORWARD, BACKWARD
    if capacity_factor is not None:
        required_forward = {name: size for name, size in FORWARD.items() if "_choices" not in name} | WITH_CAPACITY
        required_backward = {**BACKWARD, "route_backward": BACKWARD["route_backward"] + KEPT}
    layer, x = MoELayer(spec), torch.randn(T, M, requires_grad=True)
    with kernels_everywhere():
        with count_moved_bytes() as forward:
            y, _ = layer(x)
        with count_moved_bytes() as backward:
            y.backward(torch.randn_like(y))
    assert {*forward} - SUMS_BY_BLOCK == {*required_forward}
    assert {*backward} == {*required_backward}
    for moved_bytes, required_bytes in ((forward, required_forward), (backward, required_backward)):
        for kernel, required in required_bytes.items():
            moved = moved_bytes[kernel]
            assert required <= moved.distinct <= MAX_RATIO * required, kernel
            assert kernel in CACHED or moved.requested <= MAX_RATIO * required, kernel


@pytest.mark.slow
def test_biases_are_read_and_summed_once() -> None:
    """Of experts, whose gradients are sums of rows of hidden states, and of weighted rows of tokens."""
    spec = MoESpec(
        num_experts=E, model_dim=M, hidden_dim=H, group_tokens=T, router="softmax_topk", top_k=K, activation="swiglu",
        expert_bias=True,
    )  # fmt: skip
    layer, x = MoELayer(spec), torch.randn(T, M, requires_grad=True)
    hidden_biases, token_biases = WIDTH * E * H, WIDTH * E * M
    with kernels_everywhere(), count_moved_bytes() as moved_bytes:
        layer(x)[0].sum().backward()
    of_hidden, of_tokens = HIDDEN + FIRST_ROWS + hidden_biases, TOKENS + MAP + WEIGHTS + FIRST_ROWS + token_biases
    required_bytes = {
        "first_products": FORWARD["first_products"] + 2 * hidden_biases,
        "product": FORWARD["product"] + BACKWARD["product"] + token_biases,
        "gradients_of_weights": BACKWARD["gradients_of_weights"] + EXPERTS + TOKENS + token_biases,
        "sum_by_expert": 2 * of_hidden + of_tokens,
    }
    for kernel, required in required_bytes.items():
        assert required <= moved_bytes[kernel].distinct <= MAX_RATIO * required, kernel
    # Tokens are gathered once per choice.
    gathered = required_bytes["sum_by_expert"] + (K - 1) * TOKENS
    assert moved_bytes["sum_by_expert"].requested <= MAX_RATIO * gathered


def test_norms_and_rotations_move_each_value_once() -> None:
    x = torch.randn(2, 3, 16, 64, requires_grad=True)
    weight, cos, sin = torch.ones(64, requires_grad=True), torch.randn(1, 1, 16, 24), torch.randn(1, 1, 16, 24)
    with kernels_everywhere(), count_moved_bytes() as moved_bytes:
        y = rotate(rms_norm(x, weight, 1e-6), cos, sin)
        y.backward(torch.randn_like(y))
    values = WIDTH * x.numel()
    rates = values // 64
    required_bytes = {"normalize": 2 * values + rates, "normalize_backward": 3 * values + rates}
    for kernel, required in {**required_bytes, "rotate_rows": 4 * values}.items():
        assert required <= moved_bytes[kernel].distinct <= moved_bytes[kernel].requested, kernel
        assert moved_bytes[kernel].distinct <= MAX_RATIO * required, kernel
        assert kernel == "rotate_rows" or moved_bytes[kernel].requested <= MAX_RATIO * required


def test_an_update_moves_thirty_bytes_per_weight() -> None:
    """Weights and moments in and out, gradients in, and narrow copies out."""
    sizes = (5000, 2048, 3)
    weights, gradients, moments1, moments2 = ([torch.ones(size) for size in sizes] for _ in range(4))
    copies = [weight.bfloat16() for weight in weights]
    factors = AdamWFactors.of_step(1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
    tensors = AdamWTensors(weights, gradients, moments1, moments2, copies)
    with count_moved_bytes() as moved_bytes:
        launch_adamw(tensors, BlockTable(weights), factors, torch.tensor(0.5))
    moved, required = moved_bytes["adamw_kernel"], 30 * sum(sizes)
    assert required <= moved.distinct <= moved.requested <= MAX_RATIO * required
