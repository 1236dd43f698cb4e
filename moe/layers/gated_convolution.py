"""Gated short convolution (LFM2, arXiv 2511.23404)."""

from torch import Tensor, nn

from moe.layers.cache import RecurrentState
from moe.layers.linear import Linear
from moe.layers.sequence import PassRows
from moe.layers.short_convolution import ShortConvolution


class GatedConvolution(nn.Module):
    """Gated short convolution of one layer. If split over tensor-parallel ranks, each has some of the channels and
    processes all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.convolution, self.output = Linear(), ShortConvolution(), Linear()

    def forward(self, x: Tensor, rows: PassRows, cache: RecurrentState | None = None) -> Tensor:
        """Return `[t, M]` for this rank's share `x` `[t, M]` of the rows. With `cache`, they continue from its inputs
        and update them."""
        shard = rows.shard
        projected = self.projection(shard.gather_rows(x), rows.dropout_key)
        input_gate, output_gate, x = projected.unflatten(-1, (-1, 3)).unbind(-1)
        y = output_gate * self.convolution(input_gate * x, rows, cache)
        return self.output.add_bias(shard.scatter_rows(self.output.product(y, rows.dropout_key)))

    def new_cache(self, num_rows: int, num_positions: int, like: Tensor) -> RecurrentState:
        """State before the first token."""
        return RecurrentState()
