"""Recurrences and convolutions along rows that are split over context ranks, against one position at a time on one
process: outputs and every gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.layers import chunks
from moe.layers.context_chunks import ChunkDocuments, ContextChunks
from moe.layers.delta_rule import gated_delta_rule_of_chunks, gated_delta_rule_reference
from moe.layers.short_convolution import short_convolution_of_chunks, short_convolution_reference
from moe.layers.state_space import state_space_of_chunks, state_space_reference
from moe.parallel import ContextShard
from tests.grid import num_cases
from tests.parity.gloo_ranks import Pools
from tests.unit.layers.gradients import document_runs

D = torch.float64


@dataclass(frozen=True)
class Case:
    """Inputs of a function of rows, by a seed."""

    function: str
    rows: int
    length: int
    groups: int
    repeats: int
    key_dim: int
    value_dim: int
    width: int
    """Positions of a convolution."""
    strongest: float
    """The strongest decay."""
    documents: Tensor | None
    chunk: int = 64
    """Positions that are computed together."""
    seed: int = 0

    def inputs(self) -> list[Tensor]:
        """Inputs `[B, L, ...]`; of a convolution, also weights `[c, w]`."""
        draws = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=D, generator=draws)

        rows, heads = (self.rows, self.length), self.groups * self.repeats
        if self.function == "convolution":
            return [normal(*rows, heads), normal(heads, self.width)]
        q, k = (normal(*rows, self.groups, self.key_dim) for _ in range(2))
        v = normal(*rows, heads, self.value_dim)
        log_decay = -self.strongest * torch.rand(*rows, heads, dtype=D, generator=draws) ** 4
        if self.function == "state space":
            return [q, k, v, log_decay]
        return [q, k / k.norm(dim=-1, keepdim=True), v, log_decay, normal(*rows, heads).sigmoid()]

    @property
    def upstream(self) -> Tensor:
        """Gradient of the outputs `[B, L, ...]`."""
        heads = self.groups * self.repeats
        shape = (heads,) if self.function == "convolution" else (heads, self.value_dim)
        return torch.randn(
            self.rows, self.length, *shape, dtype=D, generator=torch.Generator().manual_seed(self.seed + 1)
        )

    def reference(self, *inputs: Tensor) -> Tensor:
        """Outputs `[B, L, ...]`, one position at a time."""
        if self.function == "convolution":
            return short_convolution_reference(*inputs, documents=self.documents)
        functions: dict[str, Callable[..., Any]] = {
            "state space": state_space_reference, "delta rule": gated_delta_rule_reference,
        }  # fmt: skip
        return functions[self.function](*inputs, documents=self.documents)[0]


SPLIT: dict[str, Callable[..., Tensor]] = {
    "convolution": short_convolution_of_chunks,
    "state space": state_space_of_chunks,
    "delta rule": gated_delta_rule_of_chunks,
}


def own_positions(length: int, rank: int, num_ranks: int) -> list[int]:
    """Positions of a context rank."""
    size = -(-length // (2 * num_ranks))
    return [position for position in range(length) if position // size in (rank, 2 * num_ranks - 1 - rank)]


def chunks_of(case: Case) -> ContextChunks:
    """This rank's chunks of the rows of a case."""
    shard = ContextShard(case.length, dist.group.WORLD)  # type: ignore[arg-type]
    return ContextChunks(shard, None if case.documents is None else ChunkDocuments(case.documents, shard.chunks))


def on_rank(case: Case) -> tuple[Tensor, list[Tensor]]:
    """(outputs of this rank's positions, gradients of its inputs)"""
    positions = own_positions(case.length, dist.get_rank(), dist.get_world_size())
    inputs = [tensor if tensor.dim() == 2 else tensor[:, positions] for tensor in case.inputs()]
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    context = chunks_of(case)
    with pytest.MonkeyPatch.context() as patch:  # gives short rows several chunks
        patch.setattr(chunks, "CHUNK", case.chunk)
        patch.setattr(chunks, "CHUNKS_AT_ONCE", 2)
        out = SPLIT[case.function](*inputs, context)
        out.backward(case.upstream[:, positions])
    return out.detach(), [tensor.grad for tensor in inputs]  # type: ignore[misc]


