"""Graphs of micro-batches compute what the operations they are made of compute, bit for bit."""

import importlib.util
import os
from collections import Counter
from dataclasses import replace

import pytest
import torch

from moe.spec import LanguageModelSpec, TrainSpec
from tests.parity.combinations import train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.sequences import SOME
from tests.parity.trajectory import Degrees, Shape
from tests.rehearsal.graphs import Steps, problems_without_kernels, signatures, steps_by_graphs
from tests.rehearsal.test_kernels import decoder

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
]

NEVER = 1000


def train_by_graphs(dtype: str) -> TrainSpec:
    return train_of(dtype, cuda_graphs=True)


def assert_equal(ours: Steps, theirs: Steps) -> None:
    assert ours.records == theirs.records
    for parameter, expected in zip(ours.parameters, theirs.parameters, strict=True):
        assert torch.equal(parameter, expected)


DENSE = LanguageModelSpec(
    kind="language", model_dim=16, num_layers=2, ffn_dim=16, vocab_size=300,
    attention={"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "query_key_norm": "head"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "dtype", "degrees"),
    [
        (DENSE, "float32", Degrees(micro_batch_groups=1)),
        (DENSE, "float32", Degrees(data=2, micro_batch_groups=1)),
        (DENSE, "bfloat16", Degrees(recompute="full", micro_batch_groups=1)),
        pytest.param(decoder(1), "bfloat16", Degrees(micro_batch_groups=1), marks=pytest.mark.slow),
    ],
    ids=["dense", "on two ranks", "recomputed", "mixture"],
)
def test_steps_by_graphs_are_those_without(
    ranks: Pools, model: LanguageModelSpec, dtype: str, degrees: Degrees
) -> None:
    """Batches differ in tokens, documents, padding, labels and their numbers."""
    shape = Shape(groups=2 * degrees.data, source=4, target=4, learned=SOME)
    by_graphs, without = (
        ranks[degrees.workers].run(steps_by_graphs, model, train_by_graphs(dtype), degrees, shape, 3, num_warm_ups)
        for num_warm_ups in (1, NEVER)
    )
    for ours, theirs in zip(by_graphs, without, strict=True):
        assert (ours.num_graphs, theirs.num_graphs) == (1, 0)
        assert_equal(ours, theirs)


def test_launches_of_a_step_do_not_grow_with_layers_or_micro_batches(ranks: Pools) -> None:
    """Except for copies of the inputs and additions of the sums of each micro-batch."""
    degrees = Degrees(micro_batch_groups=1)
    launches = {
        (num_layers, groups): ranks[1].run(
            steps_by_graphs, DENSE.model_copy(update={"num_layers": num_layers}), train_by_graphs("float32"), degrees,
            Shape(groups=groups, source=4, target=4), 3, 1,
        )[0].launches
        for num_layers, groups in ((1, 2), (2, 2), (1, 3))
    }  # fmt: skip
    assert launches[1, 2] == launches[2, 2]
    per_micro_batch = Counter(launches[1, 3]) - Counter(launches[1, 2])
    assert set(per_micro_batch) <= {"_foreach_copy_", "copy_", "_to_copy", "add_"}, per_micro_batch
    assert 0 < per_micro_batch.total() <= 4


@pytest.mark.parametrize("model", [DENSE, decoder(1)], ids=["dense", "mixture"])
def test_micro_batches_differ_only_in_the_values_of_tensors(ranks: Pools, model: LanguageModelSpec) -> None:
    ((first, second),) = ranks[1].run(signatures, model, train_by_graphs("float32"), True)
    assert len(first) > 100
    assert first == second


@pytest.mark.parametrize(
    ("degrees", "waiting_ranks"), [(Degrees(), (0,)), (Degrees(data=2), (1,))], ids=["one rank", "one of two ranks"]
)
def test_layers_that_wait_are_refused_on_all_ranks(
    ranks: Pools, degrees: Degrees, waiting_ranks: tuple[int, ...]
) -> None:
    degrees = replace(degrees, micro_batch_groups=1)
    inputs = decoder(1), train_by_graphs("float32"), degrees, waiting_ranks
    for problems in ranks[degrees.workers].run(problems_without_kernels, *inputs):
        (problem,) = problems
        assert (problem.code, problem.path, problem.value) == ("unsupported", "train.cuda_graphs", True)
