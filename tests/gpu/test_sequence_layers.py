"""Attention, norms and the gated delta rule on a GPU against their references on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.layers.attention_mask import AttentionMask
from moe.layers.delta_rule import gated_delta_rule, gated_delta_rule_reference
from moe.layers.norm import rms_norm, rms_norm_reference
from moe.layers.softmax_attention import attend
from tests.unit.layers.gradients import outputs_and_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]

LENGTH = 320
DOCUMENTS = torch.arange(LENGTH).div(130, rounding_mode="floor").expand(2, -1).contiguous()
SEEN: dict[str, dict[str, Any]] = {
    "causal": {},
    "in a window": {"window": 40},
    "in documents": {"documents": DOCUMENTS},
    "behind padding": {"first": torch.tensor([0, 70])},
    "in chunks": {"chunk": 100},
    "in chunks of documents": {"chunk": 100, "documents": DOCUMENTS},
    "in chunks behind padding": {"chunk": 100, "first": torch.tensor([0, 70])},
}


def compare(function: Any, reference: Any, *inputs: Tensor, tolerance: float) -> None:
    outputs = outputs_and_gradients(function, *(tensor.cuda() for tensor in inputs))
    expected_outputs = outputs_and_gradients(reference, *(tensor.double() for tensor in inputs))
    for actual, expected in zip(outputs, expected_outputs, strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mask_name", SEEN)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.float64, 1e-10)])
@pytest.mark.parametrize("widths", [(64, 64), (48, 32)])
def test_attention(
    mask_name: str, has_sinks: bool, dtype: torch.dtype, tolerance: float, widths: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    wide, short = widths
    inputs = [torch.randn(2, heads, LENGTH, width, dtype=dtype) for heads, width in ((4, wide), (2, wide), (2, short))]
    sinks = [torch.randn(4, dtype=dtype)] if has_sinks else []

    def on(device: str) -> Any:
        attention_mask = AttentionMask(
            **{key: value.to(device) if isinstance(value, Tensor) else value for key, value in SEEN[mask_name].items()}
        )
        return lambda q, k, v, sinks=None: attend(q, k, v, scale=wide**-0.5, attention_mask=attention_mask, sinks=sinks)

    compare(on("cuda"), on("cpu"), *inputs, *sinks, tolerance=tolerance)


def test_the_gated_delta_rule() -> None:
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(2, LENGTH, 1, 16), dim=-1) for _ in range(2))
    v, beta = torch.randn(2, LENGTH, 2, 16), torch.rand(2, LENGTH, 2)
    compare(
        lambda *inputs: gated_delta_rule(*inputs, documents=DOCUMENTS.cuda()),
        lambda *inputs: gated_delta_rule_reference(*inputs, documents=DOCUMENTS),
        q, k, v, -torch.rand(2, LENGTH, 2), beta, tolerance=1e-3,
    )  # fmt: skip


def test_rms_norm() -> None:
    x, weight = torch.randn(50, 96), torch.randn(96)
    compare(lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: rms_norm_reference(x, w, 1e-6), x, weight, tolerance=1e-4)