def assert_same_as_one_process(ranks: Pools, num_ranks: int, case: Case) -> None:
    """Outputs and gradients of each rank are those of its positions; gradients of weights add up."""
    inputs = [tensor.requires_grad_() for tensor in case.inputs()]
    expected = case.reference(*inputs)
    zero = sum(tensor.sum() * 0 for tensor in inputs)  # gives rows of padding a gradient, too
    ((expected * case.upstream).sum() + zero).backward()
    weight_sums = [torch.zeros_like(tensor) for tensor in inputs if tensor.dim() == 2]
    for rank, (out, gradients) in enumerate(ranks[num_ranks].run(on_rank, case)):
        positions = own_positions(case.length, rank, num_ranks)
        torch.testing.assert_close(out, expected[:, positions], rtol=1e-12, atol=1e-12)
        for tensor, gradient in zip(inputs, gradients, strict=True):
            if tensor.dim() == 2:
                weight_sums[0] += gradient
            else:
                assert tensor.grad is not None
                torch.testing.assert_close(gradient, tensor.grad[:, positions], rtol=1e-12, atol=1e-12)
    for total, tensor in zip(weight_sums, (tensor for tensor in inputs if tensor.dim() == 2), strict=True):
        torch.testing.assert_close(total, tensor.grad, rtol=1e-12, atol=1e-12)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows, length = draw(st.integers(1, 2)), draw(st.integers(1, 30))
    sizes = [draw(st.integers(1, most)) for most in (2, 3, 4, 4, 5)]
    return Case(
        draw(st.sampled_from(list(SPLIT))), rows, length, *sizes,
        strongest=draw(st.sampled_from((0.0, 1e-3, 1.0, 50.0))), documents=draw(document_runs(rows, length)),
        chunk=draw(st.sampled_from((2, 5, 64))), seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@settings(max_examples=num_cases(36), deadline=None)
@given(num_ranks=st.sampled_from((2, 4)), case=cases())
def test_rows_split_over_ranks_are_computed_alike(ranks: Pools, num_ranks: int, case: Case) -> None:
    """Short rows leave some ranks without positions, and convolutions reach over several chunks."""
    assert_same_as_one_process(ranks, num_ranks, case)


PACKED = torch.tensor([[0] * 90 + [1] * 60 + [-1] * 25 + [2] * 25, [-1] * 63 + [5] + [6] * 136])


@pytest.mark.parametrize("documents", [None, PACKED], ids=["one document", "packed documents"])
@pytest.mark.parametrize("function", SPLIT)
def test_long_rows_split_over_ranks_are_computed_alike(ranks: Pools, function: str, documents: Tensor | None) -> None:
    case = Case(function, 2, 200, 1, 2, 8, 5, width=4, strongest=0.5, documents=documents)
    assert_same_as_one_process(ranks, 4, case)


def num_bytes_gathered(case: Case) -> list[int]:
    """Bytes of each all-gather's results on this rank."""
    positions = own_positions(case.length, dist.get_rank(), dist.get_world_size())
    inputs = [tensor if tensor.dim() == 2 else tensor[:, positions] for tensor in case.inputs()]
    sizes: list[int] = []
    gather = ContextChunks.gather

    def counting(context: ContextChunks, x: Tensor) -> Tensor:
        gathered = gather(context, x)
        sizes.append(gathered.numel() * gathered.itemsize)
        return gathered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextChunks, "gather", counting)
        SPLIT[case.function](*inputs, chunks_of(case))
    return sizes


@pytest.mark.parametrize(
    ("function", "numbers_per_chunk"), [("convolution", 2 * 3), ("state space", 2 * (8 * 5 + 1)),
                                        ("delta rule", 2 * (8 * 5 + 8 * 8))],
)  # fmt: skip
def test_ranks_exchange_what_does_not_grow_with_rows(ranks: Pools, function: str, numbers_per_chunk: int) -> None:
    for length in (100, 200):
        case = Case(function, 1, length, 1, 2, 8, 5, width=4, strongest=0.5, documents=None)
        assert ranks[2].run(num_bytes_gathered, case) == [[4 * numbers_per_chunk * D.itemsize]] * 2
