"""Substitutes for torch functions whose operators have no rules. They compute the same, and are captured instead."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`F.embedding_bag`, `[B, M]`, by a look-up in the table `weight` `[V, M]` and a reduction: over the last dimension
    of `input` `[B, L]`, or of `input` `[N]` over bags that begin at `offsets` `[B]`. Empty bags give zeros."""
    if max_norm is not None or sparse or scale_grad_by_freq:  # the refusal of the operator names it
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight)
    dtype = rows.dtype
    rows = rows.to(torch.promote_types(dtype, torch.float32))  # counts and sums stop growing in bfloat16
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counts = torch.ones_like(input, dtype=rows.dtype)
    if padding_idx is not None:
        counts = (input != padding_idx % weight.shape[0]).to(rows.dtype)
    if input.dim() == 2:
        return _reduce_rows(mode, rows, counts, lambda x: x.sum(1), lambda x: x.max(1).values).to(dtype)
    assert offsets is not None
    begins = offsets[:-1] if include_last_offset else offsets
    bags = torch.searchsorted(begins, torch.arange(len(input), device=input.device), right=True) - 1

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(len(begins), *x.shape[1:]).index_add(0, bags, x)

    def greatest(x: Tensor) -> Tensor:
        lowest = x.new_full((len(begins), *x.shape[1:]), -torch.inf)
        return lowest.scatter_reduce(0, bags.unsqueeze(-1).expand_as(x), x, "amax")

    return _reduce_rows(mode, rows, counts, total, greatest).to(dtype)


def _reduce_rows(
    mode: str, rows: Tensor, counts: Tensor, total: Callable[[Tensor], Tensor], greatest: Callable[[Tensor], Tensor]
) -> Tensor:
    """Reduction of the rows whose count is 1; rows whose count is 0, those of the padding index, are left out."""
    in_bag = total(counts).unsqueeze(-1)
    if mode == "max":
        maxima = greatest(rows.masked_fill(counts.unsqueeze(-1) == 0, -torch.inf))
        return torch.where(in_bag > 0, maxima, 0.0)
    sums = total(rows * counts.unsqueeze(-1))
    return sums / in_bag.clamp_min(1) if mode == "mean" else sums


def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """`torch.histc`, `[bins]`: counts of the elements in bins of equal width from `min` to `max`, or from the least to
    the greatest element where the bounds are equal."""
    if min > max:
        return torch.histc(input, bins, min, max)  # raises
    x = input.reshape(-1)
    if min == max:
        low, high = x.min(), x.max()
        low, high = torch.where(low == high, low - 1, low), torch.where(low == high, high + 1, high)
    else:
        low, high = x.new_tensor(min), x.new_tensor(max)
    is_counted = (x >= low) & (x <= high)
    position = ((x - low) * (bins / (high - low))).nan_to_num(0, 0, 0).to(torch.int64).clamp(0, bins - 1)
    return x.new_zeros(bins).index_add(0, position, is_counted.to(x.dtype))


def cond(
    predicate: Any, true_branch: Callable[..., Any], false_branch: Callable[..., Any], operands: Sequence[Any] = ()
) -> Any:
    """`torch.cond`: computes both branches and selects one result."""
    if not isinstance(predicate, Tensor):
        return (true_branch if predicate else false_branch)(*operands)
    true_result, false_result = true_branch(*operands), false_branch(*operands)
    return pytree.tree_map(
        lambda true_leaf, false_leaf: torch.where(predicate, true_leaf, false_leaf), true_result, false_result
    )


@contextmanager
def grouped_experts(module: nn.Module) -> Iterator[None]:
    """Context in which experts of transformers models with `experts_implementation="eager"` are grouped products, whose
    shapes do not depend on the data, instead of a loop over the experts that have tokens."""
    configs: dict[int, Any] = {}
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "_experts_implementation", None) == "eager":
            configs[id(config)] = config
    try:
        for config in configs.values():
            config._experts_implementation = "grouped_mm"
        yield
    finally:
        for config in configs.values():
            config._experts_implementation = "eager"


_SUBSTITUTES = {F.embedding_bag: embedding_bag, torch.histc: histc, Tensor.histc: histc}


class Substitutes(TorchFunctionMode):
    """Calls substitutes in place of their functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _SUBSTITUTES.get(func, func)(*args, **(kwargs or {}))
