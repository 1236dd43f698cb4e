"""One batched product for all experts, over buffers as long as the busiest expert needs."""

import torch
from torch import Tensor

from moe.experts.products import GroupedProducts, segments


class BatchedProducts(GroupedProducts):
    """Right for any dtype and device; wasteful where loads differ much, since every expert costs what the busiest
    one does. Rows that come padded are multiplied where they lie; others are copied."""

    def supports(self, dtype: torch.dtype, device_type: str, widths: tuple[int, ...]) -> bool:
        return True

    def padded(self, counts: list[int]) -> list[int]:
        return [max(counts, default=0)] * len(counts)

    def forward(self, x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
        return _unpadded(torch.bmm(_padded(x, counts), w), counts)

    def input_gradient(self, d_y: Tensor, w: Tensor, counts: list[int], onto: Tensor | None = None) -> Tensor:
        d_x = _unpadded(torch.bmm(_padded(d_y, counts), w.transpose(1, 2)), counts)
        return d_x if onto is None else onto.add_(d_x)

    def weight_gradient(self, x: Tensor, d_y: Tensor, counts: list[int]) -> Tensor:
        return torch.bmm(_padded(x, counts).transpose(1, 2), _padded(d_y, counts))


def _padded(rows: Tensor, counts: list[int]) -> Tensor:
    """`[E, longest, width]`: each expert's rows, then zeros."""
    longest = max(counts, default=0)
    if min(counts, default=0) == longest:
        return rows.view(len(counts), longest, rows.shape[1])
    padded = rows.new_zeros(len(counts), longest, rows.shape[1])
    for expert, here in segments(counts):
        padded[expert, : counts[expert]] = rows[here]
    return padded


def _unpadded(padded: Tensor, counts: list[int]) -> Tensor:
    if min(counts, default=0) == padded.shape[1]:
        return padded.view(-1, padded.shape[2])
    return torch.cat([padded[expert, :count] for expert, count in enumerate(counts)])
