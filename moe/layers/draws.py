"""Dropout and jitter of token rows, keyed by token."""

from torch import Tensor

from moe.overrides import overridable
from moe.random import Purpose, dropout, fold, jitter
from moe.routing import TokenContext


@overridable
def apply_dropout(
    x: Tensor, probability: float, ids: Tensor, tokens: TokenContext, layer: int, purpose: Purpose
) -> Tensor:
    """Dropout of `x` `[T, M]`: entries are zeroed with `probability` and the others scaled up, keyed by the seed and
    step of `tokens`, layer, purpose and `ids` int64 `[T]`."""
    return dropout(x, probability, fold(tokens.seed, tokens.step, layer, purpose), ids)


@overridable
def apply_jitter(x: Tensor, width: float, ids: Tensor, tokens: TokenContext, layer: int) -> Tensor:
    """Multiply each entry of `x` `[T, M]` by a draw from Uniform(1 - width, 1 + width), keyed as in
    `apply_dropout`."""
    return jitter(x, width, fold(tokens.seed, tokens.step, layer, Purpose.INPUT_JITTER), ids)
