"""Jobs that are continued train to the losses they would have had: real training, without Ray."""

from pathlib import Path
from typing import Any

import pytest

from tests.service.control_plane import ControlPlane
from tests.unit.train_runs import corpus, job


def losses(plane: ControlPlane, job_id: str) -> dict[int, float]:
    points = plane.http.get(f"/v1/jobs/{job_id}/metrics", params={"name": "loss"}).json()["items"]
    return {point["step"]: point["loss"] for point in points}


@pytest.mark.slow
def test_a_failed_job_that_is_resumed_and_a_fork_have_the_losses_of_one_that_ran_through(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path / "plane", data_roots=[str(tmp_path)])
    given = job(corpus(tmp_path)).model_dump(mode="json")

    def post(**changes: Any) -> str:
        answer = plane.http.post("/v1/jobs", json={**given, **changes})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    plane.start()
    try:
        through = post(labels={"trains": "yes"})
        broken = post(labels={"trains": "yes", "die_at": "7"}, retry={"max_failures": 0})
        failed = plane.await_state(broken, "failed", "succeeded")
        assert "ended (failed) without a result" in failed["reason"]
        assert max(losses(plane, broken)) == 6
        assert plane.http.post(f"/v1/jobs/{broken}/resume").status_code == 202
        assert plane.await_state(through, "succeeded", "failed")["state"] == "succeeded"
        fork = post(labels={"trains": "yes"}, start_from={"job": through, "step": 6}, checkpoint={"keep": 1})
        for job_id in (broken, fork):
            done = plane.await_state(job_id, "succeeded", "failed")
            assert (done["state"], done["step"]) == ("succeeded", 8), done["reason"]
        assert losses(plane, broken) == losses(plane, through)
        assert losses(plane, fork) == {step: loss for step, loss in losses(plane, through).items() if step > 6}
        resumed = [event.data["message"] for event in plane.events(fork) if event.kind == "log"]
        assert "resumed at step 6 from step-00000006.a0.g0 of 1 workers on 1" in resumed
    finally:
        plane.close()
