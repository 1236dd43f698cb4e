"""Interface between autoregressive models and decoding algorithms."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import collective
from moe.tasks.sequence_model import DecodingState, SequenceModel


class DecodingSteps(Protocol):
    """Batch of sequences, extended by one token per row and step."""

    def next(self, tokens: Tensor) -> Tensor:
        """Append `tokens` int64 `[B]`; return the next-token logits `[B, V]`."""

    def take_rows(self, rows: Tensor) -> None:
        """Select rows by int64 index, in this order; indices may repeat."""


_MAX_LIVE_SHARE = 0.75


def should_drop_rows(num_live: int, num_rows: int) -> bool:
    """Whether few enough rows are live that dropping the others is worth copying all caches."""
    return num_live < _MAX_LIVE_SHARE * num_rows


def any_rank(flag: bool, device: torch.device, process_group: dist.ProcessGroup | None) -> bool:
    """Whether `flag` is set on any rank of `process_group`; `flag` itself without one. Collective."""
    if process_group is None:
        return flag
    anywhere = torch.tensor(int(flag), dtype=torch.int32, device=device)
    with collective("all-reduce of unfinished decoding"):
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=process_group)
    return bool(anywhere)


class ModelSteps:
    """Rows of tokens and their KV caches: `DecodingSteps` of a sequence model."""

    @torch.no_grad()
    def __init__(
        self,
        model: SequenceModel,
        state: DecodingState,
        tokens: Tensor,
        padding: Tensor | None = None,
        *,
        excluded_tokens: Sequence[int] = (),
    ) -> None:
        """Append the first `tokens` int64 `[B, N]`, padded as in `extend`. `excluded_tokens`: tokens that are never
        chosen."""
        self._model, self._state, self._excluded_tokens = model, state, list(excluded_tokens)
        self.logits = self._extend(tokens, padding)
        """`[B, V]`: next-token logits after the last extension, with its rows."""

    def next(self, tokens: Tensor) -> Tensor:
        self.logits = self._extend(tokens[:, None])
        return self.logits

    def take_rows(self, rows: Tensor) -> None:
        self._state.take_rows(rows)

    def _extend(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        logits = self._model.extend(tokens, self._state, padding)
        if self._excluded_tokens:
            logits[:, self._excluded_tokens] = -torch.inf
        return logits
