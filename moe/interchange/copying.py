"""Copies parts of tensors between the Hugging Face layout and ours, in blocks of bounded size."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moe.interchange.pieces import IN_NAME, Box, ParameterPiece, Side, split
from moe.spec.parameter import Slices

BLOCK_ELEMENTS = 1 << 21
"""Maximum elements of a copy: a block is dequantized or converted in memory as a whole."""


def view(tensor: Tensor, origin: Sequence[int], side: Side, box: Box, axes: Sequence[str]) -> Tensor:
    """View of a box of a piece in memory that holds a rectangle of its tensor starting at `origin`: axes in order,
    without those of length 1."""
    first = side.bounds(box)
    offset = tensor.storage_offset() + sum(
        (low - begin) * stride for (low, _), begin, stride in zip(first, origin, tensor.stride(), strict=True)
    )
    long_axes = [axis for axis in axes if box[axis][1] - box[axis][0] != 1]
    sizes = [box[axis][1] - box[axis][0] for axis in long_axes]
    return tensor.as_strided(sizes, side.strides(long_axes, tensor.stride()), offset)


def copy(target: Tensor, source: Tensor) -> None:
    """Copy a view to another of any strides and dtype. Transposes in the narrower dtype: transposing and converting in
    one copy takes twice as long_axes."""
    if target.dtype != source.dtype and not source.is_contiguous():
        source = source.contiguous() if source.itemsize <= target.itemsize else source.to(target.dtype)
    target.copy_(source)


def fill_parameter(
    local: Tensor,
    origin: Sequence[int],
    pieces: Sequence[ParameterPiece],
    read: Callable[[str, Slices], Tensor],
    check: Callable[[str, Tensor], None],
) -> None:
    """Fill a rectangle of a parameter, which starts at `origin`, from Hugging Face tensors, read by `read`. Calls
    `check` on each block with the name of its tensor."""
    region = tuple((low, low + size) for low, size in zip(origin, local.shape, strict=True))
    for piece in pieces:
        for part in piece.parameter_side.boxes(region):
            for name, box in piece.by_tensor(part):
                for block in split(box, piece.tensor_side, BLOCK_ELEMENTS):
                    bounds = piece.tensor_side.bounds(block)
                    folder_tensor = read(name, bounds)
                    check(name, folder_tensor)
                    source = view(folder_tensor, [low for low, _ in bounds], piece.tensor_side, block, piece.axes)
                    target = view(local, origin, piece.parameter_side, block, piece.axes)
                    copy(target, source)
                    if piece.factor != 1:
                        target.mul_(piece.factor)


def skip_check(name: str, block: Tensor) -> None:
    """No-op check for `fill_parameter`."""


Components = Sequence[tuple[str, ParameterPiece, int]]
"""(parameter name, piece, expert in the tensor's name) of each parameter that a Hugging Face tensor is built from."""


def fill_folder_tensor(
    block: Tensor, region: Slices, components: Components, read: Callable[[str, Slices, torch.dtype], Tensor]
) -> None:
    """Fill a rectangle of a Hugging Face tensor from our parameters, read by `read`."""
    origin = [low for low, _ in region]
    for name, piece, box in _boxes(region, components):
        bounds = piece.parameter_side.bounds(box)
        source = view(
            read(name, bounds, block.dtype), [low for low, _ in bounds], piece.parameter_side, box, piece.axes
        )
        copy(view(block, origin, piece.tensor_side, box, piece.axes), source)


def reads_of(region: Slices, components: Components) -> Iterator[tuple[str, Slices]]:
    """Yield the reads of `fill_folder_tensor`, in order."""
    for name, piece, box in _boxes(region, components):
        yield name, piece.parameter_side.bounds(box)


def _boxes(region: Slices, components: Components) -> Iterator[tuple[str, ParameterPiece, Box]]:
    for name, piece, expert in components:
        for box in piece.tensor_side.boxes(region):
            yield name, piece, {**box, IN_NAME: (expert, expert + 1)} if piece.is_per_expert else box
