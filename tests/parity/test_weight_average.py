"""The moving average of sharded weights against that of one process."""

from pathlib import Path

import pytest

from tests.parity.gloo_ranks import Pools
from tests.parity.test_checkpoint_ranks import assert_same_course, assert_same_sets, run_course
from tests.unit.train_runs import corpus, job


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"fsdp": 2, "expert_fsdp": 2, "expert": 1}, {"expert": 2, "expert_tensor": 2, "tensor": 2, "fsdp": 2}], ids=str,
)  # fmt: skip
def test_averages_of_shards_are_evaluated_as_those_of_whole_weights(
    ranks: Pools, tmp_path: Path, parallel: dict[str, int]
) -> None:
    """In float64, with evaluations between the steps; the last two steps on one process, from the shards."""
    data, workers = corpus(tmp_path), parallel.get("expert_tensor", 1) * 2
    train = {"dtype": "float64", "num_steps": 6, "ema_decay": 0.8,
             "evaluation": {"every_steps": 2, "max_pairs": 6, "num_examples": 2, "use_ema": True}}  # fmt: skip
    spec, sharded_spec = job(data, train=train), job(data, workers=workers, parallel=parallel, train=train)
    _, expected, *_, report = run_course(spec, f"{tmp_path}/one", tmp_path / "cache")
    _, first, *_ = ranks[workers].run(run_course, sharded_spec, f"{tmp_path}/many", tmp_path / "cache", 0, 4)[0]
    _, rest, *_, last_report = run_course(spec, f"{tmp_path}/many", tmp_path / "cache", 1)
    assert_same_course(first + rest, expected)
    assert_same_sets(last_report, report)
