"""Training by kernels on several ranks against one process without them."""

import os
from typing import get_args

import pytest
import torch

from moe.dispatch.exchange import ChunkComputation, SortedChunk, _pack, _unpack
from moe.dispatch.fused import FusedChunk
from moe.experts import Costs, ExpertWeights, LocalComputation, SegmentProducts, build_activation
from moe.experts.weight_gradients import WeightGradients
from moe.experts.weights import ExpertSettings
from moe.kernels.support import KernelKind
from tests.kernels.cases import DEVICE, MEDIUM
from tests.kernels.enabled import kernels_everywhere
from tests.kernels.runs import disabled_kinds, run_by_kernels, verdict_in_checkpoint
from tests.parity.combinations import ROUTERS, assert_ranks_same, model_of, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

LAYOUTS = (
    Degrees(expert=2), Degrees(expert=2, num_chunks=3), Degrees(expert=2, max_rows=9),
    Degrees(expert=2, recompute="selective"), Degrees(expert=2, recompute="full"), Degrees(expert_tensor=2),
    Degrees(expert=4, ranks_per_node=2), Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(expert=2, context=2),
)  # fmt: skip
BIASED = "gated experts with biases, shared ones with a gate"
CASES = [(degrees, router) for number, degrees in enumerate(LAYOUTS)
         for router in (("gshard", BIASED), (BIASED, "gshard"))[number % 2]]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(("degrees", "router"), CASES, ids=str)
def test_layouts_with_kernels_match_one_process_without(ranks: Pools, degrees: Degrees, router: str) -> None:
    model, train = model_of(**ROUTERS[router]), train_of("float32")
    reference = run(model, train, Degrees(), Shape(), 1)
    answers = ranks[degrees.workers].run(run_by_kernels, model, train, degrees, 1)
    assert all(num_passes > 0 for _, num_passes in answers)
    records = [records for records, _ in answers]
    assert_ranks_same(records, reference, 1e-4)
    assert records[0][0]["gradients"]
    for name, norm in records[0][0]["gradients"].items():
        assert norm == pytest.approx(reference[0]["gradients"][name], rel=1e-3, abs=1e-7), name


class Experts:
    """Two experts of one rank, as a dispatcher sees them."""

    recompute = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.costs: Costs = {}
        self.activation = build_activation("swiglu")
        generator = torch.Generator().manual_seed(0)
        shapes = ((2, 16, 24), (2, 24, 16), (2, 16, 24))
        tensors = [
            torch.randn(shape, generator=generator).div(4).to(DEVICE, dtype).requires_grad_() for shape in shapes
        ]
        self.tensors = [*tensors, *[None] * 11]
        self.weights = ExpertWeights.from_tensors(self.tensors, ExpertSettings())


@torch.no_grad()
def passes(computation: ChunkComputation, experts: Experts, num_rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs, gradients of rows and of their scale, and those of weights from two chunks, one of them restored."""
    generator = torch.Generator().manual_seed(1)
    rows, scale, d_out = (torch.randn(num_rows, *shape, generator=generator).to(DEVICE) for shape in ((16,), (), (16,)))
    restored = computation.restore(computation.tensors)
    gradients = WeightGradients(experts.tensors, sums_chunks=True)
    for chunk in (computation, restored):
        x, weight = chunk.arrange(*_unpack(_pack(rows.to(dtype), scale), torch.float32))
        out, products = chunk.forward_pass(x, weight, experts.weights, saves=True)
        d_rows, d_scale = chunk.backward_pass(d_out.to(dtype), x, weight, experts.weights, products, gradients)
    weight_gradients = [gradient for gradient in gradients.to_autograd() if gradient is not None]
    return [tensor.float() for tensor in (out, d_rows, d_scale, *weight_gradients)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arriving", [[[0, 0], [0, 0]], [[1, 0], [0, 0]], [[0, 5], [0, 3]], [[7, 2], [1, 20]]], ids=str)
def test_a_chunk_by_kernels_is_the_sorted_one(
    arriving: list[list[int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, counts, device = Experts(dtype), torch.tensor(arriving), torch.device(DEVICE)
    by_rows = SortedChunk.from_arriving(
        lambda counts: LocalComputation(counts, experts.activation, SegmentProducts()), counts, device
    )
    with kernels_everywhere():
        by_kernels = FusedChunk.from_arriving(torch.empty(0, dtype=dtype, device=device), experts, counts, device)
        assert by_kernels.computation.configs == MEDIUM
        num_rows, limit = int(counts.sum()), 0.05 if dtype == torch.bfloat16 else 1e-5
        results, expected = (passes(chunk, experts, num_rows, dtype) for chunk in (by_kernels, by_rows))
    for result, value in zip(results, expected, strict=True):
        assert result.shape == value.shape
        if value.numel():
            assert (result - value).abs().max() <= limit * value.abs().max().clamp(min=1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", get_args(KernelKind))
def test_the_check_may_come_first_in_a_checkpoint(kind: KernelKind) -> None:
    """As under full recomputation, whose backward pass would find other saved tensors than the forward pass."""
    assert verdict_in_checkpoint(kind) == (None, True)


def test_kernels_that_fail_on_one_rank_are_disabled_on_all(ranks: Pools) -> None:
    """Else ranks would round differently: replicas would drift apart, and choices of experts differ."""
    with_fault, without_fault = (ranks[2].run(disabled_kinds, rank, "routing") for rank in (1, 7))
    assert with_fault[0] == ["routing"]
    assert with_fault[1] == []  # its own check has refused them
    assert without_fault == [[], []]
