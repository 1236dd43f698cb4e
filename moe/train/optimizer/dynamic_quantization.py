"""Dynamic 8-bit quantization (arXiv 1511.04561) of blocks with a scale each (arXiv 2110.02861).

A code stands for a value between -1 and 1 (0 and 1 if unsigned), with as many digits as its exponent leaves bits:
powers of ten from 10^-6 on, the largest split most finely. Codes are those of bitsandbytes and torchao, with one
difference: positive values are never rounded to 0, which as a second moment would make an update many times too large.
"""

from functools import cache

import torch
from torch import Tensor

MIN_SCALE = 1e-12
_NUM_EXPONENTS = 7


@cache
def code_values(signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[256]`: value of each code, ascending."""
    values = [torch.tensor([0.0, 1.0])]
    for exponent in range(_NUM_EXPONENTS):
        bounds = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        fractions = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (exponent - _NUM_EXPONENTS + 1)
        values += [fractions, -fractions] if signed else [fractions]
    return torch.cat(values).sort().values.to(device, dtype)


def quantize(values: Tensor, *, signed: bool) -> Tensor:
    """uint8 codes of scaled values, each the nearest (the larger of two), but of positive values at least the smallest
    positive one if unsigned."""
    table = code_values(signed, values.dtype, values.device)
    codes = (torch.searchsorted(table, values.contiguous(), right=True, out_int32=True) - 1).clamp_(min=0)
    below, above = table[codes], table[(codes + 1).clamp_(max=len(table) - 1)]
    codes += values - below >= (above - below) * 0.5
    codes.clamp_(max=len(table) - 1)
    if not signed:
        codes.masked_fill_((codes == 0) & (values > 0), 1)
    return codes.to(torch.uint8)


def dequantize(codes: Tensor, dtype: torch.dtype, *, signed: bool) -> Tensor:
    """Scaled values of uint8 codes."""
    return code_values(signed, dtype, codes.device)[codes.int()]
