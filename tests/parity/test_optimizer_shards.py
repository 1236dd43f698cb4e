"""Sharding of the optimizer's state alone, and of gradients too: what one process computes, resumed anywhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.parallel import Layout, OptimizerShards, ParameterShard, local_parameters
from moe.parallel.optimizer_shards import ShardRows
from moe.parallel.row_collectives import all_gather, reduce_scatter
from moe.spec import AdafactorSpec, AdamWSpec, MuonSpec, OptimizerSpec
from moe.tasks.build import build_model
from tests.grid import item_params
from tests.parity.combinations import ROUTERS, assert_same, model_of, run_on, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model, with_adapter
from tests.parity.test_checkpoint_ranks import assert_same_course, run_course
from tests.parity.test_pipeline import staged_model
from tests.parity.trajectory import Degrees, Shape
from tests.unit.train_runs import corpus, job

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": AdamWSpec(name="adamw", peak_lr=2.5e-3, weight_decay=0.1),
    "adafactor": AdafactorSpec(name="adafactor", peak_lr=1e-2),
    "muon": MuonSpec(name="muon", peak_lr=2.5e-3, weight_decay=0.1),
    "8-bit adamw": AdamWSpec(name="adamw", peak_lr=2.5e-3, moments="8bit"),
    "bfloat16 adamw": AdamWSpec(name="adamw", peak_lr=2.5e-3, moments="bfloat16"),
}
LAYOUTS = (
    Degrees(data=2, fsdp=2, expert_fsdp=2),
    Degrees(expert=2, fsdp=2),
    Degrees(data=2, expert_fsdp=2),
    Degrees(data=4, fsdp=2, expert_fsdp=2),
    Degrees(expert=2, data=2, fsdp=4, expert_fsdp=2),
    Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2),
    Degrees(expert=2, expert_tensor=2, tensor=2, fsdp=2),
    Degrees(data=2, context=2, fsdp=2),
    Degrees(expert=2, data=2, context=2, fsdp=4, expert_fsdp=2),
)
CASES = [
    (replace(degrees, sharding=sharding, micro_batch_groups=1), optimizer)
    for optimizer in OPTIMIZERS for degrees in LAYOUTS for sharding in ("optimizer", "gradients")
]  # fmt: skip
TIED = "GQA with norms as wide as all heads"
MODEL = model_of().model_copy(update={"source_vocab_size": 301, "target_vocab_size": 301})
"""A vocabulary that no degree divides: the shards of its embedding are columns."""


@pytest.mark.parametrize("case", item_params(CASES, 23))
def test_losses_gradients_moments_and_weights_are_those_of_one_process(ranks: Pools, case: tuple[Degrees, str]) -> None:
    """With several micro-batches: ZeRO-2 adds up shards of gradients."""
    degrees, optimizer = case
    train = train_of(optimizer=OPTIMIZERS[optimizer])
    expected = run_on(ranks, Degrees(), MODEL, train, Shape(), 3)
    assert_same(run_on(ranks, degrees, MODEL, train, Shape(), 3), expected, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_adapters_train_the_same(ranks: Pools, sharding: Any) -> None:
    """Frozen weights stay whole; only adapters have shards."""
    attention = language_model(next(iter(ATTENTIONS)), **ROUTERS["softmax"])
    model = with_adapter(attention, {"rank": 2})
    expected = run_on(ranks, Degrees(), model, train_of(), Shape(), 4)
    degrees = Degrees(expert=2, data=2, fsdp=4, expert_fsdp=2, sharding=sharding, micro_batch_groups=1)
    assert_same(run_on(ranks, degrees, model, train_of(), Shape(), 4), expected, 1e-10)


IN_STAGES = (
    Degrees(pipeline=2, expert=2, fsdp=2, sharding="gradients", schedule="zero_bubble", micro_batch_groups=1),
    Degrees(
        pipeline=2, data=2, fsdp=2, expert_fsdp=2, sharding="optimizer", schedule="zb_v", virtual_stages=2,
        micro_batch_groups=1,
    ),
    Degrees(
        pipeline=2, data=2, fsdp=2, expert_fsdp=2, sharding="gradients", virtual_stages=2, micro_batch_groups=1
    ),
    Degrees(expert=2, fsdp=2, sharding="gradients", overlap=True, micro_batch_groups=1),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("degrees", IN_STAGES, ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_shards_of_stages_and_of_micro_batches_side_by_side(ranks: Pools, degrees: Degrees, optimizer: str) -> None:
    """Also where gradients of weights are deferred, and for a table that two stages have."""
    train, model = train_of(optimizer=OPTIMIZERS[optimizer]), staged_model(TIED, "sigmoid with bias, in groups")
    expected = run_on(ranks, Degrees(), model, train, Shape(), 3)
    assert_same(run_on(ranks, degrees, model, train, Shape(), 3), expected, 1e-10)


def elements_updated(degrees: Degrees) -> tuple[int, int]:
    """(elements of this rank's parameters, of those that its optimizer updates)"""
    layout = Layout.build(degrees.plan(8))
    parameters = local_parameters(build_model(MODEL, layout))
    counts = [
        sum(parameter.local.numel() for parameter in some)
        for some in (parameters, OptimizerShards(parameters, layout).parameters)
    ]
    layout.close()
    return counts[0], counts[1]


def test_a_rank_updates_its_share(ranks: Pools) -> None:
    degrees = Degrees(data=2, fsdp=2, expert_fsdp=2, sharding="optimizer")
    for num_whole, num_updated in ranks[2].run(elements_updated, degrees):
        assert num_whole == MODEL.num_parameters()
        assert num_updated == pytest.approx(num_whole / 2, rel=0.01)


def rows_of_collectives() -> tuple[list[float], list[list[float]]]:
    """(this rank's row of the sums, all ranks' rows)"""
    layout = Layout.build(Degrees(data=4).plan(8))
    assert layout.world_group is not None
    rows = torch.arange(12.0).view(4, 3) * (layout.rank + 1)
    own_row = reduce_scatter(rows, layout.world_group, "reduce-scatter")()
    gathered = all_gather(own_row, layout.world_group, "all-gather")
    layout.close()
    return own_row.tolist(), gathered.tolist()


def test_rows_are_summed_and_gathered(ranks: Pools) -> None:
    sums = (torch.arange(12.0).view(4, 3) * 10).tolist()
    assert ranks[4].run(rows_of_collectives) == [(row, sums) for row in sums]


def uneven_rows() -> list[list[list[int]]]:
    """Shapes of the shards of each parameter by rank, for 3 rows on 4 ranks."""
    layout = Layout.build(Degrees(data=4, fsdp=4, sharding="gradients").plan(8))
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    weight.part = ParameterShard(weight.shape, optimizer_split=("fsdp", 0))  # type: ignore[attr-defined]
    model = torch.nn.Module()
    model.weight = weight
    shards = OptimizerShards(local_parameters(model), layout)
    rows = ShardRows(shards.sharded)
    shapes = [[list(view.shape) for view in rows.views(row, index)] for index, row in enumerate(rows.allocate(4))]
    with torch.no_grad(), shards.changing():
        shards.parameters[0].local.fill_(layout.rank + 1)
    assert weight.tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    layout.close()
    return shapes


def test_a_rank_may_have_no_shard(ranks: Pools) -> None:
    assert ranks[4].run(uneven_rows) == [[[[1, 2]], [[1, 2]], [[1, 2]], [[0, 2]]]] * 4


TRAIN: dict[str, Any] = {
    "num_steps": 5, "ema_decay": 0.9, "optimizer": {"name": "adamw", "peak_lr": 1e-2, "weight_decay": 0.1},
}  # fmt: skip
PARALLEL: dict[str, Any] = {"expert": 1, "fsdp": 2, "expert_fsdp": 2}


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_continues_bit_by_bit(ranks: Pools, tmp_path: Path, sharding: str, dtype: str) -> None:
    parallel = {**PARALLEL, "sharding": sharding, "micro_batch_groups": 1}
    spec = job(corpus(tmp_path), workers=2, parallel=parallel, train={**TRAIN, "dtype": dtype})
    _, expected, *_ = ranks[2].run(run_course, spec, f"{tmp_path}/whole", tmp_path / "cache")[0]
    kind, first, *_ = ranks[2].run(run_course, spec, f"{tmp_path}/parts", tmp_path / "cache", 0, 3)[0]
    _, rest, *_ = ranks[2].run(run_course, spec, f"{tmp_path}/parts", tmp_path / "cache", 1)[0]
    assert (kind, first + rest) == ("paused", expected)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [
    ("optimizer", "gradients"), ("gradients", "parameters"), ("parameters", "optimizer"), ("gradients", None),
    (None, "optimizer"),
])  # fmt: skip
def test_a_run_continues_with_another_sharding(
    ranks: Pools, tmp_path: Path, first: str | None, second: str | None
) -> None:
    """In float64, the same losses, evaluated with the moving average of the weights; None is one process."""
    evaluation = {"every_steps": 2, "use_ema": True, "max_pairs": 6, "num_examples": 2}
    data, train = corpus(tmp_path), {**TRAIN, "dtype": "float64", "evaluation": evaluation}
    _, expected, *_ = run_course(job(data, train=train), f"{tmp_path}/one", tmp_path / "cache")

    def part(sharding: str | None, *attempt: int) -> list[dict[str, Any]]:
        arguments = f"{tmp_path}/both", tmp_path / "cache", *attempt
        if sharding is None:
            return run_course(job(data, train=train), *arguments)[1]
        spec = job(data, workers=2, parallel={**PARALLEL, "sharding": sharding}, train=train)
        return ranks[2].run(run_course, spec, *arguments)[0][1]

    steps = [*part(first, 0, 2), *part(second, 1)]
    assert len(steps) == 5
    assert_same_course(steps, expected)
