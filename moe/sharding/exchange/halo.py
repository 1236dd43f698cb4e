"""Windows of a split dimension. A rank receives the positions that it lacks from the ranks that have them; positions
outside the whole are filled. Halos of convolutions are exchanged in this way, and boundaries between parts are moved
(GShard, arXiv 2006.16668, section 3.3)."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe.sharding.exchange.mesh import Mesh


class Window(NamedTuple):
    """Positions of a dimension that ranks along an axis need: rank r needs `length` positions from
    `(first + step * r) // divisor` on. Positions outside `[low, high)` are filled."""

    first: int
    step: int
    length: int
    high: int
    low: int = 0
    divisor: int = 1
    is_split: bool = True
    """Whether each rank has a part of the dimension rather than the whole."""

    def start(self, index: int) -> int:
        return (self.first + self.step * index) // self.divisor

    def inside(self, index: int) -> tuple[int, int]:
        """[begin, end) of a rank's positions that are not filled."""
        start = self.start(index)
        return (min(max(start, self.low), self.high), min(max(start + self.length, self.low), self.high))

    def overlap(self, reader: int, owner: int, size: int) -> tuple[int, int]:
        """[begin, end) of the positions that one rank needs and another one has, with parts of size `size`; empty if
        end is not above begin."""
        begin, end = self.inside(reader)
        return max(begin, owner * size), min(end, (owner + 1) * size)


