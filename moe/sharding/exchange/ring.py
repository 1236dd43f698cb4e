"""Matrix products of two split operands that are too large to gather. The parts of one operand are passed round a ring
of ranks; each part is sent on while it is multiplied (Cannon's algorithm; GShard, arXiv 2006.16668, section 3.3)."""

from typing import Literal

import torch
from torch import Tensor

from moe.sharding.exchange.mesh import Mesh


def ring_product(
    mesh: Mesh, first: Tensor, second: Tensor, axis: int, ring_operand: Literal["first", "second"], size: int
) -> Tensor:
    """`first @ second` of matrices, or of batches of matrices. Each rank has some rows of the first and some columns of
    the second operand. If the second operand is passed round, the result is this rank's rows with all columns; if the
    first one is, this rank's columns with all rows.

    `size` is the whole number of rows or columns that are passed round, with or without padding. A part is sent on
    before it is multiplied.
    """
    degree, index = mesh.degrees[axis], mesh.indices[axis]
    rows, columns = first.shape[-2], second.shape[-1]
    dim, length = (-2, rows) if ring_operand == "first" else (-1, columns)
    shape = (size, columns) if ring_operand == "first" else (rows, size)
    result = first.new_empty(*first.shape[:-2], *shape)
    part = (first if ring_operand == "first" else second).contiguous()
    for step in range(degree):
        arriving = mesh.permute(part, axis, 1) if step < degree - 1 else None
        begin = (index + step) % degree * length
        count = min(length, size - begin)
        if count > 0:
            valid_part = part.narrow(dim, 0, count)
            pair = (valid_part, second) if ring_operand == "first" else (first, valid_part)
            torch.matmul(*pair, out=result.narrow(dim, begin, count))
        if arriving is not None:
            part = arriving()
    return result
