"""Dispatch by DeepEP (https://github.com/deepseek-ai/DeepEP), where it is installed: a token is sent once to each rank
with experts of it, over NVLink and RDMA, and its outputs return as one sum per rank.

Written for `deep_ep.Buffer` of release 1.2 (deep_ep/buffer.py), as Megatron-Core calls it
(megatron/core/transformer/moe/fused_a2a.py). Calls are synchronous with the current stream.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe.dispatch.dispatcher import (
    AllToAllDispatcher,
    Combiner,
    DispatchedRows,
    Dispatcher,
    LocalDispatcher,
    min_chunks,
)
from moe.dispatch.row_exchange import AllToAll, Traffic
from moe.experts import LocalExperts
from moe.parallel import Layout
from moe.parallel.accelerator import accelerator
from moe.parallel.collective import collective
from moe.parallel.stopwatch import Stopwatch
from moe.routing import Choices
from moe.routing.choices import SortedChoices
from moe.spec import spec_error

_PACKAGE = "deep_ep"
_MIN_CAPABILITY = 9
"""Lowest major compute capability with the instructions that DeepEP is compiled for: Hopper."""
_ROW_BYTES = 16
"""Rows have a multiple of this many bytes."""
_MAX_PER_TOKEN = 32
"""Most choices of a token: its kernels have one thread of a warp for each."""
_CHECKED_TOKENS = 64
_MAX_ERROR = 0.02
"""Largest relative difference of sums in bfloat16."""


class ReceivedTokens(NamedTuple):
    """Tokens that have experts on this rank."""

    x: Tensor
    """`[n, M]`"""
    expert: Tensor
    """int64 `[n, K]`: local experts; -1 for choices of other ranks."""
    weight: Tensor
    """float32 `[n, K]`"""
    counts: list[int]
    """Choices of each local expert."""
    handle: Any
    """DeepEP's handle of the exchange, for the way back."""


def allocate_buffer(group: dist.ProcessGroup, row_bytes: int) -> Any:
    """`deep_ep.Buffer` of a group for rows of `row_bytes`. Collective over the group."""
    buffer_class, num_ranks = importlib.import_module(_PACKAGE).Buffer, group.size()
    configs = buffer_class.get_dispatch_config(num_ranks), buffer_class.get_combine_config(num_ranks)
    return buffer_class(
        group,
        max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs),
        max(config.get_rdma_buffer_size_hint(row_bytes, num_ranks) for config in configs),
    )


