"""Muon, and AdamW with moments in bfloat16, under layouts against one process, and runs with them that are resumed."""

from pathlib import Path

import pytest

from moe.spec import AdamWSpec, MuonSpec
from tests.grid import item_params
from tests.parity.combinations import LAYOUTS, ROUTERS, assert_same, model_of, run_on, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.test_checkpoint_ranks import assert_same_course, run_course
from tests.parity.trajectory import Degrees, Shape
from tests.unit.train_runs import corpus, job

MUON = MuonSpec(name="muon", peak_lr=2.5e-3, weight_decay=0.1)
MODEL = model_of(**ROUTERS["gated experts with biases, shared ones with a gate"])
UNEVEN = MODEL.model_copy(update={"model_dim": 18, "moe": MODEL.moe.model_copy(update={"model_dim": 18})})  # type: ignore[union-attr]
EVERY_LAYOUT = [degrees for layouts in LAYOUTS.values() for degrees in layouts if degrees.workers > 1]
SHARDED = {"fsdp": 2, "expert_fsdp": 2, "expert": 1}
FSDP = Degrees(expert=2, data=2, fsdp=4, expert_fsdp=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", item_params(EVERY_LAYOUT, 5))
def test_the_whole_matrix_is_orthogonalized_under_every_layout(ranks: Pools, degrees: Degrees) -> None:
    """Four steps in float64: losses, routing, every gradient and every weight to 1e-10."""
    expected = run_on(ranks, Degrees(), MODEL, train_of(optimizer=MUON), Shape(), 4)
    assert_same(run_on(ranks, degrees, MODEL, train_of(optimizer=MUON), Shape(), 4), expected, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [FSDP, Degrees(expert=4, fsdp=4)], ids=str)
def test_shards_of_uneven_size_make_whole_matrices(ranks: Pools, degrees: Degrees) -> None:
    """18 rows or columns on 4 ranks."""
    expected = run_on(ranks, Degrees(), UNEVEN, train_of(optimizer=MUON), Shape(), 4)
    assert_same(run_on(ranks, degrees, UNEVEN, train_of(optimizer=MUON), Shape(), 4), expected, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_matrices_of_every_kind_of_attention_are_whole(ranks: Pools, attention: str) -> None:
    model = language_model(attention, **ROUTERS["gated experts with biases, shared ones with a gate"])
    expected = run_on(ranks, Degrees(), model, train_of(optimizer=MUON), Shape(), 4)
    assert_same(run_on(ranks, FSDP, model, train_of(optimizer=MUON), Shape(), 4), expected, 1e-10)


@pytest.mark.slow
def test_many_steps_of_one_layout_are_the_same_bit_by_bit(ranks: Pools) -> None:
    first, second = (run_on(ranks, FSDP, MODEL, train_of("float32", optimizer=MUON), Shape(), 10) for _ in range(2))
    assert [record["digests"] for record in first] == [record["digests"] for record in second]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [FSDP, Degrees(expert=2, expert_tensor=2, tensor=2, fsdp=2)], ids=str)
def test_moments_in_bfloat16_are_rounded_alike_under_every_layout(ranks: Pools, degrees: Degrees) -> None:
    train = train_of(optimizer=AdamWSpec(name="adamw", peak_lr=2.5e-3, weight_decay=0.1, moments="bfloat16"))
    expected = run_on(ranks, Degrees(), MODEL, train, Shape(), 6)
    assert_same(run_on(ranks, degrees, MODEL, train, Shape(), 6), expected, 1e-10)


QUANTIZED = AdamWSpec(name="adamw", peak_lr=2.5e-3, weight_decay=0.1, moments="8bit")
WIDE = MODEL.model_copy(
    update={
        "model_dim": 64, "ffn_dim": 128, "source_vocab_size": 301, "target_vocab_size": 301,
        "moe": MODEL.moe.model_copy(update={"model_dim": 64, "hidden_dim": 96}),  # type: ignore[union-attr]
    }
)  # fmt: skip
"""Rows of 64, 96 and 128 elements, in blocks of 64, 32 and 128, which several layouts cut."""
WIDE_JOB = {
    "model_dim": 64, "ffn_dim": 128, "source_vocab_size": 401, "target_vocab_size": 401,
    "moe": {"num_experts": 4, "hidden_dim": 96, "group_tokens": 64},
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", item_params(EVERY_LAYOUT, 5))
def test_8_bit_moments_have_the_same_codes_under_every_layout(ranks: Pools, degrees: Degrees) -> None:
    """In float64: losses, routing, every gradient and every weight to 1e-10."""
    train = train_of(optimizer=QUANTIZED)
    expected = run_on(ranks, Degrees(), WIDE, train, Shape(), 4)
    assert_same(run_on(ranks, degrees, WIDE, train, Shape(), 4), expected, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [("float32", {"name": "muon"}), ("bfloat16", {"name": "muon"}),
     ("float32", {"name": "adamw", "moments": "bfloat16"}), ("float32", {"name": "adamw", "moments": "8bit"})],
    ids=str,
)  # fmt: skip
def test_a_resumed_run_continues_bit_by_bit(
    ranks: Pools, tmp_path: Path, dtype: str, optimizer: dict[str, str]
) -> None:
    train = {"dtype": dtype, "optimizer": {**optimizer, "peak_lr": 1e-2, "weight_decay": 0.1}}
    model = WIDE_JOB if optimizer.get("moments") == "8bit" else {}
    spec = job(corpus(tmp_path), workers=2, parallel=SHARDED, train=train, model=model)
    _, whole, *_ = ranks[2].run(run_course, spec, f"{tmp_path}/whole", tmp_path / "cache")[0]
    kind, first, *_ = ranks[2].run(run_course, spec, f"{tmp_path}/parts", tmp_path / "cache", 0, 3)[0]
    _, rest, *_ = ranks[2].run(run_course, spec, f"{tmp_path}/parts", tmp_path / "cache", 1)[0]
    assert (kind, first + rest) == ("paused", whole)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{"name": "muon"}, {"name": "adamw", "moments": "8bit"}], ids=str)
@pytest.mark.parametrize("begins_sharded", [False, True])
def test_a_run_continues_in_another_layout(
    ranks: Pools, tmp_path: Path, begins_sharded: bool, optimizer: dict[str, str]
) -> None:
    """In float64: two steps by one process, the rest by two with shards of everything, or the reverse. Of 8-bit
    moments, the embedding's blocks are cut, whose 401 rows two ranks do not divide."""
    data, model = corpus(tmp_path), WIDE_JOB if optimizer["name"] == "adamw" else {}
    train = {"dtype": "float64", "num_steps": 5, "optimizer": {**optimizer, "peak_lr": 1e-2}}
    spec = job(data, train=train, model=model)
    sharded_spec = job(data, workers=2, parallel=SHARDED, train=train, model=model)
    _, expected, *_ = run_course(spec, f"{tmp_path}/one", tmp_path / "cache")

    def part(is_sharded: bool, *attempt: int) -> list[dict]:
        arguments = f"{tmp_path}/both", tmp_path / "cache", *attempt
        if is_sharded:
            return ranks[2].run(run_course, sharded_spec, *arguments)[0][1]
        return run_course(spec, *arguments)[1]

    first, rest = part(begins_sharded, 0, 2), part(not begins_sharded, 1)
    assert len(rest) == 3
    assert_same_course(first + rest, expected)
