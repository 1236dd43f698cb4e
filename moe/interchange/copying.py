"""Parts of tensors copied between their layout and ours, a bounded block at a time."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moe.interchange.pieces import IN_NAME, Box, ParameterPiece, Side, split
from moe.spec.parameter import Slices

BLOCK_ELEMENTS = 1 << 21
"""Elements of one copy: a block is decoded or converted in memory as a whole."""


def view(tensor: Tensor, origin: Sequence[int], side: Side, box: Box, axes: Sequence[str]) -> Tensor:
    """A box of a piece in memory that holds a rectangle of its tensor from `origin` on: its axes in order, without
    those of one."""
    first = side.bounds(box)
    offset = tensor.storage_offset() + sum(
        (low - begin) * stride for (low, _), begin, stride in zip(first, origin, tensor.stride(), strict=True)
    )
    long = [axis for axis in axes if box[axis][1] - box[axis][0] != 1]
    sizes = [box[axis][1] - box[axis][0] for axis in long]
    return tensor.as_strided(sizes, side.strides(long, tensor.stride()), offset)


def copy(into: Tensor, source: Tensor) -> None:
    """Copy one view to another of any strides and dtype. The narrower dtype is transposed: to transpose and convert at
    once takes twice as long."""
    if into.dtype != source.dtype and not source.is_contiguous():
        source = source.contiguous() if source.itemsize <= into.itemsize else source.to(into.dtype)
    into.copy_(source)


def fill_ours(
    local: Tensor,
    origin: Sequence[int],
    pieces: Sequence[ParameterPiece],
    read: Callable[[str, Slices], Tensor],
    check: Callable[[str, Tensor], None],
) -> None:
    """Fill a rectangle of a parameter, which begins at `origin`, from what `read` returns of their tensors. Each block
    is checked, with the name of its tensor."""
    within = tuple((low, low + size) for low, size in zip(origin, local.shape, strict=True))
    for piece in pieces:
        for part in piece.our_side.boxes(within):
            for name, box in piece.by_tensor(part):
                for block in split(box, piece.their_side, BLOCK_ELEMENTS):
                    bounds = piece.their_side.bounds(block)
                    their_tensor = read(name, bounds)
                    check(name, their_tensor)
                    source = view(their_tensor, [low for low, _ in bounds], piece.their_side, block, piece.axes)
                    into = view(local, origin, piece.our_side, block, piece.axes)
                    copy(into, source)
                    if piece.factor != 1:
                        into.mul_(piece.factor)


def skip_check(name: str, block: Tensor) -> None:
    """A check of `fill_ours` that finds nothing."""


MadeOf = Sequence[tuple[str, ParameterPiece, int]]
"""(our name, piece, expert of the tensor's name) of each parameter that one of their tensors is made of."""


def fill_theirs(
    block: Tensor, within: Slices, made_of: MadeOf, read: Callable[[str, Slices, torch.dtype], Tensor]
) -> None:
    """Fill a rectangle of one of their tensors from what `read` returns of our parameters."""
    origin = [low for low, _ in within]
    for name, piece, box in _boxes(within, made_of):
        bounds = piece.our_side.bounds(box)
        source = view(read(name, bounds, block.dtype), [low for low, _ in bounds], piece.our_side, box, piece.axes)
        copy(view(block, origin, piece.their_side, box, piece.axes), source)


def reads_of(within: Slices, made_of: MadeOf) -> Iterator[tuple[str, Slices]]:
    """Reads of `fill_theirs`, in its order."""
    for name, piece, box in _boxes(within, made_of):
        yield name, piece.our_side.bounds(box)


def _boxes(within: Slices, made_of: MadeOf) -> Iterator[tuple[str, ParameterPiece, Box]]:
    for name, piece, expert in made_of:
        for box in piece.their_side.boxes(within):
            yield name, piece, {**box, IN_NAME: (expert, expert + 1)} if piece.counts_tensors else box
