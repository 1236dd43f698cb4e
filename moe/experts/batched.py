"""One batched product for all experts, in buffers of the busiest expert's length."""

import torch
from torch import Tensor

from moe.experts.products import GroupedProducts, segments, store_gradient

_MULTIPLE, _MANY = 8, 128
"""From `_MANY` rows on, lengths are padded to a multiple of `_MULTIPLE`: lengths with few divisors can take a third
longer in bfloat16 (8 experts of 512 x 1024 on two AMD Zen 5 cores: 7.2 ms with 533 rows each, 5.3 ms with 536)."""


class BatchedProducts(GroupedProducts):
    """Supports any dtype and device; every expert costs as much as the busiest one. Padded rows are multiplied in
    place; others are copied."""

    def supports(self, dtype: torch.dtype, device_type: str, widths: tuple[int, ...]) -> bool:
        return True

    def pad_counts(self, counts: list[int]) -> list[int]:
        longest = max(counts, default=0)
        if longest >= _MANY:
            longest += -longest % _MULTIPLE
        return [longest] * len(counts)

    def num_product_rows(self, counts: list[int], row_multiple: int) -> list[int]:
        return self.pad_counts(counts)

    def forward(self, x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
        return _products(x, w, counts)

    def input_gradient(self, d_y: Tensor, w: Tensor, counts: list[int], onto: Tensor | None = None) -> Tensor:
        d_x = _products(d_y, w.transpose(1, 2), counts)
        return d_x if onto is None else onto.add_(d_x)

    def weight_gradient(
        self, x: Tensor, d_y: Tensor, counts: list[int], buffer: Tensor | None = None, *, adds: bool = False
    ) -> Tensor:
        x_EAR, d_y_ERB = _pad_rows(x, counts).transpose(1, 2), _pad_rows(d_y, counts)
        if buffer is None:
            return torch.bmm(x_EAR, d_y_ERB)
        if buffer.dtype != x.dtype:
            return _multiply_widened(x_EAR, d_y_ERB, buffer, adds=adds)
        return buffer.baddbmm_(x_EAR, d_y_ERB) if adds else torch.bmm(x_EAR, d_y_ERB, out=buffer)


_BYTES_AT_ONCE = {"cpu": 1 << 22}
_MOST_BYTES_AT_ONCE = 1 << 30
"""Bytes of narrow products before they are widened; on a CPU, as many as fit its cache."""


def _multiply_widened(x_EAR: Tensor, d_y_ERB: Tensor, buffer: Tensor, *, adds: bool) -> Tensor:
    """Multiply a few experts at a time, widening the products into `buffer`."""
    expert_bytes = max(1, buffer[0].numel() * x_EAR.itemsize)
    num_at_once = min(
        buffer.shape[0], max(1, _BYTES_AT_ONCE.get(buffer.device.type, _MOST_BYTES_AT_ONCE) // expert_bytes)
    )
    narrow = x_EAR.new_empty(num_at_once, *buffer.shape[1:])
    for first in range(0, buffer.shape[0], num_at_once):
        expert_slice = slice(first, min(first + num_at_once, buffer.shape[0]))
        products = narrow[: expert_slice.stop - first]
        torch.bmm(x_EAR[expert_slice], d_y_ERB[expert_slice], out=products)
        store_gradient(products, buffer[expert_slice], adds=adds)
    return buffer


def _pad_rows(rows: Tensor, counts: list[int]) -> Tensor:
    """`[E, longest, width]`: each expert's rows, padded with zeros."""
    longest = max(counts, default=0)
    if min(counts, default=0) == longest:
        return rows.view(len(counts), longest, rows.shape[1])
    padded_rows = rows.new_zeros(len(counts), longest, rows.shape[1])
    for expert, row_slice in segments(counts):
        padded_rows[expert, : counts[expert]] = rows[row_slice]
    return padded_rows


def _products(rows: Tensor, w: Tensor, counts: list[int]) -> Tensor:
    """`[n, width]`: row · w[its expert]. Never a view, whose in-place changes autograd restricts."""
    padded_rows, longest = _pad_rows(rows, counts), max(counts, default=0)
    if min(counts, default=0) < longest:
        products = torch.bmm(padded_rows, w)
        return torch.cat([products[expert, :count] for expert, count in enumerate(counts)])
    y = rows.new_empty(rows.shape[0], w.shape[2])
    torch.bmm(padded_rows, w, out=y.view(len(counts), longest, w.shape[2]))
    return y
