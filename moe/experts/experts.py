"""The experts of one layer that live on this rank."""

import torch
from torch import Tensor, nn

from moe.experts.feed_forward import grouped_feed_forward
from moe.parallel import Layout, mark_expert
from moe.random import init_uniform_
from moe.spec import MoESpec


class Experts(nn.Module):
    """This rank's share of a layer's experts: two matrices and a ReLU each (GShard, section 2.1)."""

    def __init__(
        self,
        spec: MoESpec,
        layout: Layout,
        *,
        name: str,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.experts_here = layout.experts_here(spec.num_experts)
        first, here = self.experts_here.start, len(self.experts_here)
        width, hidden = spec.model_dim, spec.hidden_dim
        self.w_in = mark_expert(
            nn.Parameter(torch.empty(here, width, hidden, dtype=dtype, device=layout.device))
        )
        self.w_out = mark_expert(
            nn.Parameter(torch.empty(here, hidden, width, dtype=dtype, device=layout.device))
        )
        start = first * width * hidden
        init_uniform_(self.w_in, width**-0.5, seed, f"{name}.w_in", start)
        init_uniform_(self.w_out, hidden**-0.5, seed, f"{name}.w_out", start)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """`[n, M]` for `rows` `[n, M]` sorted by expert, `counts[i]` of them for the i-th expert here."""
        return grouped_feed_forward(rows, self.w_in.to(rows.dtype), self.w_out.to(rows.dtype), counts)
