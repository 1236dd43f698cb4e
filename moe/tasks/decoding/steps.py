"""Interface between autoregressive models and decoding algorithms."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import collective


class DecodingSteps(Protocol):
    """Batch of sequences, extended by one token per row and step."""

    def next(self, tokens: Tensor) -> Tensor:
        """Append `tokens` int64 `[B]`; return the next-token logits `[B, V]`."""

    def take_rows(self, rows: Tensor) -> None:
        """Select rows by int64 index, in this order; indices may repeat."""


_SHARE_LEFT = 0.75


def is_sparse(num_live: int, num_rows: int) -> bool:
    """Whether few enough rows are live that dropping the others is worth copying all caches."""
    return num_live < _SHARE_LEFT * num_rows


def any_rank(flag: bool, device: torch.device, process_group: dist.ProcessGroup | None) -> bool:
    """Whether `flag` is set on any rank of `process_group`; `flag` itself without one. Collective."""
    if process_group is None:
        return flag
    anywhere = torch.tensor(int(flag), dtype=torch.int32, device=device)
    with collective("all-reduce of who is still decoding"):
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=process_group)
    return bool(anywhere)
