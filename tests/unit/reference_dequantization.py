"""A plain reading of the values that quantized forms keep of a matrix, block by block."""

import torch
from torch import Tensor

from moe.spec.parameter import Form

BLOCK = 64
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""QLoRA, arXiv 2305.14314, appendix E."""
_VALUES = torch.tensor(NF4)
_MIDDLES = (_VALUES[1:] + _VALUES[:-1]) / 2


def through_codes(values: Tensor, form: Form, dim: int) -> Tensor:
    """The matrix in float32 after quantization, with blocks along `dim`."""
    if form == "bfloat16":
        return values.float().bfloat16().float()
    parts = []
    for block in values.float().split(BLOCK, dim):
        largest = block.abs().amax(dim, keepdim=True)
        scale = largest / 127 if form == "int8" else largest
        over = torch.where(largest > 0, block / scale, 0.0)
        if form == "int8":
            codes = over.round()
        else:  # the number of midpoints below a value is the index of its nearest entry
            codes = _VALUES[(over.unsqueeze(-1) > _MIDDLES).sum(-1)]
        parts.append(codes * scale)
    return torch.cat(parts, dim)
