"""Stored plans, made again: identical bytes on every machine.

When the planner is meant to choose or predict something else, raise `moe.plan.plan_file.PLANNER` and write the plans
again with `python -m tests.unit.test_golden_plans`; their diff shows what has changed.
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
GOLDEN = ROOT / "tests" / "golden"
DEEPSEEK = "deepseek-v3-1024-h100"
CLUSTERS = {
    DEEPSEEK: None,  # the example's own
    "gshard-600b": Cluster(num_nodes=256, devices_per_node=8, device="h100"),
    "translate-100-to-english": Cluster(num_nodes=1, devices_per_node=2, device="cpu"),
}


def plan_json(name: str) -> str:
    request = read_plan_request(ROOT / "examples" / f"{name}.yaml")
    cluster = CLUSTERS[name] or request.cluster
    assert cluster is not None
    return plan_job(request.spec, cluster, request.query.num_workers).model_dump_json(indent=1) + "\n"


def plan_of(name: str, version: str = ".") -> Plan:
    return Plan.model_validate_json((GOLDEN / version / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
def test_a_stored_plan_is_made_again_to_the_byte(name: str) -> None:
    plan = plan_of(name)
    assert plan.made_for is not None
    assert plan.made_for.planner == PLANNER
    assert plan_json(name) == (GOLDEN / f"{name}.json").read_text()


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_plan_of_version_2_is_read_as_that_of_version_3(name: str) -> None:
    """Version 2 had degrees and options next to the other fields, and no placements. Both files come from the same
    release and are never written again."""
    old, new = plan_of(name, "version-2"), plan_of(name, "version-3")
    assert old.placements is None
    assert old == new.model_copy(update={"placements": None})
    assert Plan.model_validate_json(old.model_dump_json()) == old
    request, axes = read_plan_request(ROOT / "examples" / f"{name}.yaml"), PROFILES[old.profile].axes
    assert placements_of(request.spec.model, old.degrees.shards, axes) == new.placements
    flat = json.loads((GOLDEN / "version-2" / f"{name}.json").read_text())
    fields = {**vars(old.degrees), **vars(old.options), "most_rows": old.options.max_rows}
    assert vars(old.degrees).keys() <= flat.keys()
    assert {field: flat[field] for field in flat.keys() & fields.keys()} == {
        field: fields[field] for field in flat.keys() & fields.keys()
    }


def test_a_language_model_plan_that_could_not_be_run_is_still_refused() -> None:
    """It had a peer's layout; the same job is planned today as ours, and can be run."""
    for version in ("version-2", "version-3"):
        plan = plan_of(DEEPSEEK, version)
        problem = refusal(plan)
        assert (plan.profile, problem is None) == ("peer", False)
        assert problem.rule == "uses features that cannot be run yet: language models, the layout of a peer"
    assert (plan_of(DEEPSEEK).profile, refusal(plan_of(DEEPSEEK))) == ("ours", None)


def test_plans_with_fields_of_earlier_releases_are_read() -> None:
    """One kind of arithmetic in the first release, and stages over several pools in a later one."""
    body = json.loads((GOLDEN / "version-2" / "gshard-600b.json").read_text())
    plan = Plan.model_validate({**body, "version": 1, "predicted": {"arithmetic_s": 1.5, "all_to_all_s": 0.5}})
    assert (plan.predicted.products_s, plan.predicted.step_s, plan.version) == (1.5, 2.0, 3)
    stage = {"pool": "old", "device_type": "a100-80", "units": 7, "micro_batch_s": 0.5,
             "memory_bytes": 1 << 30, "limit_bytes": 80 << 30}  # fmt: skip
    body = json.loads((GOLDEN / f"{DEEPSEEK}.json").read_text())
    assert Plan.model_validate_json(json.dumps({**body, "stages": [stage]})) == plan_of(DEEPSEEK)


if __name__ == "__main__":
    for example in CLUSTERS:
        (GOLDEN / f"{example}.json").write_text(plan_json(example))
