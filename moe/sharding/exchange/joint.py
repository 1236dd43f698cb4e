"""Several exchanges of the same kind along the same axis as one collective on the concatenated parts."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe.sharding.exchange.exchange import as_bytes, pad_end
from moe.sharding.exchange.mesh import Mesh
from moe.sharding.placement import Combine

PendingParts = Callable[[], list[Tensor]]
"""A collective that has started. It is called once, waits, and returns all results."""


def begin_all_reduces(mesh: Mesh, parts: Sequence[Tensor], axis: int, combine: Combine) -> PendingParts:
    """Start all-reduces of partial results."""
    byte_parts, waits = [as_bytes(part.contiguous()) for part in parts], []
    for numbers in _by_dtype(byte_parts):
        flat = torch.cat([byte_parts[number].reshape(-1) for number in numbers])
        waits.append((numbers, mesh.begin_all_reduce(flat, axis, combine, in_place=True)))
    shapes, dtypes = [part.shape for part in parts], [part.dtype for part in parts]

    def wait() -> list[Tensor]:
        wholes: dict[int, Tensor] = {}
        for numbers, total in waits:
            chunks = total().split([shapes[number].numel() for number in numbers])
            for number, flat in zip(numbers, chunks, strict=True):
                wholes[number] = flat.view(dtypes[number]).view(shapes[number])
        return [wholes[number] for number in range(len(shapes))]

    return wait


def begin_reduce_scatters(
    mesh: Mesh, parts: Sequence[Tensor], axis: int, dims: Sequence[int], sizes: Sequence[int]
) -> PendingParts:
    """Start reduce-scatters: this rank's parts, with sizes `sizes` in `dims`, of the sums of partial results."""
    degree = mesh.degrees[axis]
    rows = [
        pad_end(part, dim, degree * size).movedim(dim, 0) for part, dim, size in zip(parts, dims, sizes, strict=True)
    ]
    waits = []
    for numbers in _by_dtype(rows):
        flat = torch.cat([rows[number].reshape(degree, rows[number].numel() // degree) for number in numbers], 1)
        waits.append((numbers, mesh.begin_reduce_scatter(flat, axis)))
    shapes = [(size, *tensor.shape[1:]) for size, tensor in zip(sizes, rows, strict=True)]
    del rows

    def wait() -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for numbers, finish_scatter in waits:
            chunks = finish_scatter().view(-1).split([torch.Size(shapes[number]).numel() for number in numbers])
            for number, flat in zip(numbers, chunks, strict=True):
                results[number] = flat.view(shapes[number]).movedim(0, dims[number])
        return [results[number] for number in range(len(shapes))]

    return wait


def begin_gathers(
    mesh: Mesh, parts: Sequence[Tensor], axis: int, dims: Sequence[int], sizes: Sequence[int]
) -> PendingParts:
    """Start gathers: the whole tensors along an axis, with sizes `sizes` in `dims`, from parts of any dtypes."""
    degree = mesh.degrees[axis]
    rows = [part.movedim(dim, 0).contiguous() for part, dim in zip(parts, dims, strict=True)]
    # with the widest dtype first, every tensor begins at a multiple of its item size
    widths = [tensor.element_size() for tensor in rows]
    order = sorted(range(len(rows)), key=lambda number: -widths[number])
    flat = torch.cat([_bytes(rows[number]) for number in order])
    ends = list(itertools.accumulate(rows[number].nbytes for number in order))
    shapes, dtypes = [tensor.shape for tensor in rows], [tensor.dtype for tensor in rows]
    finish_gather = mesh.begin_all_gather(flat, axis)
    del rows, flat

    def wait() -> list[Tensor]:
        gathered_rows, full_tensors = finish_gather().view(degree, ends[-1]), dict[int, Tensor]()
        for number, begin, end in zip(order, [0, *ends], ends, strict=False):
            full_tensor = gathered_rows[:, begin:end].clone(memory_format=torch.contiguous_format).view(-1)
            shape = (degree * shapes[number][0], *shapes[number][1:])
            full_tensor = full_tensor.view(dtypes[number]).view(shape)
            full_tensors[number] = full_tensor[: sizes[number]].movedim(0, dims[number])
        return [full_tensors[number] for number in range(len(shapes))]

    return wait


def finish(pending: PendingParts) -> list[Tensor]:
    """Wait for a collective that has started, and return its results."""
    return pending()


def _bytes(rows: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes. A dimension of size 1 may have any stride, with which `view`
    fails."""
    return rows.as_strided((rows.numel(),), (1,)).view(torch.uint8)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of tensors, grouped by dtype, in the order of the first tensor of each dtype."""
    numbers_by_dtype: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        numbers_by_dtype.setdefault(tensor.dtype, []).append(number)
    return list(numbers_by_dtype.values())
