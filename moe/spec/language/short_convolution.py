"""Gated short convolution (LFM2)."""

from typing import Literal

from pydantic import StrictBool

from moe.spec.base import Count
from moe.spec.block import AttentionDims, SavedWidths
from moe.spec.language.linear import LinearAttentionSpec
from moe.spec.parameter import Parameter, Size, bias, linear


class ShortConvolutionSpec(LinearAttentionSpec):
    """Gated short convolution (LFM2, arXiv 2511.23404): a causal depthwise convolution between two gates, all three
    inputs projected from the hidden state."""

    kind: Literal["short_convolution"]
    conv_tokens: Count = 3
    """Kernel size."""
    bias: StrictBool = False
    """Whether projections and convolution have a bias."""

    def heads(self, model_dim: int) -> dict[str, int]:
        return {"model_dim": model_dim}

    def parameters(self, model_dim: int) -> tuple[Parameter, ...]:
        """Parameters of a layer. Rows are ordered by channel, so that tensor ranks have whole channels."""
        width: Size = ("model", model_dim)
        channels: Size = ("heads", model_dim)
        projected: Size = ("heads", 3 * model_dim)
        table = [
            linear("projection", projected, width),
            linear("convolution", channels, ("none", self.conv_tokens)),
            linear("output", width, channels),
        ]
        if self.bias:
            table += [bias("projection", projected), bias("convolution", channels), bias("output", width)]
        return tuple(table)

    def dims(self, model_dim: int) -> AttentionDims:
        """Dimensions of a layer. The backward pass needs the projection's output, the input and output of the
        convolution, and the gated output."""
        return AttentionDims(
            model_dim, model_dim, model_dim, 2 * model_dim, 4 * model_dim**2, chunk=1,
            state_flops=2 * model_dim * self.conv_tokens, saved_widths=SavedWidths(0, 0, unfused=6 * model_dim),
            heads=model_dim, key_heads=model_dim,
        )  # fmt: skip
