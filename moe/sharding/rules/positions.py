"""Functions that programs call to read and write at positions that may be in another rank's part."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int, int]
"""(first position of a part, its length without padding, size of the whole dimension)."""

Spans = Sequence[tuple[int, Span]]
"""(dimension, span) of split dimensions."""


def within(index: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """(positions within the part, or 0; whether they are in the part) for positions in the whole dimension, which count
    from its end if they are negative."""
    first, count, size = span
    at = torch.where(index < 0, index + size, index) - first
    is_local = (at >= 0) & (at < count)
    return torch.where(is_local, at, 0), is_local


def zeros_elsewhere(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def gather(part: Tensor, dim: int, index: Tensor, span: Span) -> Tensor:
    """`torch.gather`, with zeros for positions in other parts."""
    at, is_local = within(index, span)
    return zeros_elsewhere(part.gather(dim, at), is_local)


def embedding(part: Tensor, index: Tensor, span: Span) -> Tensor:
    """Rows of a table, with zeros for rows in other parts."""
    at, is_local = within(index, span)
    return zeros_elsewhere(torch.ops.aten.embedding.default(part, at), is_local[..., None])


def select(part: Tensor, dim: int, index: Tensor, span: Span) -> Tensor:
    """`torch.index_select`, with zeros for positions in other parts."""
    at, is_local = within(index, span)
    return zeros_elsewhere(part.index_select(dim, at), is_local.reshape(-1, *[1] * (part.dim() - dim - 1)))


def index(part: Tensor, indices: Sequence[Tensor | None], spans: Spans, behind: int) -> Tensor:
    """`part[indices]`, with zeros for positions in other parts. `behind` dimensions of the result come after those of
    the indices."""
    local, is_local = list(indices), torch.ones((), dtype=torch.bool, device=part.device)
    for dim, span in spans:
        dim_index = indices[dim]
        assert dim_index is not None
        local[dim], lies = within(dim_index, span)
        is_local = is_local & lies
    values = torch.ops.aten.index.Tensor(part, local)
    return zeros_elsewhere(values, is_local.reshape(*is_local.shape, *[1] * behind))


def _with_spare(part: Tensor, dims: Sequence[int]) -> Tensor:
    """The part with a further position at the end of some dimensions, for writes to other parts."""
    behind = [pad for dim in reversed(range(part.dim())) for pad in (0, int(dim in dims))]
    return torch.nn.functional.pad(part, behind)


def _or_spare(index: Tensor, span: Span, spare: int) -> Tensor:
    at, is_local = within(index, span)
    return torch.where(is_local, at, spare)


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
    new = operator(_with_spare(part, [dim for dim, _ in spans]), local, values, accumulate)
    for dim, _ in spans:
        new = new.narrow(dim, 0, part.shape[dim])
    return new


def embedding_gradient(
    gradient: Tensor, index: Tensor, span: Span, rows: int, padding_row: int, by_frequency: bool
) -> Tensor:
    """Gradient of a part, with `rows` rows, of a table of embeddings; zero for row `padding_row` of the whole table."""
    at, is_local = within(index, span)
    local = torch.where(is_local & (index != padding_row), at, rows)
    return torch.ops.aten.embedding_dense_backward(gradient, local, rows + 1, rows, by_frequency)[:rows]
