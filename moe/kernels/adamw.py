"""AdamW's update of all weights in one launch, which also clips gradients and writes narrow copies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import launching_on
from moe.parallel.accelerator import accelerator

BLOCK = 1024
"""Elements per program."""
_FIELDS = 6
"""Of a tensor in the table: addresses of weights, gradient, first and second moments and narrow copy, and the number of
elements."""
_ALIGNMENT = 16
"""Bytes that one load or store of a thread covers."""


@dataclass(frozen=True)
class AdamWFactors:
    """Factors of one update (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2), computed in float64."""

    decay: float
    """Of the weights, 1 - lr · weight decay."""
    beta1: float
    beta2: float
    eps: float
    step_size: float
    """Learning rate over the bias correction of the first moments."""
    denominator_factor: float
    """1 over the root of the bias correction of the second moments."""

    @classmethod
    def of_step(
        cls, step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
    ) -> "AdamWFactors":
        """Factors of the update number `step`, from 1."""
        corrections = 1 - beta1**step, 1 - beta2**step
        return cls(1 - lr * weight_decay, beta1, beta2, eps, lr / corrections[0], corrections[1] ** -0.5)


@dataclass(frozen=True)
class AdamWTensors:
    """Contiguous float32 tensors of the same shapes, on one device."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    moments1: Sequence[Tensor]
    moments2: Sequence[Tensor]
    copies: Sequence[Tensor | None]
    """Copies of the weights in bfloat16, where there are any."""


class BlockTable:
    """Blocks of elements of tensors, one per program."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        num_blocks = torch.tensor([triton.cdiv(tensor.numel(), BLOCK) for tensor in tensors], dtype=torch.int64)
        tensor_number = torch.arange(len(tensors)).repeat_interleave(num_blocks)
        first_block = num_blocks.cumsum(0) - num_blocks
        block_number = torch.arange(len(tensor_number)) - first_block[tensor_number]
        self.num_blocks = len(tensor_number)
        pairs = torch.stack((tensor_number, block_number), dim=1).to(torch.int32)
        self.on_device = accelerator(tensors[0].device).take(pairs)
        """Number of the tensor, and of the block within it: int32 `[num_blocks, 2]`."""


def update(tensors: AdamWTensors, blocks: BlockTable, factors: AdamWFactors, gradient_factor: Tensor | None) -> None:
    """Update weights and moments in place from the gradients times `gradient_factor`, a float scalar on their device,
    if given; then write the narrow copies. `blocks`: table of the weights. The host does not wait."""
    if not blocks.num_blocks:
        return
    device = tensors.weights[0].device
    operands = (tensors.weights, tensors.gradients, tensors.moments1, tensors.moments2, tensors.copies)
    addresses = [addresses_of(operand) for operand in operands]
    sizes = [weight.numel() for weight in tensors.weights]
    table = accelerator(device).take(torch.tensor([*addresses, sizes], dtype=torch.int64).T.contiguous())
    is_aligned = not any(address % _ALIGNMENT for column in addresses for address in column)
    with launching_on(device):
        update_weights[blocks.num_blocks,](
            table, blocks.on_device, table if gradient_factor is None else gradient_factor, factors.decay,
            factors.beta1, factors.beta2, factors.eps, factors.step_size, factors.denominator_factor,
            HAS_FACTOR=gradient_factor is not None, ALIGNMENT=_ALIGNMENT if is_aligned else 1, FIELDS=_FIELDS,
            BLOCK=BLOCK,
        )  # fmt: skip


def addresses_of(tensors: Iterable[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@triton.jit
def update_weights(
    table_ptr, block_ptr, factor_ptr, decay, beta1, beta2, eps, step_size, denominator_factor,
    HAS_FACTOR: tl.constexpr, ALIGNMENT: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor. Reads and writes weights and moments once, reads gradients once, and writes narrow
    copies once."""
    pair = block_ptr + 2 * tl.program_id(0).to(tl.int64)
    fields = table_ptr + tl.load(pair) * FIELDS
    first = tl.load(pair + 1).to(tl.int64) * BLOCK
    num_elements = tl.load(fields + 5)
    factor = 1.0
    if HAS_FACTOR:
        factor = tl.load(factor_ptr).to(tl.float32)
    if first + BLOCK <= num_elements:  # without a mask, so that threads load and store several elements at a time
        _update_block(
            fields, first, num_elements, factor, decay, beta1, beta2, eps, step_size, denominator_factor, ALIGNMENT,
            MASKS=False, BLOCK=BLOCK,
        )  # fmt: skip
    else:
        _update_block(
            fields, first, num_elements, factor, decay, beta1, beta2, eps, step_size, denominator_factor, ALIGNMENT,
            MASKS=True, BLOCK=BLOCK,
        )  # fmt: skip


@triton.jit
def _update_block(
    fields, first, num_elements, factor, decay, beta1, beta2, eps, step_size, denominator_factor,
    ALIGNMENT: tl.constexpr, MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    element = first + tl.arange(0, BLOCK)
    mask = element < num_elements if MASKS else None
    weights = _pointer(fields, tl.float32, ALIGNMENT) + element
    moments1 = _pointer(fields + 2, tl.float32, ALIGNMENT) + element
    moments2 = _pointer(fields + 3, tl.float32, ALIGNMENT) + element
    gradient = tl.load(_pointer(fields + 1, tl.float32, ALIGNMENT) + element, mask=mask) * factor
    moment1 = beta1 * tl.load(moments1, mask=mask) + (1 - beta1) * gradient
    moment2 = beta2 * tl.load(moments2, mask=mask) + (1 - beta2) * gradient * gradient
    update = tl.div_rn(step_size * moment1, tl.sqrt_rn(moment2) * denominator_factor + eps)
    weight = tl.load(weights, mask=mask) * decay - update
    tl.store(weights, weight, mask=mask)
    tl.store(moments1, moment1, mask=mask)
    tl.store(moments2, moment2, mask=mask)
    if tl.load(fields + 4) != 0:
        tl.store(_pointer(fields + 4, tl.bfloat16, ALIGNMENT) + element, weight.to(tl.bfloat16), mask=mask)


@triton.jit
def _pointer(field, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointer to elements of `dtype`, at the address in a field of the table, a multiple of `ALIGNMENT`."""
    return tl.multiple_of(tl.load(field).to(tl.pointer_type(dtype)), ALIGNMENT)
