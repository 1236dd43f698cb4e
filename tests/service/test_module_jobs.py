"""Jobs of users' modules at the control plane: planned, trained, resumed; its own process never imports them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe.plan import Plan
from service.client import Client
from tests.processes import await_that
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
    allowed = [f"{CODE}:{name}" for name in ("build", "measured", "batch", "raises", "reads_values")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        plane = ControlPlane(tmp_path_factory.mktemp("modules"), allowed_code=allowed).start()
        yield plane
        plane.close()


def losses(plane: ControlPlane, job_id: str) -> dict[int, float]:
    points = plane.http.get(f"/v1/jobs/{job_id}/metrics", params={"name": "loss"}).json()["items"]
    return {point["step"]: point["loss"] for point in points}


def test_scalars_that_a_module_returns_beside_its_loss_are_recorded_with_each_step(modules: ControlPlane) -> None:
    train = {"num_steps": 3, "optimizer": {"name": "adamw", "peak_lr": 0.02}}
    done = modules.await_state(modules.post(**job("measured", train=train))["id"], "succeeded", "failed")
    assert done["state"] == "succeeded", done["reason"]
    expected = [float(rating_B.max() - rating_B.min()) for _, rating_B in (batch(0, step) for step in range(4))]
    of_the_end = expected.pop()
    assert done["result"]["report"]["numbers"] == {"spread": pytest.approx(of_the_end)}
    assert done["last_metric"]["numbers"] == {"spread": pytest.approx(expected[-1])}
    points = modules.http.get(f"/v1/jobs/{done['id']}/metrics?name=numbers").json()["items"]
    assert [point["numbers"]["spread"] for point in points] == pytest.approx(expected)


@pytest.mark.slow
def test_a_module_is_trained_and_goes_on_after_its_driver_died(modules: ControlPlane) -> None:
    through = modules.post(**job())["id"]
    broken = modules.post(**job(labels={"trains": "yes", "die_at": "5"}))["id"]
    for job_id in (through, broken):
        done = modules.await_state(job_id, "succeeded", "failed")
        assert (done["state"], done["step"]) == ("succeeded", 8), done["reason"]
    assert len(losses(modules, through)) == 8
    assert losses(modules, broken) == losses(modules, through)
    report = modules.job(broken)["result"]["report"]
    assert report == modules.job(through)["result"]["report"]
    assert report["num_steps"] == 8


@pytest.mark.slow
def test_its_plan_is_stored_and_can_be_asked_for(modules: ControlPlane) -> None:
    posted = modules.post(**job(train={"num_steps": 1}, resources={"num_workers": 2}, labels={}))
    with Client(modules.url) as client:
        await_that(lambda: modules.http.get(f"/v1/jobs/{posted['id']}/plan").status_code == 200)
        plan = client.job(posted["id"]).plan()
        assert plan.module is not None
        assert (plan.num_workers, plan.mesh) == (2, {"devices": 2})
        again = client.plan(job(train={"num_steps": 1}, resources={"num_workers": 2}))
        assert again.module == plan.module
    other = {"spec": job(), "cluster": {"num_nodes": 1, "devices_per_node": 4}, "num_workers": 4}
    answer = modules.http.post("/v1/plans", json=other)
    assert Plan.model_validate(answer.json()).mesh in ({"devices": 4}, {"outer": 2, "inner": 2})


@pytest.mark.parametrize(("build", "place", "rule"), [
    ("raises", "model", "cannot be planned: KeyError: 'no such layer' (users_module.py:"),
    ("reads_values", "tests/service/users_module.py:", "must not read a tensor's values: which way it goes"),
])  # fmt: skip
def test_what_is_wrong_with_a_module_is_told(modules: ControlPlane, build: str, place: str, rule: str) -> None:
    posted = modules.post(**job(build))
    assert posted["reason"] == "waiting for its turn; capturing and planning its module"
    answer = modules.http.post("/v1/plans", json=job(build))
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:shardyard:problem:invalid-spec")
    (error,) = answer.json()["errors"]
    assert error["path"].startswith(place)
    assert error["rule"].startswith(rule)
    assert error["remedy"]
    failed = modules.await_state(posted["id"], "failed")
    assert failed["reason"].startswith("its module cannot be planned: ")
    assert rule in failed["reason"]
    again = modules.http.post("/v1/jobs", json=job(build))
    assert (again.status_code, again.json()["errors"]) == (422, [error]), "what is known is told at once"


def test_a_post_does_not_wait_for_a_module_nor_the_queue_for_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code sleeps for ever; an answer to this test is one that did not wait for it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    plane = ControlPlane(tmp_path, allowed_code=[f"{CODE}:sleeps", f"{CODE}:batch"]).start()
    note = tmp_path / "note"
    asleep = job("sleeps", labels={})
    asleep["model"]["options"] = {"note": str(note)}
    posted = plane.post(**asleep)
    await_that(note.exists)
    other = plane.post(labels={})
    plane.await_state(other["id"], "succeeded")
    assert plane.job(posted["id"])["state"] == "queued"
    assert plane.job(posted["id"])["reason"] == "waiting for its turn; capturing and planning its module"
    plane.close()


@pytest.mark.slow
def test_a_resumed_job_is_planned_anew(modules: ControlPlane) -> None:
    posted = modules.post(**job(labels={"step_ms": "1000"}, train={"num_steps": 1000}))["id"]
    assert modules.http.post(f"/v1/jobs/{posted}/pause").status_code == 202
    modules.await_state(posted, "paused")
    modules.http.post(f"/v1/jobs/{posted}/resume")
    modules.await_state(posted, "starting", "running")
    assert modules.http.get(f"/v1/jobs/{posted}/plan").status_code == 200
    modules.http.post(f"/v1/jobs/{posted}/cancel")
    modules.await_state(posted, "cancelled")


def test_the_control_plane_itself_imports_nothing_of_it(tmp_path: Path) -> None:
    """The module notes who imports it: a process that plans, and never the one that serves."""
    imported_by = tmp_path / "imported-by"
    (tmp_path / "notes_who_imports_it.py").write_text(
        f"import os\nwith open({str(imported_by)!r}, 'a') as notes:\n    print(os.getpid(), file=notes)\n"
        f"from {CODE} import batch, build\n"
    )
    code = f"""
