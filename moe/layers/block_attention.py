"""Softmax attention of one block of queries and keys at a time, with the log-sum-exps that merge the outputs of blocks
(`moe.layers.online_softmax`).

Shapes: B rows, n query heads, m key and value heads (n a multiple of m), N queries and K keys of a block, d and dv head
widths. With z = log Σ exp(s) over all keys, probabilities are exp(s - z), so that the gradients of a block need no
other block.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from moe.layers.cpu_flash import flash_attend, flash_gradients, with_dense_rows
from moe.layers.flex_attention import flex_attend_block
from moe.layers.linear import uses_own_dtype
from moe.layers.mask_blocks import Block, BlockKind, MaskBlocks
from moe.parallel.accelerator import accelerator

BlockOutputs = tuple[Tensor, Tensor]
"""(outputs `[B, n, N, dv]`, log-sum-exp `[B, n, N]` in at least float32, -inf for queries that see none of the keys)"""
FinalOutputs = tuple[Tensor, Tensor, Tensor]
"""(gradient of the outputs, outputs `[B, n, N, dv]`, log-sum-exp `[B, n, N]`), over all blocks"""
BlockGradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""


class BlockKernel(ABC):
    """Attention of queries `[B, n, N, d]` to keys `[B, m, K, d]` and values `[B, m, K, dv]` of a block."""

    needs_tiles: bool
    """Whether blocks that need a mask must be small."""

    def __init__(self, mask: MaskBlocks, scale: float) -> None:
        self.mask, self.scale = mask, scale

    @abstractmethod
    def attend(self, block: Block, queries: Tensor, keys: Tensor, values: Tensor) -> BlockOutputs:
        """Attention to the keys of the block alone."""

    @abstractmethod
    def gradients(
        self, block: Block, final: FinalOutputs, queries: Tensor, keys: Tensor, values: Tensor
    ) -> BlockGradients:
        """Contribution of the block's pairs of queries and keys to the gradients."""


def kernel_for(queries: Tensor, mask: MaskBlocks, scale: float) -> BlockKernel:
    """Return the kernel for the device and dtype of `queries`."""
    if accelerator(queries.device).kind == "cpu":
        return CPUKernel(mask, scale)
    return PlainKernel(mask, scale) if queries.dtype == torch.float64 else GPUKernel(mask, scale)


class CPUKernel(BlockKernel):
    """torch's flash attention for CPUs. In 16 bits without instructions for them, it computes in float32."""

    needs_tiles = True

    def attend(self, block: Block, queries: Tensor, keys: Tensor, values: Tensor) -> BlockOutputs:
        q, k, v = (_in_kernel_dtype(tensor) for tensor in _of_one_width(queries, keys, values))
        bias = self._bias(block, q)
        out, log_sums = flash_attend(q, k, v, bias, self.scale, is_causal=block.kind is BlockKind.CAUSAL)
        if bias is not None:  # the kernel returns 0 where no key is visible
            log_sums = log_sums.masked_fill((bias == float("-inf")).all(dim=-1), float("-inf"))
        return out[..., : values.shape[-1]], log_sums

    def gradients(
        self, block: Block, final: FinalOutputs, queries: Tensor, keys: Tensor, values: Tensor
    ) -> BlockGradients:
        gradient, outputs, log_sums = final
        gradient, q, k, v, outputs = (
            _in_kernel_dtype(tensor) for tensor in _of_one_width(gradient, queries, keys, values, outputs)
        )
        bias, is_causal = self._bias(block, q), block.kind is BlockKind.CAUSAL
        gradients = flash_gradients((gradient, q, k, v, outputs, log_sums), bias, self.scale, is_causal=is_causal)
        return _of_widths(gradients, queries, keys, values)

    def _bias(self, block: Block, queries: Tensor) -> Tensor | None:
        if block.kind is not BlockKind.MASKED:
            return None
        return self.mask.bias(block, queries.dtype, queries.device)


class GPUKernel(BlockKernel):
    """Flash attention in 16 bits, and flex attention for masks and for float32. Flex attention has no backward pass
    for given outputs, so its blocks are computed again there."""

    needs_tiles = False

    def attend(self, block: Block, queries: Tensor, keys: Tensor, values: Tensor) -> BlockOutputs:
        if not self._is_for_flash(block, queries):
            return flex_attend_block(queries, keys, values, scale=self.scale, block=block, mask=self.mask)
        out, log_sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *_of_one_width(queries, keys, values, multiple=8), 0.0, block.kind is BlockKind.CAUSAL, scale=self.scale
        )
        return out[..., : values.shape[-1]], log_sums

    def gradients(
        self, block: Block, final: FinalOutputs, queries: Tensor, keys: Tensor, values: Tensor
    ) -> BlockGradients:
        if not self._is_for_flash(block, queries):
            return recomputed_gradients(self, block, final, queries, keys, values)
        gradient, outputs, log_sums = final
        no_seed = torch.empty(2, dtype=torch.uint64, device=queries.device)  # read only with dropout
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *_of_one_width(gradient, queries, keys, values, outputs, multiple=8), log_sums.contiguous(), None, None,
            queries.shape[2], keys.shape[2], 0.0, block.kind is BlockKind.CAUSAL, no_seed, no_seed, scale=self.scale,
        )  # fmt: skip
        return _of_widths(gradients, queries, keys, values)

    @staticmethod
    def _is_for_flash(block: Block, queries: Tensor) -> bool:
        return block.kind is not BlockKind.MASKED and queries.dtype in (torch.bfloat16, torch.float16)


