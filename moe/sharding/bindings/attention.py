"""Attention as operators that one rule shards, and projections whose heads can be sharded."""

from torch import Tensor
from torch.nn import functional

from moe.layers.attention_mask import AttentionMask
from moe.layers.softmax_attention import (
    attend_fused,
    attend_in_block,
    attend_unfused,
    check_shapes,
    pad_to_one_width,
    runs_on_cpu,
)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    attention_mask: AttentionMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """`moe.layers.softmax_attention.attend` in the dtype of `queries`, without blocks of queries, tiles or compiled
    kernels."""
    check_shapes(queries, keys, values, attention_mask)
    num_queries, width = queries.shape[2], values.shape[-1]
    if num_queries == 0:
        return queries.new_empty((*queries.shape[:3], width))
    if runs_on_cpu(queries):
        queries, keys, values = pad_to_one_width(queries, keys, values)
        block = slice(0, num_queries)
        return attend_in_block(block, queries, keys, values, scale, attention_mask, sinks, may_tile=False)[..., :width]
    if sinks is not None:
        return attend_unfused(queries, keys, values, scale, attention_mask, sinks)
    return attend_fused(queries, keys, values, scale, attention_mask)


def project_keys_values(memory: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`moe.layers.grouped_query.project_keys_values` by two products. The heads of one product could not be sharded:
    all keys precede all values."""
    keys, values = (functional.linear(memory, matrix) for matrix in weight.unbind())
    return keys, values
