"""Rows of tokens as the attention of a decoder sees them."""

from dataclasses import dataclass, replace

from torch import Tensor

from moe.layers.adapter_dropout import DropoutKey
from moe.layers.attention_mask import AttentionMask
from moe.parallel import SequenceShard


@dataclass(frozen=True)
class PassRows:
    """Properties of the rows `[B, N]` of a pass that every layer's attention needs."""

    shares: SequenceShard
    """Shares of the tokens `[B, N]` on tensor ranks."""
    visible: AttentionMask
    """The positions that each position may attend to, including earlier ones in the cache."""
    cosines: Tensor
    """`[B, 1, N, r/2]`: rotary cosines of the positions, in float32 at least."""
    sines: Tensor
    """`[B, 1, N, r/2]`"""
    num_positions: int
    """Number of positions in a row, those in the cache included."""
    documents: Tensor | None = None
    """int `[B, N]`: document number of each position in its row, -1 for padding; None means that each row is one
    document."""
    draws: DropoutKey | None = None
    """Keys of the dropout of adapters for the tokens `[B, N]`, if there is any."""

    @property
    def draws_of_share(self) -> DropoutKey | None:
        """The draws of this rank's share of the tokens."""
        if self.draws is None:
            return None
        return replace(self.draws, ids=self.shares.take(self.draws.ids.reshape(-1)))

    def within(self, label: str) -> "PassRows":
        """These rows with the layer's name for messages about failed collectives."""
        return replace(self, shares=replace(self.shares, label=label))

    def seen(self, window: int | None, num_keys: int) -> AttentionMask:
        """The mask of a layer with this window that has the last `num_keys` positions."""
        visible, num_evicted = self.visible.within(window), self.num_positions - num_keys
        if visible.first is None or not num_evicted:
            return visible
        return replace(visible, first=visible.first - num_evicted, _made={})
