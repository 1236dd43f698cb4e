"""AdamW step for all parameters in one launch, with gradient clipping and narrow copies."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import launching_on
from moe.parallel.accelerator import accelerator

BLOCK = 1024
"""Elements per program."""
NUM_FIELDS = 7
"""Fields per tensor in the pointer table: addresses of weights, gradient, both moments and narrow copy; number of
elements; whether all addresses are aligned."""
_ALIGNMENT = 16
"""Alignment in bytes of a vectorized load or store."""


@dataclass(frozen=True)
class AdamWFactors:
    """Factors of one update (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2), computed in
    float64: in a kernel's float32, 1 - beta would lose digits."""

    decay: float
    """Factor of the weights: 1 - lr · weight_decay."""
    gradient_weight1: float
    """1 - beta1"""
    gradient_weight2: float
    """1 - beta2"""
    eps: float
    step_size: float
    """lr / bias correction of the first moment."""
    denominator_factor: float
    """1 / root of the bias correction of the second moment."""

    @classmethod
    def of_step(
        cls, step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
    ) -> "AdamWFactors":
        """Factors of update `step`, counted from 1."""
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        return cls(1 - lr * weight_decay, 1 - beta1, 1 - beta2, eps, lr / correction1, correction2**-0.5)


@dataclass(frozen=True)
class AdamWTensors:
    """Operands of an update: contiguous float32 tensors on one device, matched by index."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    moments1: Sequence[Tensor]
    moments2: Sequence[Tensor]
    narrow_copies: Sequence[Tensor | None]
    """bfloat16 copies of the weights; None where a weight has none."""


class BlockTable:
    """Maps each program to a tensor and a block of it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        num_blocks = torch.tensor([triton.cdiv(tensor.numel(), BLOCK) for tensor in tensors], device="cpu")
        tensor_number = torch.arange(len(tensors), device="cpu").repeat_interleave(num_blocks)
        first_block = num_blocks.cumsum(0) - num_blocks
        block_number = torch.arange(len(tensor_number), device="cpu") - first_block[tensor_number]
        self.num_blocks = len(tensor_number)
        pairs = torch.stack((tensor_number, block_number), dim=1).to(torch.int32)
        self.tensor_and_block = accelerator(tensors[0].device).take(pairs)
        """int32 `[num_blocks, 2]`, on the device."""


def launch_adamw(
    tensors: AdamWTensors,
    blocks: BlockTable,
    factors: AdamWFactors,
    gradient_factor: Tensor | None,
    found_inf: Tensor | None = None,
) -> None:
    """Update weights and moments in place and write the narrow copies, without a host wait. Gradients are multiplied by
    `gradient_factor` (float scalar on the device; None: 1). Nothing is written if `found_inf` (float32 scalar on the
    device) is 1. `blocks`: table of the weights."""
    if not blocks.num_blocks:
        return
    device = tensors.weights[0].device
    operands = (tensors.weights, tensors.gradients, tensors.moments1, tensors.moments2, tensors.narrow_copies)
    rows = []
    for addresses, weight in zip(zip(*map(addresses_of, operands), strict=True), tensors.weights, strict=True):
        rows.append((*addresses, weight.numel(), not any(address % _ALIGNMENT for address in addresses)))
    table = accelerator(device).take(torch.tensor(rows, dtype=torch.int64, device="cpu"))
    with launching_on(device):
        adamw_kernel[blocks.num_blocks,](
            table, blocks.tensor_and_block, table if gradient_factor is None else gradient_factor,
            table if found_inf is None else found_inf, *astuple(factors), HAS_FACTOR=gradient_factor is not None,
            MAY_SKIP=found_inf is not None, ALIGNMENT=_ALIGNMENT, FIELDS=NUM_FIELDS, BLOCK=BLOCK,
        )  # fmt: skip


def addresses_of(tensors: Iterable[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@triton.jit
def adamw_kernel(
    table_ptr, block_ptr, factor_ptr, found_inf_ptr, decay, gradient_weight1, gradient_weight2, eps, step_size,
    denominator_factor, HAS_FACTOR: tl.constexpr, MAY_SKIP: tl.constexpr, ALIGNMENT: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block. Reads weights, moments and gradients once; writes weights, moments and narrow copies once."""
    pair = block_ptr + 2 * tl.program_id(0).to(tl.int64)
    fields = table_ptr + tl.load(pair) * FIELDS
    first = tl.load(pair + 1).to(tl.int64) * BLOCK
    num_elements = tl.load(fields + 5)
    if MAY_SKIP:
        num_elements = tl.where(tl.load(found_inf_ptr) != 0, 0, num_elements)  # masks all
    is_aligned = tl.load(fields + 6) != 0
    factor = 1.0
    if HAS_FACTOR:
        factor = tl.load(factor_ptr).to(tl.float32)
    if (first + BLOCK <= num_elements) & is_aligned:  # no mask, so that accesses are vectorized
        _update_block(
            fields, first, num_elements, factor, decay, gradient_weight1, gradient_weight2, eps, step_size,
            denominator_factor, ALIGNMENT, MASKS=False, BLOCK=BLOCK,
        )  # fmt: skip
    else:
        _update_block(
            fields, first, num_elements, factor, decay, gradient_weight1, gradient_weight2, eps, step_size,
            denominator_factor, 1, MASKS=True, BLOCK=BLOCK,
        )  # fmt: skip


@triton.jit
def _update_block(
    fields, first, num_elements, factor, decay, gradient_weight1, gradient_weight2, eps, step_size,
    denominator_factor, ALIGNMENT: tl.constexpr, MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    element = first + tl.arange(0, BLOCK)
    mask = element < num_elements if MASKS else None
    weights = _pointer(fields, tl.float32, ALIGNMENT) + element
    moments1 = _pointer(fields + 2, tl.float32, ALIGNMENT) + element
    moments2 = _pointer(fields + 3, tl.float32, ALIGNMENT) + element
    gradient = tl.load(_pointer(fields + 1, tl.float32, ALIGNMENT) + element, mask=mask) * factor
    moment1, moment2 = tl.load(moments1, mask=mask), tl.load(moments2, mask=mask)
    moment1 += gradient_weight1 * (gradient - moment1)
    moment2 += gradient_weight2 * (gradient * gradient - moment2)
    update = tl.div_rn(step_size * moment1, tl.sqrt_rn(moment2) * denominator_factor + eps)
    weight = tl.load(weights, mask=mask) * decay - update
    tl.store(weights, weight, mask=mask)
    tl.store(moments1, moment1, mask=mask)
    tl.store(moments2, moment2, mask=mask)
    if tl.load(fields + 4) != 0:
        tl.store(_pointer(fields + 4, tl.bfloat16, ALIGNMENT) + element, weight.to(tl.bfloat16), mask=mask)


@triton.jit
def _pointer(field, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointer to elements of `dtype` at the address in a field of the table, a multiple of `ALIGNMENT`."""
    return tl.multiple_of(tl.load(field).to(tl.pointer_type(dtype)), ALIGNMENT)
