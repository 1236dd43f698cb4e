"""Dropout of the inputs of adapters: of x before A, in training (PEFT's `lora_dropout`)."""

from dataclasses import dataclass, replace

from torch import Tensor

from moe.parallel import Layout, first_of, part_of
from moe.random import Purpose, fold, fold_name, keep_mask
from moe.routing import TokenContext
from moe.sharding.hints.annotate import is_capturing


@dataclass(frozen=True)
class DropoutKey:
    """The key of all random draws of a pass, and the rows that they are for."""

    tokens: TokenContext
    ids: Tensor
    """int64: the global positions of the tokens of a matrix's input rows, `[...]` for x `[..., in]`."""

    @classmethod
    def from_tokens(cls, tokens: TokenContext, ids: Tensor) -> "DropoutKey | None":
        """The key of a pass in training; None in any other pass."""
        return cls(tokens, ids) if tokens.training else None


@dataclass(frozen=True)
class AdapterDropout:
    """The dropout of one adapter. Its draws are its own, keyed by (seed, step, name of its matrix, token)."""

    probability: float
    name: str
    """Name of the matrix in the whole model."""
    first: int = 0
    """First column of x that this rank has, and the number of columns in all; by default this rank has all of them."""
    num_columns: int | None = None

    def wired(self, a: Tensor, layout: Layout) -> "AdapterDropout":
        """This dropout for a rank that has a part of A `[r, in]`."""
        part = part_of(a)
        return replace(self, first=first_of(part, layout)[1], num_columns=part.shape[1])

    def by(self, draws: DropoutKey | None) -> "Dropped | None":
        """The masks of a pass; None if nothing is drawn."""
        return None if draws is None else Dropped(self, draws)


@dataclass(frozen=True)
class Dropped:
    """The dropout masks of one adapter's inputs in one pass. They are recomputed wherever they are needed, and never
    kept."""

    dropout: AdapterDropout
    draws: DropoutKey

    def apply_to(self, x: Tensor) -> Tensor:
        """`x` `[..., in]` with entries set to zero and the rest scaled up."""
        if is_capturing():
            raise ValueError("a model must be captured without adapters' dropout; set adapter.dropout to 0")
        dropout, tokens = self.dropout, self.draws.tokens
        key = fold(tokens.seed, tokens.step, Purpose.ADAPTER_DROPOUT, fold_name(0, dropout.name))
        keep, width = 1 - dropout.probability, x.shape[-1]
        columns = width if dropout.num_columns is None else dropout.num_columns
        mask = keep_mask(key, self.draws.ids.reshape(x.shape[:-1]), columns, keep, dropout.first, width)
        return x * mask.to(x.dtype).mul_(1 / keep)
