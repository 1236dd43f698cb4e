"""Softmax attention over context ranks: each has the queries of its positions, and attends to the keys and values of
all, gathered in the order of positions.

A rank's positions are one or two runs of consecutive ones, so that each run is the last N of the row's first positions,
which `attend` takes without a mask of its own kind.
"""

import torch
from torch import Tensor

from moe.layers.attention_mask import AttentionMask
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
    if context is None or attention_mask.keys is not None:
        return attend(queries, keys, values, scale=scale, attention_mask=attention_mask, sinks=sinks)

    outputs = [
        attend(
            queries[:, :, run], keys[:, :, :stop], values[:, :, :stop],
            scale=scale, attention_mask=attention_mask.before(stop), sinks=sinks,
        )
        for run, stop in query_runs(context, queries.shape[2], keys.shape[2])
    ]  # fmt: skip
    return join_runs(outputs)


def query_runs(context: ContextShard | None, num_queries: int, num_keys: int) -> list[tuple[slice, int]]:
    """Runs of consecutive positions among this rank's `num_queries`: their indices among these, and the position after
    the last one. Without `context`, the queries are one run, the last of `num_keys` positions."""
    if context is None:
        return [(slice(0, num_queries), num_keys)]
    return [(own, run.stop) for run, own in context.local_slices()]


def join_runs(outputs: list[Tensor], dim: int = 2) -> Tensor:
    """`[B, n, N, d]` of the runs' outputs, in order."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim)