class DeepEPExchange:
    """Exchanges of one layer by a `deep_ep.Buffer`, timed. All ranks of its group make the same calls."""

    def __init__(self, buffer: Any, device: torch.device, label: str) -> None:
        """`label` names the layer in errors."""
        self._buffer, self._label = buffer, label
        self._index_dtype = getattr(importlib.import_module(_PACKAGE), "topk_idx_t", torch.int64)
        """dtype of expert indices, which DeepEP is compiled with."""
        self.transfer = Stopwatch(device)

    def dispatch(self, x: Tensor, expert: Tensor, weight: Tensor, num_experts: int) -> ReceivedTokens:
        """Send tokens `x` `[T, M]`, T at least 1, to the ranks of their experts. `expert` int64 `[T, K]` are indices
        among all experts, -1 for none; `weight` `[T, K]`."""
        expert = expert.to(self._index_dtype)
        with collective(f"dispatch by DeepEP, {self._label}"), self.transfer.running():
            per_rank, per_rdma_rank, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(expert, num_experts)
            x, expert, weight, counts, handle, _ = self._buffer.dispatch(
                x.contiguous(),
                topk_idx=expert,
                topk_weights=weight.contiguous(),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_rdma_rank,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
            )
        return ReceivedTokens(x, expert.long(), weight, counts, handle)

    def dispatch_again(self, x: Tensor, handle: Any) -> Tensor:
        """Send other tokens `[T, M]` the same way."""
        with collective(f"dispatch by DeepEP, {self._label}"), self.transfer.running():
            received: Tensor = self._buffer.dispatch(x.contiguous(), handle=handle)[0]
        return received

    def combine(self, x: Tensor, handle: Any, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return received tokens `x` `[n, M]`, and their `weight` `[n, K]`, to the ranks that they came from, which
        sum them by token: `[T, M]` and `[T, K]`."""
        with collective(f"combination by DeepEP, {self._label}"), self.transfer.running():
            sums, weight_sums, _ = self._buffer.combine(x.contiguous(), handle, topk_weights=weight)
        return sums, weight_sums


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, expert: Tensor, num_experts: int, exchange: DeepEPExchange
    ) -> tuple[Tensor, Tensor, Tensor, list[int], Any]:
        received = exchange.dispatch(x, expert, weight, num_experts)
        ctx.exchange, ctx.handle, ctx.weight_dtype = exchange, received.handle, weight.dtype
        ctx.mark_non_differentiable(received.expert)
        return received.x, received.weight, received.expert, received.counts, received.handle

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None, None, None]:
        d_received, d_received_weight, *_ = gradients
        d_x, d_weight = ctx.exchange.combine(
            d_received, ctx.handle, d_received_weight.to(ctx.weight_dtype).contiguous()
        )
        return d_x, d_weight, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any, exchange: DeepEPExchange) -> Tensor:
        ctx.exchange, ctx.handle = exchange, handle
        return exchange.combine(x, handle)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.dispatch_again(gradients[0], ctx.handle), None, None


@dataclass(frozen=True)
class DeepEPCombiner(Combiner):
    """Combiner that sums a token's outputs on each rank, and then these sums on the token's rank."""

    local: Combiner
    handle: Any
    exchange: DeepEPExchange
    num_tokens: int

    def combine(self, outputs: Tensor) -> Tensor:
        sums: Tensor = _Combine.apply(self.local.combine(outputs), self.handle, self.exchange)
        return sums[: self.num_tokens]


class DeepEPDispatcher(Dispatcher):
    """Expert-parallel dispatch by DeepEP. `plain` takes its place if experts choose tokens, and if a rank would receive
    more rows than `plain.max_rows`."""

    def __init__(self, exchange: DeepEPExchange, plain: AllToAllDispatcher) -> None:
        self._exchange, self._plain, self._local = exchange, plain, LocalDispatcher()
        self._byte_counts: list[Callable[[], Tensor]] = []
        """Bytes of each call, on their way to the host."""

    def begin(self, choices: Choices) -> bool:
        return self._plain.begin(choices) if self._plain_counts_rows(choices) else False

    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> DispatchedRows:
        if self._plain_counts_rows(choices):
            host_counts, counts = self._plain.take_counts(choices).wait()
            if choices.by_token is None or self._exceeds_bound(counts):
                return self._plain.gather_rows(x, choices.to_rows(host_counts.tolist()), counts, experts)
        by_token = choices.by_token
        assert by_token is not None
        expert = torch.where(by_token.kept, by_token.expert, -1)
        num_tokens, weight = len(x), by_token.weight
        if not num_tokens:  # a rank without tokens sends one that has no expert, and joins the backward pass
            x, weight = (torch.cat((rows, rows.new_zeros(1, rows.shape[1]))) for rows in (x, weight))
            expert = expert.new_full(weight.shape, -1)
        num_experts = choices.load.numel()
        received_x, received_weight, received_expert, counts, handle = _Dispatch.apply(
            x, weight, expert, num_experts, self._exchange
        )
        self._count_rows(expert, received_x, num_experts)
        load = accelerator(x.device).take(torch.tensor(counts))
        local_choices = SortedChoices(
            received_expert.clamp(min=0), received_weight, received_expert >= 0, len(counts), known_load=load
        )
        rows, row_weight, computation, combiner = self._local(received_x, local_choices, experts)
        return DispatchedRows(
            rows, row_weight, computation, DeepEPCombiner(combiner, handle, self._exchange, num_tokens)
        )

    def _plain_counts_rows(self, choices: Choices) -> bool:
        return choices.by_token is None or self._plain.max_rows is not None

    def _exceeds_bound(self, counts: Tensor) -> bool:
        """Whether any rank receives too many rows; the same on all ranks."""
        max_rows = self._plain.max_rows
        return max_rows is not None and min_chunks(counts.transpose(0, 1), max_rows) > 1

    def _count_rows(self, expert: Tensor, received_x: Tensor, num_experts: int) -> None:
        """Count the rows that cross between ranks in both passes, in both directions."""
        if not torch.is_grad_enabled():
            return
        num_ranks, rank = self._plain.transport.num_ranks, self._plain.transport.rank
        ranks = torch.arange(num_ranks, device=expert.device)
        is_sent = (expert.div(num_experts // num_ranks, rounding_mode="floor")[:, :, None] == ranks).any(1)
        own = is_sent[:, rank].sum()
        num_bytes = 2 * (is_sent.sum() + len(received_x) - 2 * own) * received_x[:1].nbytes
        self._byte_counts.append(accelerator(expert.device).begin_copy_to_host(num_bytes[None]))

    def take_traffic(self) -> Traffic:
        byte_counts, self._byte_counts = self._byte_counts, []
        num_bytes = sum(int(count_on_host()) for count_on_host in byte_counts)
        return Traffic(num_bytes, self._exchange.transfer.take()) + self._plain.take_traffic()


class DeepEP:
    """Decides by which dispatcher the layers of a model on this layout exchange tokens.

    It is DeepEP's if it is installed, or required by `parallel.dispatch: deepep`, and its rows equal those of a plain
    all-to-all on all ranks of the group. Otherwise a warning says once why not.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, dispatch: str | None) -> None:
        """`dispatch`: `parallel.dispatch`. Raises SpecError if DeepEP is required and not installed."""
        self._layout, self._dtype = layout, dtype
        self._buffers: dict[int, Any] = {}
        self._is_wanted = dispatch in (None, "deepep") and importlib.util.find_spec(_PACKAGE) is not None
        if dispatch == "deepep" and not self._is_wanted:
            remedy = "install DeepEP for this version of torch and CUDA, or omit dispatch"
            raise spec_error("not_installed", "parallel.dispatch", dispatch, "requires the package deep_ep", remedy)

    def dispatcher(self, plain: Dispatcher, model_dim: int, per_token: int, label: str) -> Dispatcher:
        """Dispatcher of a layer that would use `plain` without DeepEP. Collective over the group of its experts."""
        group = self._layout.group("expert", "expert_tensor")
        if not self._is_wanted or group is None or not isinstance(plain, AllToAllDispatcher):
            return plain
        row_bytes = model_dim * self._dtype.itemsize
        reason = why_unsupported(self._layout.device, self._dtype, row_bytes, per_token, plain.parts_per_expert)
        reason = self._reason_of_any(group, reason)
        if reason is None:
            reason = self._reason_of_any(group, self._failure(group, row_bytes, model_dim))
        if reason is None:
            return DeepEPDispatcher(DeepEPExchange(self._buffers[row_bytes], self._layout.device, label), plain)
        warnings.warn(f"DeepEP is not used: {reason}", stacklevel=2)
        self._is_wanted = False  # for the other layers
        return plain

    def _failure(self, group: dist.ProcessGroup, row_bytes: int, model_dim: int) -> str | None:
        """Reason why DeepEP fails on this rank; None if it does not."""
        if row_bytes in self._buffers:
            return None
        try:
            self._buffers[row_bytes] = allocate_buffer(group, row_bytes)
            return _difference(self._buffers[row_bytes], group, self._layout.device, self._dtype, model_dim)
        except Exception as error:
            return f"it fails: {type(error).__name__}: {error}"

    def _reason_of_any(self, group: dist.ProcessGroup, reason: str | None) -> str | None:
        """`reason`, or that another rank has one."""
        is_fine = torch.tensor([reason is None], dtype=torch.int32, device=self._layout.device)
        with collective("agreement on DeepEP"):
            dist.all_reduce(is_fine, dist.ReduceOp.MIN, group=group)
        return reason or (None if is_fine.item() else "it cannot be used on another rank")


