"""Functions that programs call to read and write at positions that may be in another rank's part."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int, int]
"""(first position of a part, its length without padding, size of the whole dimension)."""

Spans = Sequence[tuple[int, Span]]
"""(dimension, span) of split dimensions."""


def local_positions(index: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """(positions within the part, or 0; whether they are in the part) for positions in the full dimension, of which
    negative ones count from its end."""
    first, count, size = span
    position = torch.where(index < 0, index + size, index) - first
    is_local = (position >= 0) & (position < count)
    return torch.where(is_local, position, 0), is_local


def zeros_elsewhere(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def gather(part: Tensor, dim: int, index: Tensor, span: Span) -> Tensor:
    """`torch.gather`, with zeros for positions in other parts."""
    position, is_local = local_positions(index, span)
    return zeros_elsewhere(part.gather(dim, position), is_local)


def embedding(part: Tensor, index: Tensor, span: Span) -> Tensor:
    """Rows of a table, with zeros for rows in other parts."""
    position, is_local = local_positions(index, span)
    return zeros_elsewhere(torch.ops.aten.embedding.default(part, position), is_local[..., None])


def select(part: Tensor, dim: int, index: Tensor, span: Span) -> Tensor:
    """`torch.index_select`, with zeros for positions in other parts."""
    position, is_local = local_positions(index, span)
    return zeros_elsewhere(part.index_select(dim, position), is_local.reshape(-1, *[1] * (part.dim() - dim - 1)))


def index(part: Tensor, indices: Sequence[Tensor | None], spans: Spans, num_trailing_dims: int) -> Tensor:
    """`part[indices]`, with zeros for positions in other parts. `num_trailing_dims` dimensions of the result follow
    those of the indices."""
    local, is_local = list(indices), torch.ones((), dtype=torch.bool, device=part.device)
    for dim, span in spans:
        dim_index = indices[dim]
        assert dim_index is not None
        local[dim], is_dim_local = local_positions(dim_index, span)
        is_local = is_local & is_dim_local
    values = torch.ops.aten.index.Tensor(part, local)
    return zeros_elsewhere(values, is_local.reshape(*is_local.shape, *[1] * num_trailing_dims))


def _with_spare(part: Tensor, dims: Sequence[int]) -> Tensor:
    """The part with a further position at the end of some dimensions, for writes to other parts."""
    pads = [pad for dim in reversed(range(part.dim())) for pad in (0, int(dim in dims))]
    return torch.nn.functional.pad(part, pads)


def _or_spare(index: Tensor, span: Span, spare: int) -> Tensor:
    position, is_local = local_positions(index, span)
    return torch.where(is_local, position, spare)


def write(operator: Any, part: Tensor, dim: int, index: Tensor, span: Span, *values: Any, **options: Any) -> Tensor:
    """`operator(part, dim, index, *values)` without the writes to other parts."""
    size = part.shape[dim]
    local = _or_spare(index, span, size)
    return operator(_with_spare(part, [dim]), dim, local, *values, **options).narrow(dim, 0, size)


def index_put(
    operator: Any, part: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool, spans: Spans
) -> Tensor:
    """`operator(part, indices, values, accumulate)` without the writes to other parts."""
    local = list(indices)
    for dim, span in spans:
        dim_index = indices[dim]
        assert dim_index is not None
        local[dim] = _or_spare(dim_index, span, part.shape[dim])
    result = operator(_with_spare(part, [dim for dim, _ in spans]), local, values, accumulate)
    for dim, _ in spans:
        result = result.narrow(dim, 0, part.shape[dim])
    return result


def embedding_gradient(
    gradient: Tensor, index: Tensor, span: Span, rows: int, padding_row: int, by_frequency: bool
) -> Tensor:
    """Gradient of a part, with `rows` rows, of a table of embeddings; zero for row `padding_row` of the whole table."""
    position, is_local = local_positions(index, span)
    local = torch.where(is_local & (index != padding_row), position, rows)
    return torch.ops.aten.embedding_dense_backward(gradient, local, rows + 1, rows, by_frequency)[:rows]
