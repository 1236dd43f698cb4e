"""Products in float32, for CPUs without instructions for narrow dtypes."""

import torch
from torch import Tensor

from moe.experts.products import GroupedProducts, segments
from moe.parallel.accelerator import multiplies


class WidenedProducts(GroupedProducts):
    """One product per expert, whose rows and matrix are widened just before, to stay in cache. Sums are rounded once,
    and gradients of float32 weights not at all."""

    def supports(self, dtype: torch.dtype, device_type: str, widths: tuple[int, ...]) -> bool:
        return not multiplies(dtype, torch.device(device_type))

    def forward(self, x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
        y = x.new_empty(x.shape[0], w.shape[2])
        for expert, rows in segments(counts):
            y[rows] = _wide(x[rows]) @ _wide(w[expert])
        return y

    def input_gradient(self, d_y: Tensor, w: Tensor, counts: list[int], onto: Tensor | None = None) -> Tensor:
        d_x = d_y.new_empty(d_y.shape[0], w.shape[1]) if onto is None else onto
        for expert, rows in segments(counts):
            product = _wide(d_y[rows]) @ _wide(w[expert]).t()
            if onto is None:
                d_x[rows] = product
            else:
                d_x[rows] += product
        return d_x

    def weight_gradient(
        self, x: Tensor, d_y: Tensor, counts: list[int], buffer: Tensor | None = None, *, adds: bool = False
    ) -> Tensor:
        d_w = x.new_empty(len(counts), x.shape[1], d_y.shape[1]) if buffer is None else buffer
        for expert, count in enumerate(counts):
            if not count and not adds:
                d_w[expert].zero_()
        for expert, rows in segments(counts):
            wide_AR, wide_RB = _wide(x[rows]).t(), _wide(d_y[rows])
            if d_w.dtype != wide_RB.dtype:
                d_w[expert] = wide_AR @ wide_RB + (d_w[expert] if adds else 0)
            elif adds:
                d_w[expert].addmm_(wide_AR, wide_RB)
            else:
                torch.mm(wide_AR, wide_RB, out=d_w[expert])
        return d_w


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
