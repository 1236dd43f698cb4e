"""What routing must know of tokens beside their content."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenContext:
    """Which tokens these are. Left out: positions in order, no padding, step 0, seed 0, training."""

    ids: Tensor | None = None
    """int64, each token's global position in its batch: the key of its random choices. `[G, S]`, or the shape
    of x without its last dimension."""
    padding: Tensor | None = None
    """bool, True where padded, in the shape of `ids`."""
    step: int = 0
    seed: int = 0
    training: bool = True
    """False routes without dropping and without random choices."""
