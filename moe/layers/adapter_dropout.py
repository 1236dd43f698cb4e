"""Dropout of the inputs of LoRA adapters, x before A, in training (PEFT's `lora_dropout`)."""

from dataclasses import dataclass, replace

from torch import Tensor

from moe.overrides import overridable
from moe.parallel import Layout, shard_of, shard_offsets
from moe.random import Purpose, fold, fold_name, keep_mask
from moe.routing import TokenContext


@dataclass(frozen=True)
class DropoutKey:
    """Key of all dropout in a pass, and the rows it applies to."""

    tokens: TokenContext
    ids: Tensor
    """int64 `[...]` for x `[..., in]`: global positions of the tokens in a matrix's input rows."""

    @classmethod
    def from_tokens(cls, tokens: TokenContext, ids: Tensor) -> "DropoutKey | None":
        """Key of a training pass; None in evaluation."""
        return cls(tokens, ids) if tokens.training else None


@dataclass(frozen=True)
class AdapterDropout:
    """Dropout of one adapter, with its own draws, keyed by (seed, step, name of its matrix, token)."""

    probability: float
    name: str
    """Name of the matrix in the whole model."""
    first: int = 0
    """First column of x on this rank; `num_columns` is the total number, None if this rank has all."""
    num_columns: int | None = None

    def for_shard(self, a: Tensor, layout: Layout) -> "AdapterDropout":
        """The same dropout for this rank's part of A `[r, in]`."""
        part = shard_of(a)
        return replace(self, first=shard_offsets(part, layout)[1], num_columns=part.shape[1])

    def masks_for(self, dropout_key: DropoutKey | None) -> "DropoutMasks | None":
        """Dropout masks of a pass; None without draws."""
        return None if dropout_key is None else DropoutMasks(self, dropout_key)


@dataclass(frozen=True)
class DropoutMasks:
    """Dropout masks of one adapter's input in one pass, regenerated on each use and never stored."""

    dropout: AdapterDropout
    dropout_key: DropoutKey

    @overridable
    def apply_to(self, x: Tensor) -> Tensor:
        """Zero entries of `x` `[..., in]` and scale up the others."""
        dropout, tokens = self.dropout, self.dropout_key.tokens
        key = fold(tokens.seed, tokens.step, Purpose.ADAPTER_DROPOUT, fold_name(0, dropout.name))
        keep, width = 1 - dropout.probability, x.shape[-1]
        columns = width if dropout.num_columns is None else dropout.num_columns
        mask = keep_mask(key, self.dropout_key.ids.reshape(x.shape[:-1]), columns, keep, dropout.first, width)
        return x * mask.to(x.dtype).mul_(1 / keep)
