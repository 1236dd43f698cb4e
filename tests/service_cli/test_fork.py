"""`submit --like`: another job's spec, with fields set by hand, from the start or from one of its checkpoints."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from moe.spec import JobSpec
from moe.spec.routers import ROUTERS
from service.cli.failures import Misuse
from service.cli.overrides import apply_overrides, fork_spec
from tests.service.checkpoints import commit
from tests.service.control_plane import ControlPlane, spec
from tests.service_cli.command import check_refused, json_of, shardyard


def test_fields_are_set_at_any_depth_and_the_rest_stays() -> None:
    base_spec = {"train": {"num_steps": 5, "optimizer": {"name": "adamw"}}, "labels": None, "name": "x"}
    overrides = ["train.num_steps=4000", "train.optimizer.peak_lr=1e-3", "labels.team=research", "name=y",
             "resources={min_workers: 1, max_workers: 4}", "start_from=null", "data.paths=[a, b=c]"]  # fmt: skip
    assert apply_overrides(base_spec, overrides) == {
        "train": {"num_steps": 4000, "optimizer": {"name": "adamw", "peak_lr": 1e-3}},
        "labels": {"team": "research"}, "name": "y", "resources": {"min_workers": 1, "max_workers": 4},
        "start_from": None, "data": {"paths": ["a", "b=c"]},
    }  # fmt: skip
    assert base_spec["name"] == "x"


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.num_steps", "must be PATH=VALUE"),
        ("=5", "must be PATH=VALUE"),
        ("train..num_steps=5", "must be PATH=VALUE"),
        ("name.first=5", r"names a field of name \(='x'\), which has no fields; set it as a whole"),
    ],
)
def test_fields_that_cannot_be_set(assignment: str, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        apply_overrides({"name": "x", "train": {}}, [assignment])


@pytest.fixture(scope="module")
def other_job(plane: ControlPlane) -> dict[str, Any]:
    """A job that has ended, with checkpoints of steps 2 and 4."""
    job = plane.finished_job(labels={"team": "research"}, checkpoint={"keep": 7})
    for step in (2, 4):
        commit(job["storage"], step, spec=job["spec"])
    return job


def test_a_fork_has_the_spec_of_the_other_job_but_for_what_is_set(
    plane: ControlPlane, other_job: dict[str, Any]
) -> None:
    result = shardyard("submit", "--like", other_job["id"], "--set", "train.num_steps=9", url=plane.url)
    assert result.returncode == 0, result.stderr
    assert (
        f"starts from scratch; --from-step newest starts from the last checkpoint of {other_job['id']}" in result.stderr
    )
    fork = plane.await_state(result.stdout.strip(), "succeeded", "failed")
    assert (fork["state"], fork["step"]) == ("succeeded", 9)
    assert fork["spec"] == {**other_job["spec"], "train": {**other_job["spec"]["train"], "num_steps": 9}}


REQUIRED_FIELDS = {"expert_choice": {"later_tokens_choose_too": "accepted"}}
"""Fields of a router that have no default in these models."""


def stored_spec(router: str, **fields: object) -> dict[str, Any]:
    """A job with this router, as it is stored."""
    moe = {"num_experts": 8, "router": router, **REQUIRED_FIELDS.get(router, {}), **fields}
    model = {"preset": "gshard-tiny", "moe": moe}
    return JobSpec.parse(spec(model=model)).model_dump(mode="json")


@pytest.mark.parametrize(("before", "after"), list(permutations(ROUTERS, 2)))
def test_a_fork_with_another_router_has_that_ones_defaults(before: str, after: str) -> None:
    base_spec = stored_spec(before, group_tokens=256, input_jitter=0.01)
    requirements = [f"model.moe.{name}={value}" for name, value in REQUIRED_FIELDS.get(after, {}).items()]
    fork = fork_spec(base_spec, [f"model.moe.router={after}", *requirements])
    assert JobSpec.parse(fork) == JobSpec.parse(stored_spec(after, group_tokens=256, input_jitter=0.01))


def test_a_fork_with_the_same_router_keeps_what_was_asked_for() -> None:
    base_spec = stored_spec("softmax_topk", top_k=4)
    for overrides in ([], ["model.moe.router=softmax_topk"]):
        assert fork_spec(base_spec, overrides) == base_spec


@pytest.mark.parametrize("places", [1, -1])
def test_what_is_set_beside_another_router_holds_in_any_order(places: int) -> None:
    overrides = ["model.moe.capacity_factor=2.5", "model.moe.router=switch_top1"][::places]
    fork = fork_spec(stored_spec("gshard_top2"), overrides)
    assert JobSpec.parse(fork) == JobSpec.parse(stored_spec("switch_top1", capacity_factor=2.5))


def test_a_fork_begins_where_it_was_asked_to(plane: ControlPlane, other_job: dict[str, Any], tmp_path: Path) -> None:
    for from_step, expected_step in (("newest", 4), ("2", 2)):
        fork = json_of("submit", "--like", other_job["id"], "--from-step", from_step, url=plane.url)
        assert (fork["step"], fork["spec"]["start_from"]["job"]) == (expected_step, other_job["id"])
    file = tmp_path / "job.json"
    file.write_text(json.dumps(spec()))
    of_file = json_of("submit", file, "--set", f"start_from.job={other_job['id']}", url=plane.url)
    assert of_file["step"] == 4


def test_misuse(plane: ControlPlane, other_job: dict[str, Any]) -> None:
    like = ("--like", other_job["id"])
    for arguments, words in (
        ((), "give either FILE or --like JOB"),
        (("job.yaml", "--like", "job-aaaaaaaaaaaa"), "give either FILE or --like JOB"),
        (("job.yaml", "--from-step", "3"), "--from-step requires --like JOB"),
        (("--like", "job-aaaaaaaaaaaa"), "there is no job 'job-aaaaaaaaaaaa'"),
        ((*like, "--from-step", "last"), "must be a step or 'newest'"),
        ((*like, "--from-step", "3"), "start_from.step (=3) is not a committed checkpoint"),
        ((*like, "--set", "model.moe.router=top9"), "model.moe.router (='top9')"),
    ):
        errors = check_refused(words, "submit", *arguments, url=plane.url)
    assert errors.count("\n") == 1, "a router that is none is the only mistake"
