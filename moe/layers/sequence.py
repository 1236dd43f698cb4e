"""Rows of tokens as the attention of a decoder sees them."""

from dataclasses import dataclass, replace

from torch import Tensor

from moe.layers.adapter_dropout import DropoutKey
from moe.layers.attention_mask import AttentionMask
from moe.parallel import SequenceShard


@dataclass(frozen=True)
class PassRows:
    """Facts of the rows `[B, N]` of a pass that every layer's attention needs."""

    shares: SequenceShard
    """Of the tokens `[B, N]`."""
    visible: AttentionMask
    """Positions that each may look at, of all that came before in its row too."""
    cosines: Tensor
    """`[B, 1, N, r/2]`, as each position turns its queries and keys; float32 at least."""
    sines: Tensor
    """`[B, 1, N, r/2]`"""
    num_positions: int
    """Of a row: these, and those before."""
    documents: Tensor | None = None
    """int `[B, N]`: number of each position's document in its row, -1 for padding; each row is one when left out."""
    draws: DropoutKey | None = None
    """Of the dropout of adapters, of ids `[B, N]`, where there may be any."""

    @property
    def draws_of_share(self) -> DropoutKey | None:
        """Those of this rank's share of the tokens."""
        if self.draws is None:
            return None
        return replace(self.draws, ids=self.shares.take(self.draws.ids.reshape(-1)))

    def within(self, label: str) -> "PassRows":
        """The same, with the layer's name in what a failed collective says."""
        return replace(self, shares=replace(self.shares, label=label))

    def seen(self, window: int | None, num_keys: int) -> AttentionMask:
        """Visibility in a layer with this window, of which the last `num_keys` positions are there."""
        visible, num_evicted = self.visible.within(window), self.num_positions - num_keys
        if visible.first is None or not num_evicted:
            return visible
        return replace(visible, first=visible.first - num_evicted, _made={})
