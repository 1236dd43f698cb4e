"""Predicted reads and writes of elementwise kernels against those of real passes."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe.layers.linear import uses_own_dtype
from moe.overrides import overriding
from moe.parallel import Layout
from moe.plan import Cluster, Degrees, LayoutSearch
from moe.plan.candidate import Candidate, Options
from moe.plan.software import SOFTWARE, SoftwareName
from moe.spec import JobSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.build import build_task
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.task import RankBatch
from moe.train.signals import Signals
from moe.train.step import step
from moe.train.train_state import TrainState

LENGTH = 128
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
_WRITES_ALONE = {"copy_", "fill_", "zero_"}
"""In-place operations that read nothing of what they write."""


class ByteCounter(TorchDispatchMode):
    """Bytes that all operations read and write, except products, attention and views."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        if function.is_view or name in _PRODUCTS or "attention" in name or "empty" in name or "view" in name:
            return result
        inputs, outputs = (
            [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
            for values in ((args, kwargs), result)
        )
        if name in _WRITES_ALONE:
            inputs = inputs[1:]
        self.num_bytes += sum(prod(tensor.shape) * tensor.element_size() for tensor in (*inputs, *outputs))
        return result


def job(model_dim: int, num_heads: int, norm: str | None, num_layers: int, num_rows: int) -> JobSpec:
    attention = {"kind": "grouped_query", "num_heads": num_heads, "num_kv_heads": 1, "head_dim": 64,
                 "query_key_norm": norm}  # fmt: skip
    return JobSpec.parse({
        "model": {"kind": "language", "model_dim": model_dim, "num_layers": num_layers, "vocab_size": 64,
                  "attention": attention, "ffn_dim": 3 * model_dim, "tie_embeddings": False},
        "data": {"corpus": "packages", "max_tokens": LENGTH},
        "train": {"num_steps": 2, "batch_tokens": num_rows * LENGTH, "dtype": "bfloat16"},
        "resources": {"num_workers": 1},
    })  # fmt: skip


def counted_bytes(spec: JobSpec, software: SoftwareName) -> float:
    """Bytes of a real step, with our kernels for norms and rotations if `software` has them."""
    state, num_rows = TrainState.build(build_task(spec), Layout.single()), spec.train.batch_tokens // LENGTH
    tokens = torch.randint(64, (num_rows, LENGTH))
    rows = SequencesBatch(tokens, tokens, BatchContext(rows_per_group=1))
    batch = RankBatch(0, [rows], tokens.numel(), tokens.numel())
    with overriding({uses_own_dtype: lambda x: True}):  # as on a CPU with bfloat16 instructions
        step(state, batch, Signals())  # allocates buffers
        with kernels_of(software) as of_kernels, ByteCounter() as of_operations:
            step(state, batch, Signals())
    return of_operations.num_bytes + sum(moved.requested for moved in of_kernels.values())


@contextmanager
def kernels_of(software: SoftwareName) -> Iterator[Mapping[str, Any]]:
    """Within the context, layers use the kernels of `software`. Yields the bytes that each moves."""
    if software != "ours-fused":
        yield {}
        return
    from tests.kernels.enabled import kernels_everywhere
    from tests.kernels.moved_bytes import count_moved_bytes

    with kernels_everywhere(), count_moved_bytes() as moved_bytes:
        yield moved_bytes


def predicted_bytes(spec: JobSpec, software: SoftwareName) -> float:
    """Bytes of a step as a plan predicts them."""
    search = LayoutSearch(spec, Cluster(num_nodes=1, devices_per_node=1, device="h200"), software=software)
    candidate = Candidate(Degrees(), Options(micro_batch_groups=spec.num_groups))
    rate = search.cluster.calibrated_device.memory_bytes_per_s * SOFTWARE[software].elementwise.share
    return search.time.estimate(candidate).elementwise_s * rate


def of_a_layer(
    count: Callable[[JobSpec, SoftwareName], float], software: SoftwareName, model_dim: int, num_heads: int,
    norm: str | None,
) -> float:  # fmt: skip
    """Bytes per token and layer, without those that are independent of the number of tokens."""
    two_rows, four_rows = (
        count(job(model_dim, num_heads, norm, 2, rows), software)
        - count(job(model_dim, num_heads, norm, 1, rows), software)
        for rows in (2, 4)
    )
    return (four_rows - two_rows) / 2 / LENGTH


@pytest.mark.sample(1)
@pytest.mark.parametrize("software", ["ours-eager", "ours-fused"])
@pytest.mark.parametrize("shape", [(256, 8, "head"), (256, 8, None), (256, 4, "head")], ids=str)
def test_reads_and_writes_of_a_layer_are_predicted(shape: tuple[int, int, str | None], software: SoftwareName) -> None:
    if software == "ours-fused" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    predicted, counted = (of_a_layer(count, software, *shape) for count in (predicted_bytes, counted_bytes))
    assert predicted == pytest.approx(counted, rel=0.05)


def test_one_kernel_clips_updates_and_casts_in_the_bytes_that_it_moves() -> None:
    """The norm reads gradients, 4 bytes; the kernel moves 30 (`tests/kernels/test_moved_bytes.py`), three passes 42."""
    spec, element_bytes = job(256, 4, None, 2, 2), {}
    assert spec.train.clip_norm is not None
    num_elements = sum(parameter.numel for parameter in spec.model.parameters())
    for software in ("ours-eager", "ours-fused"):
        search = LayoutSearch(spec, Cluster(num_nodes=1, devices_per_node=1, device="h200"), software=software)
        candidate = Candidate(Degrees(), Options(micro_batch_groups=spec.num_groups))
        rate = search.cluster.calibrated_device.memory_bytes_per_s * SOFTWARE[software].host.sustained
        element_bytes[software] = search.time.estimate(candidate).optimizer_s * rate / num_elements
    assert element_bytes == {
        "ours-eager": pytest.approx(4 + 42, rel=1e-4),
        "ours-fused": pytest.approx(4 + 30, rel=1e-4),
    }
