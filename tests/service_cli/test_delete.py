"""`shardyard delete` and `cancel --label`: they ask for confirmation, are refused, and are done when they return."""

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.service.control_plane import ControlPlane
from tests.service_cli.command import COMMAND, DEADLINE_S, check_refused, environment, json_of, output_of
from tests.service_cli.contract_server import JOB_ID, Script, serving
from tests.service_cli.test_commands import submit, submit_long


def finished_job(plane: ControlPlane, job_file: Path) -> str:
    job_id = submit(plane, job_file)
    plane.await_state(job_id, "succeeded")
    return job_id


def at_a_terminal(plane: ControlPlane, *arguments: str, answer: str) -> tuple[int, str]:
    """Exit code and output of a command at a terminal where `answer` is typed."""
    user_fd, terminal_fd = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=terminal_fd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(plane.url),
    )  # fmt: skip
    os.write(user_fd, answer.encode() + b"\n")
    output, _ = process.communicate(timeout=DEADLINE_S)
    os.close(user_fd)
    os.close(terminal_fd)
    return process.returncode, output


@pytest.mark.slow
def test_it_is_asked_back(plane: ControlPlane, job_file: Path) -> None:
    job_id = finished_job(plane, job_file)
    storage = Path(plane.job(job_id)["storage"])
    with_what = "with 0 checkpoints, its logs and its metrics"
    question = f"Delete {job_id} (small, succeeded) {with_what}? This cannot be undone."
    check_refused(f"{question} No terminal to ask on: add --yes", "delete", job_id, url=plane.url)
    code, output = at_a_terminal(plane, "delete", job_id, answer="n")
    assert (code, f"{question} [y/N]" in output, "nothing was done" in output) == (1, True, True)
    assert storage.exists()
    code, output = at_a_terminal(plane, "delete", job_id, answer="y")
    assert (code, f"{job_id} is deleted" in output) == (0, True)
    assert not storage.exists()
    check_refused(f"{job_id} was deleted by user:local at 20", "show", job_id, url=plane.url)


def test_with_yes_and_json(plane: ControlPlane, job_file: Path) -> None:
    job_id = finished_job(plane, job_file)
    record = json_of("delete", job_id, "--yes", url=plane.url)
    assert (record["id"], record["state"]) == (job_id, "deleted")
    assert record["finished_at"] >= record["requested_at"]


def test_a_running_job_is_cancelled_first_where_that_was_said(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit_long(plane, job_file)
    words = f"{job_id} is running; only a finished or paused job can be deleted; use --cancel to cancel it first\n"
    for options in ([], ["--yes"]):  # nobody is asked to confirm what is refused
        check_refused(words, "delete", job_id, *options, url=plane.url, code=1)
    assert output_of("delete", job_id, "--yes", "--cancel", url=plane.url) == f"{job_id} is deleted\n"


def test_a_job_that_ends_before_it_is_cancelled_is_deleted_all_the_same() -> None:
    script, path = Script(), f"/v1/jobs/{JOB_ID}"
    script.answer("GET", path, 200, {"id": JOB_ID, "name": "x", "state": "running"})
    script.answer("GET", f"{path}/checkpoints", 200, {"items": []})
    script.answer("POST", f"{path}/cancel", 409, {"status": 409, "detail": f"{JOB_ID} has succeeded"})
    script.answer("DELETE", path, 202, {})
    script.answer("GET", path, 410, {"status": 410, "detail": f"{JOB_ID} was deleted"})
    script.answer("DELETE", path, 200, {"id": JOB_ID, "state": "deleted"})
    with serving(script) as url:
        assert output_of("delete", JOB_ID, "--yes", "--cancel", url=url) == f"{JOB_ID} is deleted\n"


def test_a_folder_that_cannot_be_removed(plane: ControlPlane, job_file: Path) -> None:
    job_id = finished_job(plane, job_file)
    storage = Path(plane.job(job_id)["storage"])
    moved_path = storage.rename(storage.with_name("moved"))
    storage.symlink_to(moved_path)
    errors = check_refused("cannot be deleted yet", "delete", job_id, "--yes", url=plane.url, code=1)
    assert "is a symbolic link, which is not followed" in errors
    assert (moved_path / "spec.json").exists()
    assert "deleting  cannot be deleted yet" in output_of("show", job_id, url=plane.url)
    storage.unlink()
    output_of("delete", job_id, "--yes", url=plane.url)


def queue_job(plane: ControlPlane, **labels: str) -> str:
    return str(plane.post(labels=labels, resources={"num_workers": 900})["id"])


def test_all_with_a_label_are_asked_back_and_each_is_told_of(plane: ControlPlane) -> None:
    first, second = queue_job(plane, sweep="a", size="1"), queue_job(plane, sweep="a", size="2")
    other_id, ended_id = queue_job(plane, sweep="b"), queue_job(plane, sweep="a")
    plane.act(ended_id, "cancel")
    cancel = ("cancel", "--label", "sweep=a")
    question = f"Cancel 2 jobs with sweep=a: {second} (small, queued), {first} (small, queued)?"
    check_refused(f"{question} No terminal to ask on: add --yes", *cancel, url=plane.url)
    code, output = at_a_terminal(plane, *cancel, answer="n")
    assert (code, question in output) == (1, True)
    assert plane.job(first)["state"] == "queued"
    lines = output_of(*cancel, "--yes", url=plane.url).splitlines()
    assert lines == [f"{job_id} is cancelled (cancelled by local)" for job_id in (second, first)]
    assert plane.job(other_id)["state"] == "queued"
    assert output_of(*cancel, url=plane.url) == "no unfinished job has sweep=a\n"


def test_several_labels_must_all_match_and_json_says_what_became_of_each(plane: ControlPlane) -> None:
    red, red_large = queue_job(plane, colour="red"), queue_job(plane, colour="red", size="large")
    report = json_of("cancel", "--label", "colour=red", "--label", "size", "--yes", url=plane.url)
    assert report == {"items": [{"id": red_large, "state": "cancelled", "error": None}]}
    assert plane.job(red)["state"] == "queued"
    for arguments in ((), (red, "--label", "a=b")):
        words = "give a JOB, or --label KEY=VALUE for all jobs with that label"
        check_refused(words, "cancel", *arguments, url=plane.url)
    answer = plane.http.get("/v1/jobs", params={"label": [f"k{number}" for number in range(33)]})
    assert answer.status_code == 422, "none is left out unnoticed: more labels must never match more jobs"
