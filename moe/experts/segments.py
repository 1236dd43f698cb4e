"""One product an expert, written straight into place: no row is padded and none is copied."""

import torch
from torch import Tensor

from moe.experts.products import GroupedProducts, put, segments


class SegmentProducts(GroupedProducts):
    """Right for any dtype and device; slow where experts have few rows each."""

    def supports(self, dtype: torch.dtype, device_type: str, widths: tuple[int, ...]) -> bool:
        return True

    def forward(self, x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
        y = x.new_empty(x.shape[0], w.shape[2])
        for expert, rows in segments(counts):
            torch.mm(x[rows], w[expert], out=y[rows])
        return y

    def input_gradient(self, d_y: Tensor, w: Tensor, counts: list[int], onto: Tensor | None = None) -> Tensor:
        if onto is not None:
            for expert, rows in segments(counts):
                onto[rows].addmm_(d_y[rows], w[expert].t())
            return onto
        d_x = d_y.new_empty(d_y.shape[0], w.shape[1])
        for expert, rows in segments(counts):
            torch.mm(d_y[rows], w[expert].t(), out=d_x[rows])
        return d_x

    def weight_gradient(
        self, x: Tensor, d_y: Tensor, counts: list[int], into: Tensor | None = None, *, adds: bool = False
    ) -> Tensor:
        d_w = x.new_empty(len(counts), x.shape[1], d_y.shape[1]) if into is None else into
        for expert, count in enumerate(counts):
            if not count and not adds:
                d_w[expert].zero_()
        narrow = None if d_w.dtype == x.dtype else x.new_empty(d_w.shape[1:])
        for expert, rows in segments(counts):
            if narrow is not None:
                torch.mm(x[rows].t(), d_y[rows], out=narrow)
                put(narrow, d_w[expert], adds=adds)
            elif adds:
                d_w[expert].addmm_(x[rows].t(), d_y[rows])
            else:
                torch.mm(x[rows].t(), d_y[rows], out=d_w[expert])
        return d_w
