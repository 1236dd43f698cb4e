"""Blocks of attention masks and their kernels: what a kind of block says of its pairs is so, and blocks merge to
attention over whole rows."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.layers import mask_blocks
from moe.layers.attention_mask import AttentionMask
from moe.layers.block_attention import (
    Block,
    BlockGradients,
    BlockKernel,
    CPUKernel,
    FinalOutputs,
    GPUKernel,
    PlainKernel,
    recomputed_gradients,
)
from moe.layers.linear import uses_own_dtype
from moe.layers.mask_blocks import BlockKind, MaskBlocks, Segment, segments_of
from moe.layers.online_softmax import OnlineSoftmax, QueryGradients
from moe.layers.softmax_attention import attend_reference
from moe.overrides import overriding
from tests.unit.layers.gradients import document_runs, outputs_and_gradients

LENGTH = 20


class RecomputedKernel(PlainKernel):
    """The gradients through autograd, as flex attention has them."""

    def gradients(
        self, block: Block, final: FinalOutputs, queries: Tensor, keys: Tensor, values: Tensor
    ) -> BlockGradients:
        return recomputed_gradients(self, block, final, queries, keys, values)


@st.composite
def masks(draw: st.DrawFn) -> AttentionMask:
    rows = draw(st.integers(1, 3))
    match draw(st.sampled_from(("full", "causal", "window", "chunk", "first", "keys"))):
        case "full":
            return AttentionMask(causal=False, documents=draw(document_runs(rows, LENGTH)))
        case "causal":
            return AttentionMask(documents=draw(document_runs(rows, LENGTH)))
        case "window":
            return AttentionMask(window=draw(st.integers(1, LENGTH)), documents=draw(document_runs(rows, LENGTH)))
        case "chunk":
            documents = draw(document_runs(rows, LENGTH))  # chunks are of documents in order
            documents = None if documents is None else documents.sort(dim=1).values
            return AttentionMask(chunk=draw(st.integers(1, LENGTH)), documents=documents)
        case "first":
            return AttentionMask(first=torch.tensor(draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))))
    return AttentionMask(causal=False, keys=torch.rand(rows, LENGTH) < draw(st.floats(0, 1)))


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    """Segments of one or two ranges of positions, the second after the first."""
    bounds = sorted(draw(st.lists(st.integers(0, LENGTH), min_size=4, max_size=4)))
    return segments_of((range(*bounds[:2]), range(*bounds[2:])))


def positions_of(of_segments: Sequence[Segment]) -> Tensor:
    return torch.tensor([position for segment in of_segments for position in segment.positions], dtype=torch.int64)


@given(mask=masks(), queries=segments(), keys=segments(), tile=st.integers(1, 6), in_tiles=st.booleans())
def test_blocks_cover_the_visible_pairs_once(
    mask: AttentionMask, queries: list[Segment], keys: list[Segment], tile: int, in_tiles: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_blocks, "TILE", tile)
        blocks_of_mask = MaskBlocks(mask, LENGTH, torch.device("cpu"))
        blocks = blocks_of_mask.blocks(queries, keys, in_tiles=in_tiles)
        query_positions, key_positions = positions_of(queries), positions_of(keys)
        visible = blocks_of_mask.is_visible(query_positions[:, None], key_positions[None])[:, 0]
        covered = torch.zeros_like(visible, dtype=torch.int64)
        for block in blocks:
            part = visible[:, block.queries, block.keys]
            match block.kind:
                case BlockKind.FULL:
                    assert part.all()
                case BlockKind.CAUSAL:
                    assert (part == torch.ones_like(part).tril()).all()
                case BlockKind.MASKED:
                    bias = blocks_of_mask.bias(block, torch.float32, torch.device("cpu"))[:, 0]
                    assert ((bias == 0) == part).all()
            assert block.kind is not BlockKind.EMPTY
            covered[:, block.queries, block.keys] += 1
        assert (covered <= 1).all()
        assert not (visible & (covered == 0)).any()


@pytest.mark.parametrize(
    ("mask", "kinds"),
    [
        (AttentionMask(), ["CAUSAL", "FULL", "CAUSAL"]),
        (AttentionMask(causal=False), ["FULL"]),
        (AttentionMask(documents=torch.zeros(2, LENGTH, dtype=torch.int64)), ["CAUSAL", "FULL", "CAUSAL"]),
        (AttentionMask(documents=torch.arange(LENGTH)[None] // 10), ["CAUSAL", "CAUSAL"]),
        (AttentionMask(window=8), ["MASKED", "MASKED", "MASKED"]),
        (AttentionMask(chunk=10), ["CAUSAL", "CAUSAL"]),
        (AttentionMask(first=torch.tensor([10])), ["MASKED", "CAUSAL"]),
    ],
)
def test_a_mask_is_built_only_where_a_block_needs_it(mask: AttentionMask, kinds: list[str]) -> None:
    halves = segments_of((range(10), range(10, 20)))
    blocks = MaskBlocks(mask, LENGTH, torch.device("cpu")).blocks(halves, halves)
    assert sorted(block.kind.name for block in blocks) == sorted(kinds)


def merged_attention(
    kernel_class: type[BlockKernel], mask: AttentionMask, queries: Tensor, keys: Tensor, values: Tensor
) -> list[Tensor]:
    """Outputs and input gradients by blocks, for the outputs' gradients of `outputs_and_gradients`."""
    blocks_of_mask = MaskBlocks(mask, LENGTH, torch.device("cpu"))
    kernel = kernel_class(blocks_of_mask, 0.5)
    thirds = segments_of((range(7), range(7, 15), range(15, LENGTH)))
    blocks = blocks_of_mask.blocks(thirds, thirds, in_tiles=kernel.needs_tiles)
    softmax = OnlineSoftmax(queries, values.shape[-1])
    softmax.add_blocks(kernel, blocks, queries, keys, values)
    outputs, log_sums = softmax.finish(None, queries.dtype)
    draws = torch.Generator().manual_seed(7)
    gradient = torch.randn(outputs.shape, generator=draws, dtype=torch.float64).to(queries.dtype)
    query_gradients = QueryGradients(gradient, outputs, log_sums, queries)
    d_keys, d_values = query_gradients.add_blocks(kernel, blocks, keys, values)
    return [outputs, query_gradients.finish(), d_keys, d_values]


