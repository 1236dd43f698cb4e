"""Grouped matrix products, rows times the matrix of their expert: the interface of the backends, and the backend that
supports every dtype, device and width."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from moe.parallel.accelerator import accelerator


class GroupedProducts(ABC):
    """Products of rows sorted by expert, `counts[e]` rows for expert e, possibly zero.

    `x` `[n, A]` and `d_y` `[n, B]` contiguous, `w` `[E, A, B]`, all of one dtype; A and B are any two widths.
    """

    @abstractmethod
    def supports(self, dtype: torch.dtype, device_type: str, widths: tuple[int, ...]) -> bool:
        """Whether it supports this dtype, device and these widths (A, B and others)."""

    def pad_counts(self, counts: list[int]) -> list[int]:
        """Rows per expert that it prefers: callers may pad with zero rows of zero scale."""
        return counts

    def row_multiple(self, dtype: torch.dtype, device_type: str) -> int:
        """The number of rows it multiplies per expert is a multiple of this, or of a larger number for large counts."""
        return 1

    def num_product_rows(self, counts: list[int], row_multiple: int) -> list[int]:
        """Rows that it multiplies per expert: multiples of `row_multiple`."""
        return counts

    @abstractmethod
    def forward(self, x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
        """`[n, B]`: row · w[its expert]."""

    @abstractmethod
    def input_gradient(self, d_y: Tensor, w: Tensor, counts: list[int], onto: Tensor | None = None) -> Tensor:
        """`[n, A]`: row of `d_y` · w[its expert] transposed; added in place to `onto` if given."""

    @abstractmethod
    def weight_gradient(
        self, x: Tensor, d_y: Tensor, counts: list[int], buffer: Tensor | None = None, *, adds: bool = False
    ) -> Tensor:
        """`[E, A, B]`: x transposed · d_y over each expert's rows; zeros for an expert without rows. Written to
        `buffer`, if given, which may have a wider dtype, or added to it if `adds`."""


def segments(counts: list[int]) -> list[tuple[int, slice]]:
    """(expert, its rows) for every expert with rows."""
    expert_rows, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            expert_rows.append((expert, slice(start, start + count)))
        start += count
    return expert_rows


def padded_slots(counts: list[int], padded_counts: list[int], device: torch.device) -> Tensor:
    """int64 `[n]`: index of each row after padding expert e's rows from `counts[e]` to `padded_counts[e]`."""
    row_counts, slot_counts = torch.tensor(counts), torch.tensor(padded_counts)
    shift = (slot_counts.cumsum(0) - slot_counts) - (row_counts.cumsum(0) - row_counts)
    return accelerator(device).take(torch.arange(int(row_counts.sum())) + shift.repeat_interleave(row_counts))


def padding_slots(counts: list[int], padded_counts: list[int], device: torch.device) -> Tensor:
    """int64 `[m]`: indices of the padding rows, which `padded_slots` leaves free."""
    row_counts, missing = torch.tensor(counts), torch.tensor(padded_counts) - torch.tensor(counts)
    padding_rows = torch.arange(int(missing.sum())) + row_counts.cumsum(0).repeat_interleave(missing)
    return accelerator(device).take(padding_rows)


def store_gradient(gradient: Tensor, buffer: Tensor, *, adds: bool) -> Tensor:
    """Copy `gradient` to `buffer`, or add it."""
    return buffer.add_(gradient) if adds else buffer.copy_(gradient)


_MULTIPLE, _MULTIPLES_PER_DOUBLING = 16, 8
"""Row counts of bfloat16 products on a CPU: multiples of `_MULTIPLE` up to 256, then `_MULTIPLES_PER_DOUBLING` counts
per doubling. oneDNN compiles a kernel per row count in about a millisecond and caches a thousand, and loads change in
every pass."""
_COPIED = 512
"""Maximum number of rows copied at a time, to pad or to restore them."""


