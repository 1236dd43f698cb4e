"""Softmax attention over context ranks, each of which has two chunks of every row's positions, and the queries, keys
and values of these.

`Layout.context_exchange` says how queries meet the keys and values of other ranks: these are gathered, arrive rank by
rank (ring), or ranks exchange positions for heads.
"""

import torch
from torch import Tensor

from moe.layers.attention_mask import AttentionMask
from moe.layers.head_exchange import attend_by_heads
from moe.layers.ring_attention import attend_to_gathered, ring_attend
from moe.layers.softmax_attention import attend
from moe.parallel import ContextShard


def attend_over_context(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    context: ContextShard | None,
    scale: float,
    attention_mask: AttentionMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `attend` `[B, n, N, dv]` of this context rank's `queries` `[B, n, N, d]` to the keys of all, of which this
    rank has `keys` `[B, m, N, d]` and `values` `[B, m, N, dv]`. The mask covers whole rows. Collective. Without
    `context`, `attend` itself."""
    if context is not None and context.exchange != "gather":
        exchange = ring_attend if context.exchange == "ring" else attend_by_heads
        return exchange(queries, keys, values, context=context, scale=scale, attention_mask=attention_mask, sinks=sinks)
    if context is not None:
        keys, values = context.gather(keys, values, dim=2)
    return attend_to_rows(
        queries, keys, values, context=context, scale=scale, attention_mask=attention_mask, sinks=sinks
    )


def attend_to_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    context: ContextShard | None,
    scale: float,
    attention_mask: AttentionMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend_over_context` with `keys` `[B, m, L, d]` and `values` `[B, m, L, dv]` of whole rows."""
    if context is None:
        return attend(queries, keys, values, scale=scale, attention_mask=attention_mask, sinks=sinks)
    return attend_to_gathered(
        queries, keys, values, context=context, scale=scale, attention_mask=attention_mask, sinks=sinks
    )


def query_runs(context: ContextShard | None, num_queries: int, num_keys: int) -> list[tuple[slice, int]]:
    """Runs of consecutive positions among this rank's `num_queries`: their indices among these, and the position after
    the last one. Without `context`, the queries are one run, the last of `num_keys` positions."""
    if context is None:
        return [(slice(0, num_queries), num_keys)]
    return [(own, run.stop) for run, own in context.local_slices()]


def join_runs(outputs: list[Tensor], dim: int = 2) -> Tensor:
    """`[B, n, N, d]` of the runs' outputs, in order."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim)