def why_unsupported(
    device: torch.device, dtype: torch.dtype, row_bytes: int, per_token: int, parts_per_expert: int
) -> str | None:
    """Reason why DeepEP does not support rows of a dtype on a device; None if it does."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "it requires NVIDIA GPUs"
    if (capability := torch.cuda.get_device_capability(device))[0] < _MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below {_MIN_CAPABILITY}.0"
    if dtype != torch.bfloat16:
        return f"it sends rows of bfloat16, not {dtype}"
    if row_bytes % _ROW_BYTES:
        return f"rows of {row_bytes} bytes are no multiple of {_ROW_BYTES}"
    if per_token > _MAX_PER_TOKEN:
        return f"tokens have up to {per_token} experts; it supports {_MAX_PER_TOKEN}"
    if parts_per_expert > 1:
        return f"each expert is split over {parts_per_expert} ranks"
    return None


def _difference(
    buffer: Any, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, model_dim: int
) -> str | None:
    """Difference, in words, between DeepEP's exchange of random tokens and a plain all-to-all; None if there is none.
    Collective over the group."""
    exchange, plain = DeepEPExchange(buffer, device, "start-up check"), AllToAll(group, device, "start-up check")
    num_ranks, experts_per_rank = group.size(), 2
    num_experts = num_ranks * experts_per_rank
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(_CHECKED_TOKENS, model_dim, generator=generator).to(device, dtype)
    order = torch.rand(_CHECKED_TOKENS, num_experts, generator=generator).argsort(1)
    weight = torch.rand(_CHECKED_TOKENS, 2, generator=generator).to(device)
    expert = order[:, :2].clone()
    expert[::5, 1] = -1
    rank_of_choice = expert.div(experts_per_rank, rounding_mode="floor")
    is_sent = (rank_of_choice[:, :, None] == torch.arange(num_ranks)).any(1).t()  # [ranks, T]
    token = is_sent.nonzero()[:, 1].to(device)
    send_counts = is_sent.sum(1)
    receive_counts = plain.exchange_counts(send_counts.to(device)[:, None]).flatten().tolist()
    expected_x = plain.start(x[token], send_counts.tolist(), receive_counts).wait()

    received = exchange.dispatch(x, expert.to(device), weight, num_experts)
    if not torch.equal(_sorted_rows(received.x), _sorted_rows(expected_x)):
        return "its rows differ from those of an all-to-all"
    factor = group.rank() + 1.0
    sums, weight_sums = exchange.combine(received.x * factor, received.handle, received.weight)
    returned = plain.start(expected_x * factor, receive_counts, send_counts.tolist()).wait()
    expected_sums = torch.zeros(x.shape, device=device).index_add_(0, token, returned.float())
    error = (sums.float() - expected_sums).norm() / expected_sums.norm()
    kept_weight = torch.where(expert.to(device) >= 0, weight, 0.0)
    if not error < _MAX_ERROR or weight_sums is None or not torch.equal(weight_sums.to(weight.dtype), kept_weight):
        return f"its sums differ from those of an all-to-all (relative difference {error:.3g})"
    return None


def _sorted_rows(rows: Tensor) -> Tensor:
    """Rows in an order that does not depend on theirs."""
    return rows[rows.double().sum(1).argsort()]
