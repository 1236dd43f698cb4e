"""Kernels of blocks on a GPU, merged, against plain operations in float64."""

import pytest
import torch

from moe.layers.attention_mask import AttentionMask
from moe.layers.block_attention import BlockKernel, GPUKernel, PlainKernel
from moe.layers.mask_blocks import MaskBlocks, segments_of
from moe.layers.online_softmax import OnlineSoftmax, QueryGradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]

LENGTH = 640
DOCUMENTS = torch.arange(LENGTH).div(130, rounding_mode="floor").expand(2, -1).contiguous()
MASKS = {
    "causal": AttentionMask(),
    "full": AttentionMask(causal=False),
    "in a window": AttentionMask(window=200),
    "in documents": AttentionMask(documents=DOCUMENTS),
    "in chunks": AttentionMask(chunk=100),
}


def merged(kernel_class: type[BlockKernel], mask: AttentionMask, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of zigzag-like segments, and gradients of all inputs."""
    queries, keys, values, gradient = (tensor.cuda() for tensor in inputs)
    if mask.documents is not None:
        mask = AttentionMask(documents=mask.documents.cuda())
    blocks_of_mask = MaskBlocks(mask, LENGTH, queries.device)
    kernel = kernel_class(blocks_of_mask, 0.2)
    segments = segments_of((range(160), range(160, 480), range(480, LENGTH)))
    blocks = blocks_of_mask.blocks(segments, segments, in_tiles=kernel.needs_tiles)
    softmax = OnlineSoftmax(queries, values.shape[-1])
    softmax.add_blocks(kernel, blocks, queries, keys, values)
    outputs, log_sums = softmax.finish(None, queries.dtype)
    query_gradients = QueryGradients(gradient, outputs, log_sums, queries)
    key_gradients = query_gradients.add_blocks(kernel, blocks, keys, values)
    return [tensor.double().cpu() for tensor in (outputs, query_gradients.finish(), *key_gradients)]


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-2)])
@pytest.mark.parametrize("widths", [(64, 64), (48, 32)])
def test_kernels_of_a_gpu(mask_name: str, dtype: torch.dtype, tolerance: float, widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    wide, short = widths
    inputs = [torch.randn(2, heads, LENGTH, width).to(dtype)
              for heads, width in ((4, wide), (2, wide), (2, short), (4, short))]  # fmt: skip
    expected = merged(PlainKernel, MASKS[mask_name], [tensor.double() for tensor in inputs])
    for actual, exact in zip(merged(GPUKernel, MASKS[mask_name], inputs), expected, strict=True):
        assert (actual - exact).norm() <= tolerance * exact.norm()
