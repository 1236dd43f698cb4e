"""Rows of tokens in one pass, as a decoder's attention sees them."""

from dataclasses import dataclass, replace

from torch import Tensor

from moe.layers.adapter_dropout import DropoutKey
from moe.layers.attention_mask import AttentionMask
from moe.parallel import SequenceShard


@dataclass(frozen=True)
class PassRows:
    """Facts about the rows `[B, N]` of a pass that the attention of all layers needs."""

    shares: SequenceShard
    """Sequence sharding of the tokens `[B, N]`."""
    visible: AttentionMask
    """Attention mask, including earlier positions of each row."""
    cosines: Tensor
    """`[B, 1, N, r/2]`: rotary table of the positions, at least float32."""
    sines: Tensor
    """`[B, 1, N, r/2]`"""
    num_positions: int
    """Positions per row, including earlier ones."""
    documents: Tensor | None = None
    """int `[B, N]`: number of each position's document in its row, -1 for padding; None: each row is one document."""
    draws: DropoutKey | None = None
    """Key of the adapters' dropout for ids `[B, N]`, in training."""

    @property
    def draws_of_share(self) -> DropoutKey | None:
        """Dropout key of this rank's share of the tokens."""
        if self.draws is None:
            return None
        return replace(self.draws, ids=self.shares.take(self.draws.ids.reshape(-1)))

    def within(self, label: str) -> "PassRows":
        """The same rows, with `label` as the layer's name in errors of collectives."""
        return replace(self, shares=replace(self.shares, label=label))

    def seen(self, window: int | None, num_keys: int) -> AttentionMask:
        """Attention mask of a layer with this window, whose cache has the last `num_keys` positions."""
        visible, num_evicted = self.visible.within(window), self.num_positions - num_keys
        if visible.first is None or not num_evicted:
            return visible
        return replace(visible, first=visible.first - num_evicted, _made={})
