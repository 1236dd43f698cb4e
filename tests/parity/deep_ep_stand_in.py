"""Stand-in for the package `deep_ep` on CPUs: the published interface, by plain all-to-alls over gloo.

Signatures and results are those of `deep_ep.Buffer` of release 1.2 (deep_ep/buffer.py of
https://github.com/deepseek-ai/DeepEP): a token goes once to each rank with experts of it, tokens arrive sorted by their
rank, expert indices become local ones, and `combine` adds without weights. A mock, since DeepEP needs GPUs with NVLink.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int64


class EventOverlap:
    """As deep_ep/utils.py has it; nothing to wait for."""

    def current_stream_wait(self) -> None:
        return None


class Config:
    """Hints for the sizes of buffers."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    calls: ClassVar[list[str]] = []
    """Names of the methods that were called."""
    fault: ClassVar[float] = 0.0
    """Added to each sum, for tests of the start-up check."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group, self.num_ranks, self.rank = group, group.size(), group.rank()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:  # fmt: skip
        assert topk_idx.dtype == topk_idx_t
        assert len(topk_idx)
        Buffer.calls.append("get_dispatch_layout")
        kept = topk_idx >= 0
        rank = topk_idx // (num_experts // self.num_ranks)
        in_rank = torch.zeros(len(topk_idx), self.num_ranks, dtype=torch.bool)
        for token in range(len(topk_idx)):
            in_rank[token, rank[token][kept[token]]] = True
        per_expert = torch.bincount(topk_idx[kept], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, EventOverlap()

    def dispatch(
        self, x: Tensor, handle: Any = None, num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None, is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None, topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None, expert_alignment: int = 1, num_worst_tokens: int = 0, config: Any = None,
        previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap]:  # fmt: skip
        assert x.is_contiguous()
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            Buffer.calls.append("dispatch with a handle")
            in_rank, receive_counts = handle
            return self._send(x, in_rank, receive_counts), None, None, None, None, EventOverlap()
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        Buffer.calls.append("dispatch")
        counts = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(counts, num_tokens_per_rank, group=self.group)
        receive_counts = counts.tolist()
        num_local = len(num_tokens_per_expert) // self.num_ranks
        first = self.rank * num_local
        index = self._send(topk_idx, is_token_in_rank, receive_counts) - first
        is_local = (index >= 0) & (index < num_local)
        index = torch.where(is_local, index, -1)
        weight = torch.where(is_local, self._send(topk_weights, is_token_in_rank, receive_counts), 0.0)
        received = self._send(x, is_token_in_rank, receive_counts)
        per_expert = [int((index == expert).sum()) for expert in range(num_local)]
        return received, index, weight, per_expert, (is_token_in_rank, receive_counts), EventOverlap()

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, config: Any = None,
        previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:  # fmt: skip
        assert x.is_contiguous()
        Buffer.calls.append("combine")
        in_rank, receive_counts = handle
        weights = None if topk_weights is None else self._return(topk_weights, in_rank, receive_counts)
        return self._return(x, in_rank, receive_counts) + Buffer.fault, weights, EventOverlap()

    def _send(self, rows: Tensor, in_rank: Tensor, receive_counts: list[int]) -> Tensor:
        sent = torch.cat([rows[in_rank[:, rank]] for rank in range(self.num_ranks)])
        received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        dist.all_to_all_single(received, sent, receive_counts, in_rank.sum(0).tolist(), group=self.group)
        return received

    def _return(self, rows: Tensor, in_rank: Tensor, receive_counts: list[int]) -> Tensor:
        returned = rows.new_empty(int(in_rank.sum()), *rows.shape[1:])
        dist.all_to_all_single(returned, rows, in_rank.sum(0).tolist(), receive_counts, group=self.group)
        wide = torch.promote_types(rows.dtype, torch.float32)
        sums = rows.new_zeros(len(in_rank), *rows.shape[1:], dtype=wide)
        first = 0
        for rank in range(self.num_ranks):
            tokens = in_rank[:, rank].nonzero().flatten()
            sums.index_add_(0, tokens, returned[first : first + len(tokens)].to(wide))
            first += len(tokens)
        return sums.to(rows.dtype)


@contextmanager
def installed(fault: float = 0.0) -> Iterator[list[str]]:
    """Install the stand-in as `deep_ep`; give the names of its calls."""
    module = types.ModuleType("deep_ep")
    module.__spec__ = types.SimpleNamespace(name="deep_ep")  # type: ignore[assignment]
    module.Buffer, module.topk_idx_t = Buffer, topk_idx_t  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module
    Buffer.calls, Buffer.fault = [], fault
    try:
        yield Buffer.calls
    finally:
        del sys.modules["deep_ep"]
