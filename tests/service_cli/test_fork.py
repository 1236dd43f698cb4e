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
    given = {"train": {"num_steps": 5, "optimizer": {"name": "adamw"}}, "labels": None, "name": "x"}
    asked = ["train.num_steps=4000", "train.optimizer.peak_lr=1e-3", "labels.team=research", "name=y",
             "resources={min_workers: 1, max_workers: 4}", "start_from=null", "data.paths=[a, b=c]"]  # fmt: skip
    assert apply_overrides(given, asked) == {
        "train": {"num_steps": 4000, "optimizer": {"name": "adamw", "peak_lr": 1e-3}},
        "labels": {"team": "research"}, "name": "y", "resources": {"min_workers": 1, "max_workers": 4},
        "start_from": None, "data": {"paths": ["a", "b=c"]},
    }  # fmt: skip
    assert given["name"] == "x"


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("train.num_steps", "must be PATH=VALUE"),
        ("=5", "must be PATH=VALUE"),
        ("train..num_steps=5", "must be PATH=VALUE"),
        ("name.first=5", r"names a field of name \(='x'\), which has no fields; set it as a whole"),
    ],
)
def test_fields_that_cannot_be_set(assignment: str, said: str) -> None:
    with pytest.raises(Misuse, match=said):
        apply_overrides({"name": "x", "train": {}}, [assignment])


@pytest.fixture(scope="module")
def other(plane: ControlPlane) -> dict[str, Any]:
    """A job that has ended, with checkpoints of steps 2 and 4."""
    job = plane.finished_job(labels={"team": "research"}, checkpoint={"keep": 7})
    for step in (2, 4):
        commit(job["storage"], step, spec=job["spec"])
    return job


def test_a_fork_has_the_spec_of_the_other_job_but_for_what_is_set(plane: ControlPlane, other: dict[str, Any]) -> None:
    done = shardyard("submit", "--like", other["id"], "--set", "train.num_steps=9", url=plane.url)
    assert done.returncode == 0, done.stderr
    assert f"starts from scratch; --from-step newest starts from the last checkpoint of {other['id']}" in done.stderr
    fork = plane.await_state(done.stdout.strip(), "succeeded", "failed")
    assert (fork["state"], fork["step"]) == ("succeeded", 9)
    assert fork["spec"] == {**other["spec"], "train": {**other["spec"]["train"], "num_steps": 9}}


NEEDED = {"expert_choice": {"later_tokens_choose_too": "accepted"}}
"""What a router has no default for in these models."""


def described(router: str, **fields: object) -> dict[str, Any]:
    """A job with this router, as it is stored."""
    moe = {"num_experts": 8, "router": router, **NEEDED.get(router, {}), **fields}
    model = {"preset": "gshard-tiny", "moe": moe}
    return JobSpec.parse(spec(model=model)).model_dump(mode="json")


@pytest.mark.parametrize(("before", "after"), list(permutations(ROUTERS, 2)))
def test_a_fork_with_another_router_has_that_ones_defaults(before: str, after: str) -> None:
    given = described(before, group_tokens=256, input_jitter=0.01)
    needed = [f"model.moe.{name}={value}" for name, value in NEEDED.get(after, {}).items()]
    fork = fork_spec(given, [f"model.moe.router={after}", *needed])
    assert JobSpec.parse(fork) == JobSpec.parse(described(after, group_tokens=256, input_jitter=0.01))


def test_a_fork_with_the_same_router_keeps_what_was_asked_for() -> None:
    given = described("softmax_topk", top_k=4)
    for asked in ([], ["model.moe.router=softmax_topk"]):
        assert fork_spec(given, asked) == given


@pytest.mark.parametrize("places", [1, -1])
def test_what_is_set_beside_another_router_holds_in_any_order(places: int) -> None:
    asked = ["model.moe.capacity_factor=2.5", "model.moe.router=switch_top1"][::places]
    fork = fork_spec(described("gshard_top2"), asked)
    assert JobSpec.parse(fork) == JobSpec.parse(described("switch_top1", capacity_factor=2.5))


def test_a_fork_begins_where_it_was_asked_to(plane: ControlPlane, other: dict[str, Any], tmp_path: Path) -> None:
    for asked, begun in (("newest", 4), ("2", 2)):
        fork = json_of("submit", "--like", other["id"], "--from-step", asked, url=plane.url)
        assert (fork["step"], fork["spec"]["start_from"]["job"]) == (begun, other["id"])
    file = tmp_path / "job.json"
    file.write_text(json.dumps(spec()))
    of_file = json_of("submit", file, "--set", f"start_from.job={other['id']}", url=plane.url)
    assert of_file["step"] == 4


def test_misuse(plane: ControlPlane, other: dict[str, Any]) -> None:
    like = ("--like", other["id"])
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
