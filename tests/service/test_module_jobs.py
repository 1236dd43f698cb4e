"""Jobs of users' modules at the control plane: planned, trained, resumed; its own process never imports them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe.plan import Plan
from service.client import Client
from tests.processes import await_that
from tests.refusals import check
from tests.service.control_plane import ControlPlane
from tests.service.users_module import batch

ROOT = Path(__file__).parents[2]
CODE = "tests.service.users_module"


def job(build: str = "build", **changes: Any) -> dict[str, Any]:
    return {
        "model": {"kind": "module", "build": f"{CODE}:{build}"},
        "data": {"corpus": "module", "batches": f"{CODE}:batch"},
        "train": {"num_steps": 8, "optimizer": {"name": "adamw", "peak_lr": 0.02}},
        "checkpoint": {"every_steps": 2},
        "labels": {"trains": "yes"},
        **changes,
    }


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that allows some functions."""
    codes = [f"{CODE}:{name}" for name in ("build", "returns_numbers", "batch", "raises", "reads_values")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        plane = ControlPlane(tmp_path_factory.mktemp("modules"), allowed_code=codes).start()
        yield plane
        plane.close()


@pytest.mark.slow
def test_scalars_that_a_module_returns_beside_its_loss_are_recorded_with_each_step(modules: ControlPlane) -> None:
    train = {"num_steps": 3, "optimizer": {"name": "adamw", "peak_lr": 0.02}}
    final_job = modules.finished_job(**job("returns_numbers", train=train))
    expected = [float(rating_B.max() - rating_B.min()) for _, rating_B in (batch(0, step) for step in range(4))]
    of_the_end = expected.pop()
    assert final_job["result"]["report"]["numbers"] == {"spread": pytest.approx(of_the_end)}
    assert final_job["last_metric"]["numbers"] == {"spread": pytest.approx(expected[-1])}
    points = modules.metrics(final_job["id"], name="numbers")
    assert [point["numbers"]["spread"] for point in points] == pytest.approx(expected)


@pytest.mark.slow
def test_a_module_is_trained_and_goes_on_after_its_driver_died(modules: ControlPlane) -> None:
    through = modules.post(**job())["id"]
    broken = modules.post(**job(labels={"trains": "yes", "die_at": "5"}))["id"]
    for job_id in (through, broken):
        final_job = modules.await_state(job_id, "succeeded", "failed")
        assert (final_job["state"], final_job["step"]) == ("succeeded", 8), final_job["reason"]
    assert len(modules.losses(through)) == 8
    assert modules.losses(broken) == modules.losses(through)
    report = modules.job(broken)["result"]["report"]
    assert report == modules.job(through)["result"]["report"]
    assert report["num_steps"] == 8


@pytest.mark.slow
def test_its_plan_is_stored_and_can_be_asked_for(modules: ControlPlane) -> None:
    new_job = modules.post(**job(train={"num_steps": 1}, resources={"num_workers": 2}, labels={}))
    with Client(modules.url) as client:
        await_that(lambda: modules.http.get(f"/v1/jobs/{new_job['id']}/plan").status_code == 200)
        plan = client.job(new_job["id"]).plan()
        assert plan.module is not None
        assert (plan.num_workers, plan.mesh) == (2, {"devices": 2})
        repeat = client.plan(job(train={"num_steps": 1}, resources={"num_workers": 2}))
        assert repeat.module == plan.module
    request = {"spec": job(), "cluster": {"num_nodes": 1, "devices_per_node": 4}, "num_workers": 4}
    answer = modules.http.post("/v1/plans", json=request)
    assert Plan.model_validate(answer.json()).mesh in ({"devices": 4}, {"outer": 2, "inner": 2})


@pytest.mark.slow
@pytest.mark.parametrize(("build", "place", "rule"), [
    ("raises", "model", "cannot be planned: KeyError: 'no such layer' (users_module.py:"),
    ("reads_values", "tests/service/users_module.py:", "must not read a tensor's values: "),
])  # fmt: skip
def test_a_fault_of_a_module_is_told_by_its_place(modules: ControlPlane, build: str, place: str, rule: str) -> None:
    new_job = modules.post(**job(build))
    assert new_job["reason"] == "waiting for its turn; capturing and planning its module"
    answer = modules.http.post("/v1/plans", json=job(build))
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:shardyard:problem:invalid-spec")
    (error,) = answer.json()["errors"]
    assert error["path"].startswith(place)
    assert error["rule"].startswith(rule)
    failed_job = modules.await_state(new_job["id"], "failed")
    assert failed_job["reason"].startswith("its module cannot be planned: ")
    assert rule in failed_job["reason"]
    repeat = modules.http.post("/v1/jobs", json=job(build))
    assert (repeat.status_code, repeat.json()["errors"]) == (422, [error]), "what is known is told at once"


@pytest.mark.slow
def test_neither_post_nor_queue_waits_for_a_module(own_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code sleeps for ever; an answer to this test is one that did not wait for it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    own_plane.start(allowed_code=[f"{CODE}:sleeps", f"{CODE}:batch"])
    note = own_plane.folder / "note"
    asleep = job("sleeps", labels={})
    asleep["model"]["options"] = {"note": str(note)}
    new_job = own_plane.post(**asleep)
    await_that(note.exists)
    own_plane.finished_job()
    queued_job = own_plane.job(new_job["id"])
    assert (queued_job["state"], queued_job["reason"]) == (
        "queued",
        "waiting for its turn; capturing and planning its module",
    )


@pytest.mark.slow
def test_a_resumed_job_is_planned_anew(modules: ControlPlane) -> None:
    job_id = modules.post(**job(labels={"step_ms": "1000"}, train={"num_steps": 1000}))["id"]
    assert modules.act(job_id, "pause").status_code == 202
    modules.await_state(job_id, "paused")
    modules.act(job_id, "resume")
    modules.await_state(job_id, "starting", "running")
    assert modules.http.get(f"/v1/jobs/{job_id}/plan").status_code == 200
    modules.act(job_id, "cancel")
    modules.await_state(job_id, "cancelled")


OTHER_CODE = "a_users_module"


def module_spec(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"kind": "module", "build": f"{OTHER_CODE}:build"},
        "data": {"corpus": "module", "batches": f"{OTHER_CODE}:batch"},
        "train": {"num_steps": 2},
        **changes,
    }


def test_without_the_operators_word_no_function_is_taken(plane: ControlPlane) -> None:
    elsewhere = {"spec": module_spec(), "cluster": {"num_nodes": 1, "devices_per_node": 2}}
    expected = [
        ("not_allowed", "model.build", f"{OTHER_CODE}:build"),
        ("not_allowed", "data.batches", f"{OTHER_CODE}:batch"),
    ]
    for path, body in (("/v1/jobs", module_spec()), ("/v1/plans", module_spec()), ("/v1/plans", elsewhere)):
        answer = plane.http.post(path, json=body)
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:shardyard:problem:invalid-spec")
        check(answer.json()["errors"], expected)


def test_one_that_is_allowed_allows_no_other(own_plane: ControlPlane) -> None:
    own_plane.start(allowed_code=[f"{OTHER_CODE}:build"])
    answer = own_plane.http.post("/v1/jobs", json=module_spec())
    check(answer.json()["errors"], [("not_allowed", "data.batches", f"{OTHER_CODE}:batch")])
