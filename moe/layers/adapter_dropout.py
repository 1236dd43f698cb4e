"""Dropout of what adapters take in: of x before A, in training (PEFT's `lora_dropout`)."""

from dataclasses import dataclass, replace

from torch import Tensor

from moe.parallel import Layout, first_of, part_of
from moe.random import Purpose, fold, fold_name, keep_mask
from moe.routing import TokenContext
from moe.sharding.hints.annotate import is_capturing


@dataclass(frozen=True)
class DropoutKey:
    """Key of every draw of a pass, and the rows that are drawn for."""

    tokens: TokenContext
    ids: Tensor
    """int64, of the rows that a matrix is given, `[...]` for x `[..., in]`: their tokens' global positions."""

    @classmethod
    def from_tokens(cls, tokens: TokenContext, ids: Tensor) -> "DropoutKey | None":
        """Draws of a pass in training; there are none in any other."""
        return cls(tokens, ids) if tokens.training else None


@dataclass(frozen=True)
class AdapterDropout:
    """Dropout of one adapter. Each has draws of its own, keyed by (seed, step, name of its matrix, token)."""

    probability: float
    name: str
    """Of the matrix in the whole model."""
    first: int = 0
    """Of the columns of x that this rank has, the first, and of how many in all; all of them when left out."""
    num_columns: int | None = None

    def wired(self, a: Tensor, layout: Layout) -> "AdapterDropout":
        """The same where this rank has a part of A `[r, in]`."""
        part = part_of(a)
        return replace(self, first=first_of(part, layout)[1], num_columns=part.shape[1])

    def by(self, draws: DropoutKey | None) -> "Dropped | None":
        """Masks of a pass; none where nothing is drawn."""
        return None if draws is None else Dropped(self, draws)


@dataclass(frozen=True)
class Dropped:
    """Masks of what one adapter takes in, in one pass: made anew wherever they are wanted, and never kept."""

    dropout: AdapterDropout
    draws: DropoutKey

    def apply_to(self, x: Tensor) -> Tensor:
        """`x` `[..., in]` with entries zeroed, and the rest scaled up."""
        if is_capturing():
            raise ValueError("a model must be captured without adapters' dropout; set adapter.dropout to 0")
        dropout, tokens = self.dropout, self.draws.tokens
        key = fold(tokens.seed, tokens.step, Purpose.ADAPTER_DROPOUT, fold_name(0, dropout.name))
        keep, width = 1 - dropout.probability, x.shape[-1]
        columns = width if dropout.num_columns is None else dropout.num_columns
        mask = keep_mask(key, self.draws.ids.reshape(x.shape[:-1]), columns, keep, dropout.first, width)
        return x * mask.to(x.dtype).mul_(1 / keep)
