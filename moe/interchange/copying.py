"""Parts of tensors copied between their layout and ours, a bounded block at a time."""

from collections.abc import Callable, Sequence

from torch import Tensor

from moe.interchange.pieces import Box, Piece, Side, Slices, split

BLOCK_ELEMENTS = 1 << 21
"""Of one copy: what is decoded or converted on the way lies in memory as a whole."""


def view(tensor: Tensor, origin: Sequence[int], side: Side, box: Box, axes: Sequence[str]) -> Tensor:
    """A box of a piece in memory that holds a rectangle of its tensor from `origin` on, its axes in order."""
    first = side.bounds(box)
    offset = tensor.storage_offset() + sum(
        (low - begin) * stride for (low, _), begin, stride in zip(first, origin, tensor.stride(), strict=True)
    )
    sizes = [box[axis][1] - box[axis][0] for axis in axes]
    return tensor.as_strided(sizes, side.strides(axes, tensor.stride()), offset)


def fill_ours(
    local: Tensor,
    origin: Sequence[int],
    pieces: Sequence[Piece],
    read: Callable[[str, Slices], Tensor],
    check: Callable[[str, Tensor], None],
) -> None:
    """Fill a rectangle of a parameter, which begins at `origin`, of what `read` gives of their tensors; each block is
    checked, with the tensor that it comes from."""
    within = tuple((low, low + size) for low, size in zip(origin, local.shape, strict=True))
    for piece in pieces:
        for part in piece.ours.boxes(within):
            for name, box in piece.by_tensor(part):
                for block in split(box, piece.theirs, BLOCK_ELEMENTS):
                    bounds = piece.theirs.bounds(block)
                    theirs = read(name, bounds)
                    check(name, theirs)
                    source = view(theirs, [low for low, _ in bounds], piece.theirs, block, piece.axes)
                    view(local, origin, piece.ours, block, piece.axes).copy_(source)


def fill_theirs(
    block: Tensor,
    within: Slices,
    pieces: Sequence[tuple[str, Piece, int]],
    read: Callable[[str, Slices], Tensor],
) -> None:
    """Fill a rectangle of one of their tensors of what `read` gives of our parameters: (our name, piece, expert of the
    tensor's name) of each that it is made of."""
    origin = [low for low, _ in within]
    for name, piece, expert in pieces:
        for box in piece.theirs.boxes(within):
            whole = {**box, "e": (expert, expert + 1)} if piece.counts_tensors else box
            bounds = piece.ours.bounds(whole)
            ours = read(name, bounds)
            source = view(ours, [low for low, _ in bounds], piece.ours, whole, piece.axes)
            view(block, origin, piece.theirs, whole, piece.axes).copy_(source)
