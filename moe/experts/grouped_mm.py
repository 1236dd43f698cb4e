"""`torch.nn.functional.grouped_mm`: one kernel for all experts, on GPUs that support it."""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moe.experts.products import GroupedProducts, SegmentProducts, store_gradient
from moe.parallel.accelerator import accelerator


class GroupedMM(GroupedProducts):
    """float32 on CPUs, bfloat16 on GPUs; every row of every operand must start at a multiple of 16 bytes.

    On CPUs it runs a product per expert into new memory, so `SegmentProducts` writes to existing outputs instead.
    bfloat16 is not used there, since every new number of rows is costly.
    """

    def supports(self, dtype: torch.dtype, device_type: str, widths: tuple[int, ...]) -> bool:
        matrix_dtype = accelerator(device_type).matrix_dtype
        return dtype == matrix_dtype and all(width * dtype.itemsize % 16 == 0 for width in widths)

    def forward(self, x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
        return grouped_mm(x, w, offs=_ends(x, counts))

    def input_gradient(self, d_y: Tensor, w: Tensor, counts: list[int], onto: Tensor | None = None) -> Tensor:
        if onto is not None and d_y.device.type == "cpu":
            return _SEGMENTS.input_gradient(d_y, w, counts, onto)
        d_x = grouped_mm(d_y, w.transpose(1, 2), offs=_ends(d_y, counts))
        return d_x if onto is None else onto.add_(d_x)

    def weight_gradient(
        self, x: Tensor, d_y: Tensor, counts: list[int], buffer: Tensor | None = None, *, adds: bool = False
    ) -> Tensor:
        if buffer is not None and x.device.type == "cpu":
            return _SEGMENTS.weight_gradient(x, d_y, counts, buffer, adds=adds)
        d_w = grouped_mm(x.t(), d_y, offs=_ends(x, counts))
        return d_w if buffer is None else store_gradient(d_w, buffer, adds=adds)


_SEGMENTS = SegmentProducts()


def _ends(rows: Tensor, counts: list[int]) -> Tensor:
    """int32 `[E]`: end of each expert's rows."""
    return accelerator(rows.device).take(torch.tensor(counts).cumsum(0, dtype=torch.int32))