def inputs_of(mask: AttentionMask) -> list[Tensor]:
    rows = next((len(tensor) for tensor in (mask.documents, mask.first, mask.keys) if tensor is not None), 2)
    torch.manual_seed(0)
    shapes = ((4, LENGTH, 5), (2, LENGTH, 5), (2, LENGTH, 3))
    return [torch.randn(rows, *shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("kernel_class", [CPUKernel, PlainKernel])
@settings(max_examples=40)
@given(mask=masks(), tile=st.integers(1, 6))
def test_blocks_merge_to_attention(kernel_class: type[BlockKernel], mask: AttentionMask, tile: int) -> None:
    inputs = inputs_of(mask)
    if mask.keys is not None:
        mask.keys[:, 0] = True  # attention to no key is not defined in the reference
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_blocks, "TILE", tile)
        actual = merged_attention(kernel_class, mask, *inputs)
    expected = outputs_and_gradients(lambda q, k, v: attend_reference(q, k, v, scale=0.5, attention_mask=mask), *inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(causal=False)], ids=["causal", "full"])
def test_recomputed_gradients_equal_the_reference(mask: AttentionMask) -> None:
    inputs = inputs_of(mask)
    actual = merged_attention(RecomputedKernel, mask, *inputs)
    expected = outputs_and_gradients(lambda q, k, v: attend_reference(q, k, v, scale=0.5, attention_mask=mask), *inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=10)  # uncompiled, each evaluates the mask pair by pair
@given(mask=masks())
def test_flex_attention_of_blocks_equals_the_kernel_for_cpus(mask: AttentionMask) -> None:
    queries, keys, values = (tensor.float() for tensor in inputs_of(mask))
    thirds = segments_of((range(7), range(7, 15), range(15, LENGTH)))
    outputs = []
    for kernel_class in (GPUKernel, CPUKernel):
        blocks_of_mask = MaskBlocks(mask, LENGTH, torch.device("cpu"))
        blocks = blocks_of_mask.blocks(thirds, thirds, in_tiles=kernel_class.needs_tiles)
        softmax = OnlineSoftmax(queries, values.shape[-1])
        softmax.add_blocks(kernel_class(blocks_of_mask, 0.5), blocks, queries, keys, values)
        outputs.append(softmax.finish(None, queries.dtype))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_no_key_has_outputs_and_gradients_of_zero() -> None:
    mask = AttentionMask(causal=False, keys=torch.zeros(2, LENGTH, dtype=torch.bool))
    for tensor in merged_attention(CPUKernel, mask, *inputs_of(mask)):
        assert not tensor.any()


@pytest.mark.parametrize("has_instructions", [False, True])
def test_bfloat16_blocks_are_as_exact_as_their_inputs(has_instructions: bool) -> None:
    mask = AttentionMask(window=9)
    inputs = [tensor.to(torch.bfloat16) for tensor in inputs_of(mask)]
    with overriding({uses_own_dtype: lambda x: x.dtype != torch.bfloat16 or has_instructions}):
        actual = merged_attention(CPUKernel, mask, *inputs)
    expected = merged_attention(CPUKernel, mask, *(tensor.double() for tensor in inputs))
    for tensor, exact in zip(actual, expected, strict=True):
        assert (tensor.double() - exact).norm() <= 2**-6 * exact.norm()


def test_keys_by_query_are_refused() -> None:
    mask = AttentionMask(causal=False, keys=torch.ones(1, LENGTH, LENGTH, dtype=torch.bool))
    with pytest.raises(ValueError, match="keys by query"):
        MaskBlocks(mask, LENGTH, torch.device("cpu"))
