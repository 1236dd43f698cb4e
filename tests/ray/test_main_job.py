"""The main job: posted, followed to its end, its checkpoint loaded in another process."""

import json
import subprocess
import sys

import pytest

from moe.plan.search.explain import layout_of
from tests.processes import DEADLINE_S
from tests.ray.control_plane import NUM_STEPS, ControlPlane, FinishedJob, job_spec, losses, state_changes

TRANSLATE = """
import json, sys
from moe.export.load import load_trained
print(json.dumps(load_trained(sys.argv[1]).generate(["Speichern", "Abbrechen"])))
"""


def test_the_stream_has_every_event_of_the_job_in_order(reference_job: FinishedJob) -> None:
    events = reference_job.events
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert [data["state"] for data in state_changes(events)] == ["queued", "starting", "running", "succeeded"]
    metrics = [event for event in events if event.kind == "metric"]
    assert [event.data["step"] for event in metrics] == list(range(1, NUM_STEPS + 1))
    assert {event.attempt for event in metrics} == {1}
    steps = [event.data["step"] for event in events if event.kind == "checkpoint"]
    assert steps == list(range(10, NUM_STEPS + 1, 10))
    phases = {event.data["name"]: event.data["seconds"] for event in events if event.data.get("record") == "phase"}
    assert min(phases[name] for name in ("imports", "worker_group", "data", "model", "first_step")) > 0


def test_processes_listen_on_loopback_alone_and_none_is_started_in_vain(reference_job: FinishedJob) -> None:
    """Ray's processes, the workers' rendezvous store and gloo. An additional process would import the same modules at
    the same time as the workers."""
    assert len(reference_job.listening) > 10
    assert [address for address in reference_job.listening if not address.is_loopback] == []
    of_the_cluster = {"_AutoscalingCoordinatorActor", "DashboardAgent", "RuntimeEnvAgent", "IDLE"}
    of_the_job = [actor for actor in reference_job.actors if actor not in of_the_cluster]
    assert of_the_job == ["JobSupervisor", "RayTrainWorker", "RayTrainWorker"]


def test_it_learned_with_every_expert_spread_over_both_workers(reference_job: FinishedJob) -> None:
    job = reference_job.job
    loss = list(losses(job).values())
    assert sum(loss[-10:]) < sum(loss[:10]) - 5
    plan = job.plan()
    assert (plan.num_workers, plan.degrees.expert) == (2, 2)
    assert set(job.report["sets"]) == {"unseen", "seen"}
    assert job.data["dashboard_url"].endswith(f"/#/jobs/{job.id}-a1")
    lines = list(job.logs())  # including workers that have ended
    assert {line["worker"] for line in lines} >= {"driver", "g0.rank-0", "g0.rank-1"}
    assert any(f"checkpoint of step {NUM_STEPS} committed" in line["message"] for line in lines)


def test_its_checkpoint_translates_in_a_new_process(reference_job: FinishedJob) -> None:
    newest = reference_job.job.checkpoints()[-1]
    folder = f"{reference_job.job.storage}/checkpoints/{newest['name']}"
    process = subprocess.run(
        [sys.executable, "-c", TRANSLATE, folder], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert list(map(type, json.loads(process.stdout))) == [str, str]


@pytest.mark.slow
def test_the_fastest_of_three_plans_is_run_where_that_is_asked_for(plane: ControlPlane) -> None:
    train = {"num_steps": 20, "batch_tokens": 1024, "evaluation": {"max_pairs": 4}}
    job = plane.client.submit(job_spec(train=train, parallel={"auto": "measured"}))
    assert job.wait(DEADLINE_S).state == "succeeded", job.data
    plan = job.plan()
    assert len(plan.tried) == 3
    assert len({str(trial.layout) for trial in plan.tried}) == 3
    fastest = min(plan.tried, key=lambda trial: trial.measured_step_s)
    assert fastest.layout == layout_of(plan)
    plans = [event.data for event in job.events() if event.kind == "plan"]
    assert "tried" not in plans[0]["plan"]  # the plan before the run
    assert [trial["layout"] for trial in plans[1]["plan"]["tried"]] == [trial.layout for trial in plan.tried]
    assert plan.measured.num_steps > 10
