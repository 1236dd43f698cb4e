"""Random draws keyed by token as one operator, whose program may run at any step."""

from typing import Any

import torch
from torch import Tensor, fx

from moe.random import Purpose, dropout, fold, jitter
from moe.routing import TokenContext
from moe.sharding.operands import operands, shape_of
from moe.sharding.rules.registry import register
from moe.sharding.rules.rule import Rule


def apply_dropout(
    x: Tensor, probability: float, ids: Tensor, tokens: TokenContext, layer: int, purpose: Purpose
) -> Tensor:
    """`moe.layers.draws.apply_dropout` by the operator."""
    return x if probability == 0 else x * _factors("dropout", probability, x, ids, tokens, layer, purpose)


def apply_jitter(x: Tensor, width: float, ids: Tensor, tokens: TokenContext, layer: int) -> Tensor:
    """`moe.layers.draws.apply_jitter` by the operator."""
    return x * _factors("jitter", width, x, ids, tokens, layer, Purpose.INPUT_JITTER)


def _factors(
    kind: str, amount: float, x: Tensor, ids: Tensor, tokens: TokenContext, layer: int, purpose: Purpose
) -> Tensor:
    number, step = (0, tokens.step) if isinstance(tokens.step, Tensor) else (tokens.step, None)
    return torch.ops.shardyard.keyed_factors(
        ids, step, kind, amount, x.shape[-1], x.dtype, number, tokens.seed, layer, int(purpose)
    )


@torch.library.custom_op("shardyard::keyed_factors", mutates_args=())
def keyed_factors(
    ids: Tensor,
    step: Tensor | None,
    kind: str,
    amount: float,
    num_columns: int,
    dtype: torch.dtype,
    number: int,
    seed: int,
    layer: int,
    purpose: int,
) -> Tensor:
    """`[T, num_columns]`: random factors, one row for each of `ids` int64 `[T]`. The step is `step`, or `number` if
    that is None."""
    key = fold(seed, number if step is None else int(step), layer, purpose)
    factors = torch.ones(ids.shape[0], num_columns, dtype=dtype, device=ids.device)
    return (dropout if kind == "dropout" else jitter)(factors, amount, key, ids)


@keyed_factors.register_fake
def _(ids: Tensor, step: Tensor | None, kind: str, amount: float, num_columns: int, dtype: torch.dtype,
      *others: Any) -> Tensor:  # fmt: skip
    return ids.new_empty((*ids.shape, num_columns), dtype=dtype)


def _rule(node: fx.Node) -> Rule:
    (num_tokens,) = shape_of(node.args[0])  # type: ignore[arg-type]
    operand_dims = ((("t",),), ())[: len(operands(node))]
    return Rule(operand_dims, ((("t",), ()),), {"t": num_tokens} if num_tokens > 1 else {})


register(torch.ops.shardyard.keyed_factors.default, _rule)
