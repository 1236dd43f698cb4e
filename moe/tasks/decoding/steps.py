"""Contract between a model that continues sequences and the search that chooses their tokens."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import collective


class DecodingSteps(Protocol):
    """Sequences of a model, as rows that grow by one token at a time."""

    def next(self, tokens: Tensor) -> Tensor:
        """Logits `[B, V]` of the token after `tokens` int64 `[B]`, which join their rows."""

    def take_rows(self, rows: Tensor) -> None:
        """Keep these rows alone, in this order (int64 indices, also several times the same)."""


_SHARE_LEFT = 0.75


def is_sparse(num_live: int, num_rows: int) -> bool:
    """Whether so few rows are unfinished that the finished ones are better dropped, which copies all caches."""
    return num_live < _SHARE_LEFT * num_rows


def any_rank(flag: bool, device: torch.device, together: dist.ProcessGroup | None) -> bool:
    """Whether `flag` is true on any rank of the group `together`; all its ranks must call this."""
    if together is None:
        return flag
    anywhere = torch.tensor(int(flag), dtype=torch.int32, device=device)
    with collective("all-reduce of who is still decoding"):
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=together)
    return bool(anywhere)
