"""Rows of tokens as the attention of a decoder sees them."""

from dataclasses import dataclass, replace

from torch import Tensor

from moe.layers.softmax_attention import Visibility
from moe.parallel import TokenShares


@dataclass(frozen=True)
class Rows:
    """Facts of the rows `[B, N]` of a pass that every layer's attention needs."""

    shares: TokenShares
    """Of the tokens `[B, N]`."""
    visible: Visibility
    """Positions that each may look at."""
    cosines: Tensor
    """`[B, 1, N, r/2]`, as each position turns its queries and keys; float32 at least."""
    sines: Tensor
    """`[B, 1, N, r/2]`"""
    documents: Tensor | None = None
    """int `[B, N]`: number of each position's document in its row, -1 for padding; each row is one when left out."""

    def within(self, label: str) -> "Rows":
        """The same, with the layer's name in what a failed collective says."""
        return replace(self, shares=replace(self.shares, label=label))
