"""A requested `parallel.sharding` takes effect, or is refused."""

from typing import Any

import pytest

from moe.plan import Cluster, plan_job
from moe.spec import JobSpec
from tests.refusals import expect_problem

TWO_CPUS = Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=1 << 30)


def job(sharding: str, resources: dict[str, int], **parallel: int) -> JobSpec:
    return JobSpec.parse({
        "model": {
            "kind": "language", "model_dim": 32, "num_layers": 2, "vocab_size": 400, "ffn_dim": 64,
            "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
        },
        "data": {"corpus": "synthetic", "max_tokens": 64}, "train": {"num_steps": 1, "batch_tokens": 256},
        "resources": resources, "parallel": {"sharding": sharding, **parallel},
    })  # fmt: skip


SHARDINGS = pytest.mark.parametrize("sharding", ["optimizer", "gradients", "parameters"])


@SHARDINGS
@pytest.mark.parametrize(("num_workers", "parallel"), [(1, {}), (2, {"tensor": 2}), (2, {"pipeline": 2})], ids=str)
def test_one_data_rank_has_nothing_to_shard(sharding: str, num_workers: int, parallel: dict[str, Any]) -> None:
    with expect_problem("requires", "parallel.sharding", sharding):
        plan_job(job(sharding, {"num_workers": num_workers}, **parallel), TWO_CPUS)


@SHARDINGS
def test_the_planner_chooses_degrees_that_shard(sharding: str) -> None:
    plan = plan_job(job(sharding, {"num_workers": 2}), TWO_CPUS)
    assert (plan.degrees.fsdp, plan.options.sharding) == (2, sharding)


@SHARDINGS
def test_an_elastic_job_also_runs_on_one_worker(sharding: str) -> None:
    spec = job(sharding, {"min_workers": 1, "max_workers": 2})
    assert plan_job(spec, TWO_CPUS, num_workers=1).num_workers == 1
    assert plan_job(spec, TWO_CPUS, num_workers=2).degrees.fsdp == 2