import json, os, sys
from fastapi.testclient import TestClient
from pathlib import Path
from service.control.app import create_app
from service.settings import Settings
from tests.service.control_plane import NODE
from tests.service.local_launcher import LocalLauncher
name = "notes_who_imports_it"
launcher = LocalLauncher(Path({str(tmp_path)!r}) / "cluster")
launcher.set_nodes(NODE)
def spec(module):
    return {{"model": {{"kind": "module", "build": module + ":build"}}, "train": {{"num_steps": 1}},
             "data": {{"corpus": "module", "batches": module + ":batch"}}, "resources": {{"num_workers": 2}}}}
allowed = name + ":build", name + ":batch"
settings = Settings(state_dir={str(tmp_path)!r}, controller_interval_s=60, allowed_code=allowed)
with TestClient(create_app(settings, launcher), base_url="http://127.0.0.1") as client:
    assert client.post("/v1/jobs", json=spec("tests.service.users_module")).status_code == 422
    assert not Path({str(imported_by)!r}).exists()
    for path, status in (("/v1/plans", 200), ("/v1/jobs", 201)):
        answer = client.post(path, json=spec(name))
        assert answer.status_code == status, answer.text
    job = client.get("/v1/jobs").json()["items"][0]["id"]
    assert client.get(f"/v1/jobs/{{job}}/plan").status_code == 200
launcher.end_all()
users = [each for each in (name, "tests.service.users_module", "torch", "moe.sharding") if each in sys.modules]
print(json.dumps([os.getpid(), users]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    own, users = json.loads(done.stdout.splitlines()[-1])
    assert users == []
    importers = imported_by.read_text().split()
    assert importers
    assert str(own) not in importers