def moved_positions(window: Window, size: int, degree: int) -> int:
    """Maximum number of positions that a rank receives from others, with parts of size `size`; of many ranks, a sample
    at even distances is examined."""
    if not window.is_split:
        return 0
    max_positions = 0
    for index in {*range(0, degree, max(1, degree // 32)), degree - 1}:
        begin, end = window.inside(index)
        local_begin, local_end = window.overlap(index, index, size)
        max_positions = max(max_positions, end - begin - max(0, local_end - local_begin))
    return max_positions


@lru_cache(maxsize=4096)
def _counts(
    windows: tuple[Window, ...], sizes: tuple[int, ...], degree: int, index: int
) -> tuple[list[list[int]], list[list[int]], bool]:
    """(numbers of positions that this rank sends, by rank and window; numbers that it receives; whether any rank sends
    any)."""

    def count(window: Window, size: int, reader: int, owner: int) -> int:
        if reader == owner or not window.is_split:
            return 0
        begin, end = window.overlap(reader, owner, size)
        return max(0, end - begin)

    pairs = list(zip(windows, sizes, strict=True))
    send_counts = [[count(*pair, rank, index) for pair in pairs] for rank in range(degree)]
    receive_counts = [[count(*pair, index, rank) for pair in pairs] for rank in range(degree)]
    moves = False
    for window, size in pairs:
        for rank in range(degree) if window.is_split else ():
            begin, end = window.inside(rank)
            local_begin, local_end = window.overlap(rank, rank, size)
            moves = moves or max(0, local_end - local_begin) < end - begin
    return send_counts, receive_counts, moves


def fetch(
    mesh: Mesh, parts: Sequence[Tensor], axis: int, dim: int, windows: Sequence[Window], value: float | int | bool = 0
) -> Tensor:
    """This rank's positions of a dimension that consists of windows of one or several tensors, in this order. Positions
    that no tensor has are filled with `value`. It takes one all-to-all, or none if no rank lacks positions.

    All windows have the length of the result. Padding after the end of the whole tensor is not read.
    """
    index, degree = mesh.indices[axis], mesh.degrees[axis]
    sizes = tuple(part.shape[dim] for part in parts)
    send_counts, receive_counts, moves = _counts(tuple(windows), sizes, degree, index)
    arrivals = _exchange_rows(mesh, parts, axis, dim, windows, send_counts, receive_counts) if moves else None
    pieces: list[Tensor] = []
    front = windows[0].length
    for number, (part, window) in enumerate(zip(parts, windows, strict=True)):
        begin, end = window.inside(index)
        if end <= begin:
            continue
        if not pieces:
            front = begin - window.start(index)
        if not window.is_split:
            pieces.append(part.narrow(dim, begin, end - begin))
            continue
        local_begin, local_end = window.overlap(index, index, sizes[number])
        earlier_pieces = [rank_pieces[number] for rank_pieces in (arrivals or [])[:index]]
        later_pieces = [rank_pieces[number] for rank_pieces in (arrivals or [])[index + 1 :]]
        local_pieces = (
            [part.narrow(dim, local_begin - index * sizes[number], local_end - local_begin)]
            if local_end > local_begin
            else []
        )
        pieces += [piece for piece in (*earlier_pieces, *local_pieces, *later_pieces) if piece.shape[dim]]
    rows = torch.cat(pieces, dim) if len(pieces) > 1 else (pieces or [parts[0].narrow(dim, 0, 0)])[0]
    return _pad_to_length(rows, dim, front, windows[0].length, value)


def _exchange_rows(
    mesh: Mesh,
    parts: Sequence[Tensor],
    axis: int,
    dim: int,
    windows: Sequence[Window],
    send_counts: list[list[int]],
    receive_counts: list[list[int]],
) -> list[list[Tensor]]:
    """Received rows, by rank and window."""
    index, slices = mesh.indices[axis], []
    for rank, counts in enumerate(send_counts):
        for part, window, count in zip(parts, windows, counts, strict=True):
            if count:
                begin, _ = window.overlap(rank, index, part.shape[dim])
                slices.append(part.narrow(dim, begin - index * part.shape[dim], count))
    rows = torch.cat(slices, dim) if slices else parts[0].narrow(dim, 0, 0)
    rows = rows.movedim(dim, 0).contiguous()
    flat = rows.view(torch.uint8) if rows.dtype == torch.bool else rows
    received_rows = mesh.all_to_all(
        flat, axis, [sum(counts) for counts in send_counts], [sum(counts) for counts in receive_counts]
    )
    received_rows = received_rows.view(rows.dtype).movedim(0, dim)
    pieces = iter(received_rows.split([count for counts in receive_counts for count in counts], dim))
    return [[next(pieces) for _ in counts] for counts in receive_counts]


def cut(x: Tensor, dim: int, first: int, length: int, value: float | int | bool = 0) -> Tensor:
    """`length` positions of a tensor from `first` on; positions outside it are filled with `value`."""
    begin = min(max(first, 0), x.shape[dim])
    end = min(max(first + length, begin), x.shape[dim])
    front = begin - first if end > begin else length
    return _pad_to_length(x.narrow(dim, begin, end - begin), dim, front, length, value)


def _pad_to_length(rows: Tensor, dim: int, front: int, length: int, value: float | int | bool) -> Tensor:
    """The rows with `front` positions of `value` before them, and as many after them as give `length`."""
    if rows.shape[dim] == length:
        return rows
    back = length - front - rows.shape[dim]
    return pad(rows, [0, 0] * (rows.dim() - 1 - dim) + [front, back], value=value)


def start(mesh: Mesh, axis: int, window: Window) -> int:
    """First position of this rank's window in the whole dimension."""
    return window.start(mesh.indices[axis])


def moved_bytes(shape: Sequence[int], dim: int, itemsize: int, window: Window, degree: int) -> float:
    """Bytes of a tensor of this shape that a rank receives from others."""
    size = -(-shape[dim] // degree)
    return moved_positions(window, size, degree) * itemsize * math.prod(shape) / max(1, shape[dim])


def select_position(part: Tensor, dim: int, first: int, valid: int, position: int) -> Tensor:
    """One position of a dimension; zeros if another rank has it. This rank has `valid` positions from `first` on."""
    offset = position - first
    if 0 <= offset < valid:
        return part.narrow(dim, offset, 1)
    return torch.zeros_like(part.narrow(dim, 0, 1))


def write_slice(part: Tensor, src: Tensor, dim: int, first: int, begin: int, step: int) -> Tensor:
    """The part, which begins at position `first` of a dimension, with `src` written to the positions `begin`,
    `begin + step` and so on. Every rank has all of `src`."""
    front = max(0, -((begin - first) // step))
    end = min(src.shape[dim], -((begin - first - part.shape[dim]) // step))
    if end <= front:
        return part
    offset = begin + step * front - first
    rows = src.narrow(dim, front, end - front)
    return torch.slice_scatter(part, rows, dim, offset, offset + step * (end - front - 1) + 1, step)