class SegmentProducts(GroupedProducts):
    """One product per expert, written directly to the output. Supports any dtype and device; slow if experts have few
    rows each.

    Where row counts are restricted, a product includes rows of the next expert, which then overwrites their results; if
    products are added to the output, those rows are restored. Rows are copied and padded with zeros only near the end,
    and for weight gradients, which would sum the extra rows.
    """

    def supports(self, dtype: torch.dtype, device_type: str, widths: tuple[int, ...]) -> bool:
        return True

    def row_multiple(self, dtype: torch.dtype, device_type: str) -> int:
        on_cpu = dtype == torch.bfloat16 and device_type == "cpu"
        return _MULTIPLE if on_cpu and _onednn_multiplies_bfloat16() else 1

    def num_product_rows(self, counts: list[int], row_multiple: int) -> list[int]:
        if row_multiple == 1:
            return counts
        row_counts = [0] * len(counts)
        for expert, _, product_rows in _row_slices(counts, row_multiple):
            row_counts[expert] += product_rows.stop - product_rows.start
        return row_counts

    def forward(self, x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
        y = x.new_empty(x.shape[0], w.shape[2])
        self._multiply(x, w, counts, y)
        return y

    def input_gradient(self, d_y: Tensor, w: Tensor, counts: list[int], onto: Tensor | None = None) -> Tensor:
        if onto is not None:
            self._multiply_and_add(d_y, w.transpose(1, 2), counts, onto)
            return onto
        d_x = d_y.new_empty(d_y.shape[0], w.shape[1])
        self._multiply(d_y, w.transpose(1, 2), counts, d_x)
        return d_x

    def _multiply(self, x: Tensor, w: Tensor, counts: list[int], y: Tensor) -> None:
        if self.row_multiple(x.dtype, x.device.type) == 1:
            for x_e, w_e, y_e in _by_expert(counts, x, w, y):
                torch.mm(x_e, w_e, out=y_e)
            return
        for expert, rows, product_rows in _row_slices(counts, self.row_multiple(x.dtype, x.device.type)):
            if product_rows.stop <= x.shape[0]:
                torch.mm(x[product_rows], w[expert], out=y[product_rows])
            else:
                y[rows] = torch.mm(_pad_rows(x[rows], product_rows), w[expert])[: rows.stop - rows.start]

    def _multiply_and_add(self, x: Tensor, w: Tensor, counts: list[int], y: Tensor) -> None:
        if self.row_multiple(x.dtype, x.device.type) == 1:
            for x_e, w_e, y_e in _by_expert(counts, x, w, y):
                y_e.addmm_(x_e, w_e)
            return
        for expert, rows, product_rows in _row_slices(counts, self.row_multiple(x.dtype, x.device.type)):
            if product_rows == rows:
                y[rows].addmm_(x[rows], w[expert])
            elif product_rows.stop <= x.shape[0]:
                next_rows = y[rows.stop : product_rows.stop]
                before = next_rows.clone()
                y[product_rows].addmm_(x[product_rows], w[expert])
                next_rows.copy_(before)
            else:
                y[rows] += torch.mm(_pad_rows(x[rows], product_rows), w[expert])[: rows.stop - rows.start]

    def weight_gradient(
        self, x: Tensor, d_y: Tensor, counts: list[int], buffer: Tensor | None = None, *, adds: bool = False
    ) -> Tensor:
        d_w = x.new_empty(len(counts), x.shape[1], d_y.shape[1]) if buffer is None else buffer
        for expert, count in enumerate(counts):
            if not count and not adds:
                d_w[expert].zero_()
        narrow = None if d_w.dtype == x.dtype else x.new_empty(d_w.shape[1:])
        multiple = self.row_multiple(x.dtype, x.device.type)
        if multiple == 1 and narrow is None:
            for x_e, d_w_e, d_y_e in _by_expert(counts, x, d_w, d_y):
                if adds:
                    d_w_e.addmm_(x_e.t(), d_y_e)
                else:
                    torch.mm(x_e.t(), d_y_e, out=d_w_e)
            return d_w
        for expert, rows in segments(counts):
            for part, product_rows in _parts(rows, multiple):
                x_part, d_y_part = _pad_rows(x[part], product_rows), _pad_rows(d_y[part], product_rows)
                adds_part = adds or part.start > rows.start
                if narrow is not None:
                    torch.mm(x_part.t(), d_y_part, out=narrow)
                    store_gradient(narrow, d_w[expert], adds=adds_part)
                elif adds_part:
                    d_w[expert].addmm_(x_part.t(), d_y_part)
                else:
                    torch.mm(x_part.t(), d_y_part, out=d_w[expert])
        return d_w


def _by_expert(counts: list[int], x: Tensor, w: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(rows of x, matrix, rows of y) of every expert with rows, split in one call: a view takes 3 us, and a product of
    one row 50."""
    sizes = [count for count in counts if count]
    matrices = [w_e for w_e, count in zip(w.unbind(), counts, strict=True) if count]
    return zip(x.split(sizes), matrices, y.split(sizes), strict=True)


def _onednn_multiplies_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 by oneDNN kernels on this CPU; if not, all row counts cost the same. True if
    torch cannot tell: extra rows cost less than new kernels."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except AttributeError:
        return True


def _step(count: int, multiple: int) -> int:
    """Row counts near `count` are rounded to multiples of this."""
    if multiple == 1:
        return 1
    return max(multiple, (1 << (count - 1).bit_length()) // (2 * _MULTIPLES_PER_DOUBLING))


def _upward(rows: slice, multiple: int) -> slice:
    """`rows`, extended at the end to the row count of one product."""
    count = rows.stop - rows.start
    return slice(rows.start, rows.stop + -count % _step(count, multiple))


def _row_slices(counts: list[int], multiple: int) -> Iterator[tuple[int, slice, slice]]:
    """(expert, rows, rows of one product that starts with them), in order.

    If a product would extend beyond the end, or by too many rows to restore, most of the expert's rows come first,
    without extra rows, and the rest after; only the rest may extend beyond the end.
    """
    if multiple == 1:
        yield from ((expert, rows, rows) for expert, rows in segments(counts))
        return
    num_rows = sum(counts)
    for expert, rows in segments(counts):
        product_rows = _upward(rows, multiple)
        while product_rows.stop > num_rows or product_rows.stop - rows.stop > _COPIED:
            count = rows.stop - rows.start
            last = rows.stop - count % _step(count, multiple)
            if last > rows.start:
                yield expert, slice(rows.start, last), slice(rows.start, last)
            rows = slice(last, rows.stop)
            product_rows = _upward(rows, multiple)
            if rows.stop - last <= _COPIED:
                break
        yield expert, rows, product_rows


def _parts(rows: slice, multiple: int) -> Iterator[tuple[slice, slice]]:
    """(rows, rows of one product that starts with them), in order; if they differ, the rows are few enough to copy."""
    count = rows.stop - rows.start
    last = rows.stop if _upward(rows, multiple) == rows else rows.stop - count % _COPIED
    if last > rows.start:
        yield slice(rows.start, last), slice(rows.start, last)
    if last < rows.stop:
        yield slice(last, rows.stop), _upward(slice(last, rows.stop), multiple)


def _pad_rows(rows: Tensor, product_rows: slice) -> Tensor:
    """`rows`, padded with zeros to the number of `product_rows`."""
    missing = product_rows.stop - product_rows.start - rows.shape[0]
    return torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))) if missing else rows
