"""Plans that were kept, made again: the same to the byte on every machine.

Where the planner is meant to choose or predict otherwise, raise `moe.plan.plan_file.PLANNER` and write them anew with
`python -m tests.unit.test_golden_plans`; their diff shows what has changed.
"""

import json
from pathlib import Path

import pytest

from moe.plan import Cluster, Plan, plan_job, read_plan_request
from moe.plan.executable import refusal
from moe.plan.placement import placements_of
from moe.plan.plan_file import PLANNER
from moe.plan.profile import PROFILES

ROOT = Path(__file__).parents[2]
CLUSTERS = {
    "deepseek-v3-1024-h100": None,  # the example's own
    "gshard-600b": Cluster(num_nodes=256, devices_per_node=8, device="h100"),
    "translate-100-to-english": Cluster(num_nodes=1, devices_per_node=2, device="cpu"),
}


def planned(name: str) -> str:
    request = read_plan_request(ROOT / "examples" / f"{name}.yaml")
    cluster = CLUSTERS[name] or request.cluster
    assert cluster is not None
    return plan_job(request.spec, cluster, request.query.num_workers).model_dump_json(indent=1) + "\n"


def kept(name: str) -> Path:
    return ROOT / "tests" / "golden" / f"{name}.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
def test_a_kept_plan_is_made_again_to_the_byte(name: str) -> None:
    text = kept(name).read_text()
    plan = Plan.model_validate_json(text)
    assert plan.made_for is not None
    assert plan.made_for.planner == PLANNER
    assert planned(name) == text


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_plan_of_an_earlier_release_says_the_same(name: str) -> None:
    """Version 2 had degrees and options beside the rest, and no placements. Beside it lies what the same release's
    planner wrote as version 3: neither is ever written anew."""
    golden = ROOT / "tests" / "golden"
    text = (golden / "version-2" / f"{name}.json").read_text()
    before = Plan.model_validate_json(text)
    then = Plan.model_validate_json((golden / "version-3" / f"{name}.json").read_text())
    assert before.placements is None
    assert before == then.model_copy(update={"placements": None})
    assert Plan.model_validate_json(before.model_dump_json()) == before
    request, axes = read_plan_request(ROOT / "examples" / f"{name}.yaml"), PROFILES[before.profile].axes
    assert placements_of(request.spec.model, before.degrees.shards, axes) == then.placements
    flat = json.loads(text)
    assert {name: flat[name] for name in vars(before.degrees)} == vars(before.degrees)
    options = {**vars(before.options), "most_rows": before.options.max_rows}
    assert {name: flat[name] for name in flat.keys() & options.keys()} == {
        name: options[name] for name in flat.keys() & options.keys()
    }


def test_a_plan_of_when_language_models_could_not_be_run_is_not_run() -> None:
    """It was a peer's, by both versions; the same job is planned anew as ours, and can be run."""
    for version in ("version-2", "version-3"):
        plan = Plan.model_validate_json(
            (ROOT / "tests" / "golden" / version / "deepseek-v3-1024-h100.json").read_text()
        )
        refused = refusal(plan)
        assert plan.profile == "peer"
        assert refused is not None
        assert refused.rule == "uses features that cannot be run yet: language models, the layout of a peer"
    now = Plan.model_validate_json(kept("deepseek-v3-1024-h100").read_text())
    assert now.profile == "ours"
    assert refusal(now) is None


def test_a_plan_of_the_first_release_had_one_kind_of_arithmetic() -> None:
    text = (ROOT / "tests" / "golden" / "version-2" / "gshard-600b.json").read_text()
    seconds = {"arithmetic_s": 1.5, "all_to_all_s": 0.5}
    plan = Plan.model_validate({**json.loads(text), "version": 1, "predicted": seconds})
    assert (plan.predicted.products_s, plan.predicted.step_s, plan.version) == (1.5, 2.0, 3)


def test_a_plan_of_when_stages_were_on_several_pools_is_read_without_them() -> None:
    stage = {"pool": "old", "device_type": "a100-80", "units": 7, "micro_batch_s": 0.5,
             "memory_bytes": 1 << 30, "limit_bytes": 80 << 30}  # fmt: skip
    now = json.loads(kept("deepseek-v3-1024-h100").read_text())
    plan = Plan.model_validate_json(json.dumps({**now, "stages": [stage]}))
    assert plan == Plan.model_validate(now)


if __name__ == "__main__":
    for each in CLUSTERS:
        kept(each).write_text(planned(each))
