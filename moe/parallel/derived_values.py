"""Initial values of parameters that are derived from others: rows of a table, or norms of a matrix's rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe.parallel.quantized import QuantizedWeight, QuantScheme, quantize
from moe.spec.parameter import Derivation, Slices

_VALUES_AT_ONCE = 1 << 22
"""Values of a source that are read at a time."""


def derived_values(
    derivation: Derivation, read: Callable[[Slices], Tensor], first: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Values of a part, of this shape from `first` on, of a parameter that is derived from others, whose rectangles
    `read` returns; norms of quantized matrices are those of their dequantized values."""
    source = derivation.source
    if derivation.rows is not None:
        columns = (first[1], first[1] + shape[1])
        rows = derivation.rows[first[0] : first[0] + shape[0]]
        return torch.cat([read(((row, row + 1), columns)) for row in rows]) if rows else torch.empty(tuple(shape))
    scheme, step = QuantScheme.from_parameter(source), max(1, _VALUES_AT_ONCE // source.shape[1])
    norms = []
    for begin in range(first[0], first[0] + shape[0], step):
        bounds = (begin, min(begin + step, first[0] + shape[0]))
        region: Slices = (bounds, (0, source.shape[1]))
        if scheme is None:
            block = read(region)
        else:
            codes_region = scheme.codes_of(region, of_scales=False)
            block_region = scheme.values_of(codes_region, of_scales=False)
            codes, scales = quantize(read(block_region), scheme)
            length = block_region[scheme.dim][1] - block_region[scheme.dim][0]
            weight = QuantizedWeight(codes, scales, replace(scheme, length=length)).dequantize(torch.float32)
            low = block_region[0][0]
            block = weight[bounds[0] - low : bounds[1] - low]
        wide = torch.promote_types(block.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(block.to(wide), dim=1))
    return torch.cat(norms) if norms else torch.empty(tuple(shape))
