"""Several exchanges of the same kind along the same axis as one collective: the parts laid end to end."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe.sharding.exchange.exchange import as_bytes, padded
from moe.sharding.exchange.mesh import Mesh
from moe.sharding.placement import Combine

PendingParts = Callable[[], list[Tensor]]
"""A collective that was begun: called once, it waits for all that comes of it."""


def begin_all_reduces(mesh: Mesh, parts: Sequence[Tensor], axis: int, combine: Combine) -> PendingParts:
    """The wholes of partial results."""
    given, waits = [as_bytes(part.contiguous()) for part in parts], []
    for numbers in _by_dtype(given):
        flat = torch.cat([given[number].reshape(-1) for number in numbers])
        waits.append((numbers, mesh.begin_all_reduce(flat, axis, combine, in_place=True)))
    shapes, dtypes = [part.shape for part in parts], [part.dtype for part in parts]

    def wait() -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for numbers, total in waits:
            each = total().split([shapes[number].numel() for number in numbers])
            for number, flat in zip(numbers, each, strict=True):
                found[number] = flat.view(dtypes[number]).view(shapes[number])
        return [found[number] for number in range(len(shapes))]

    return wait


def begin_reduce_scatters(
    mesh: Mesh, parts: Sequence[Tensor], axis: int, dims: Sequence[int], sizes: Sequence[int]
) -> PendingParts:
    """This rank's parts, `sizes` long in `dims`, of the sums of partial results."""
    degree = mesh.degrees[axis]
    rows = [
        padded(part, dim, degree * size).movedim(dim, 0)
        for part, dim, size in zip(parts, dims, sizes, strict=True)
    ]
    waits = []
    for numbers in _by_dtype(rows):
        flat = torch.cat(
            [rows[number].reshape(degree, rows[number].numel() // degree) for number in numbers], 1
        )
        waits.append((numbers, mesh.begin_reduce_scatter(flat, axis)))
    shapes = [(size, *each.shape[1:]) for size, each in zip(sizes, rows, strict=True)]
    del rows

    def wait() -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for numbers, mine in waits:
            each = mine().view(-1).split([torch.Size(shapes[number]).numel() for number in numbers])
            for number, flat in zip(numbers, each, strict=True):
                found[number] = flat.view(shapes[number]).movedim(0, dims[number])
        return [found[number] for number in range(len(shapes))]

    return wait


def begin_gathers(
    mesh: Mesh, parts: Sequence[Tensor], axis: int, dims: Sequence[int], sizes: Sequence[int]
) -> PendingParts:
    """The wholes along an axis, `sizes` long in `dims`, of parts that split them. Parts of any dtypes."""
    degree = mesh.degrees[axis]
    rows = [part.movedim(dim, 0).contiguous() for part, dim in zip(parts, dims, strict=True)]
    # Numbers begin at multiples of their width if the wide ones come first.
    widths = [each.element_size() for each in rows]
    order = sorted(range(len(rows)), key=lambda number: -widths[number])
    flat = torch.cat([_bytes(rows[number]) for number in order])
    ends = list(itertools.accumulate(rows[number].nbytes for number in order))
    shapes, dtypes = [each.shape for each in rows], [each.dtype for each in rows]
    every = mesh.begin_all_gather(flat, axis)
    del rows, flat

    def wait() -> list[Tensor]:
        gathered, found = every().view(degree, ends[-1]), dict[int, Tensor]()
        for number, first, end in zip(order, [0, *ends], ends, strict=False):
            whole = gathered[:, first:end].clone(memory_format=torch.contiguous_format).view(-1)
            shape = (degree * shapes[number][0], *shapes[number][1:])
            whole = whole.view(dtypes[number]).view(shape)
            found[number] = whole[: sizes[number]].movedim(0, dims[number])
        return [found[number] for number in range(len(shapes))]

    return wait


def finish(pending: PendingParts) -> list[Tensor]:
    """What comes of a collective that was begun."""
    return pending()


def _bytes(rows: Tensor) -> Tensor:
    """The memory of a contiguous tensor. The stride of a dimension of size 1 may be anything, and no view has that."""
    return rows.as_strided((rows.numel(),), (1,)).view(torch.uint8)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of tensors of one dtype each, in the order of the first ones."""
    found: dict[torch.dtype, list[int]] = {}
    for number, each in enumerate(tensors):
        found.setdefault(each.dtype, []).append(number)
    return list(found.values())