class PlainKernel(BlockKernel):
    """Plain operations, for float64 on a GPU, which fused kernels do not support."""

    needs_tiles = True

    def attend(self, block: Block, queries: Tensor, keys: Tensor, values: Tensor) -> BlockOutputs:
        scores = self._scores(block, queries, keys)
        log_sums = scores.logsumexp(dim=-1)
        outputs = _probabilities(scores, log_sums).to(values.dtype) @ values[:, :, None]
        return outputs.flatten(1, 2), log_sums.flatten(1, 2)

    def gradients(
        self, block: Block, final: FinalOutputs, queries: Tensor, keys: Tensor, values: Tensor
    ) -> BlockGradients:
        key_heads = keys.shape[1]
        gradient, outputs, log_sums = (tensor.unflatten(1, (key_heads, -1)) for tensor in final)
        scores = self._scores(block, queries, keys)
        shares = _probabilities(scores, log_sums)
        dot_products = (gradient.to(shares.dtype) * outputs).sum(dim=-1, keepdim=True)
        d_scores = shares * ((gradient @ values[:, :, None].transpose(-1, -2)) - dot_products) * self.scale
        d_scores, shares = d_scores.to(queries.dtype), shares.to(queries.dtype)
        d_queries = (d_scores @ keys[:, :, None]).flatten(1, 2)
        d_keys = d_scores.flatten(2, 3).transpose(-1, -2) @ queries.unflatten(1, (key_heads, -1)).flatten(2, 3)
        d_values = shares.flatten(2, 3).transpose(-1, -2) @ gradient.flatten(2, 3)
        return d_queries, d_keys, d_values

    def _scores(self, block: Block, queries: Tensor, keys: Tensor) -> Tensor:
        """`[B, m, n / m, N, K]`, at least float32."""
        scores = queries.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].transpose(-1, -2) * self.scale
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if block.kind is BlockKind.FULL:
            return scores
        return scores + self.mask.bias(block, scores.dtype, scores.device)[:, :, None]


def recomputed_gradients(
    kernel: BlockKernel, block: Block, final: FinalOutputs, queries: Tensor, keys: Tensor, values: Tensor
) -> BlockGradients:
    """Gradients of a block through autograd. With o and z of the block, and o' and z' of all blocks, the block's weight
    in o' is w = exp(z - z'). The gradient of o is w · do', and that of z is w · rowsum(do' · (o - o'))."""
    gradient, final_outputs, final_log_sums = final
    inputs = [tensor.detach().requires_grad_() for tensor in (queries, keys, values)]
    with torch.enable_grad():
        outputs, log_sums = kernel.attend(block, *inputs)
    weights = (log_sums.detach() - final_log_sums).exp()[..., None]
    wide_gradient = gradient.to(weights.dtype) * weights
    d_log_sums = (wide_gradient * (outputs.detach() - final_outputs)).sum(dim=-1)
    d_queries, d_keys, d_values = torch.autograd.grad(
        (outputs, log_sums), inputs, (wide_gradient.to(outputs.dtype), d_log_sums)
    )
    return d_queries, d_keys, d_values


def _probabilities(scores: Tensor, log_sums: Tensor) -> Tensor:
    """exp(s - z), and 0 for queries that see no key."""
    return (scores - log_sums.masked_fill(log_sums == float("-inf"), 0.0)[..., None]).exp()


def _in_kernel_dtype(x: Tensor) -> Tensor:
    return with_dense_rows(x if uses_own_dtype(x) else x.float())


def _of_one_width(*tensors: Tensor, multiple: int = 1) -> list[Tensor]:
    """The same heads padded with zeros to the largest width, and to a multiple of `multiple`."""
    width = -(-max(tensor.shape[-1] for tensor in tensors) // multiple) * multiple
    return [
        tensor if tensor.shape[-1] == width else functional.pad(tensor, (0, width - tensor.shape[-1]))
        for tensor in tensors
    ]


def _of_widths(gradients: BlockGradients, queries: Tensor, keys: Tensor, values: Tensor) -> BlockGradients:
    """Gradients without padding."""
    d_queries, d_keys, d_values = (
        gradient[..., : tensor.shape[-1]] for gradient, tensor in zip(gradients, (queries, keys, values), strict=True)
    )
    return d_queries, d_keys, d_values
