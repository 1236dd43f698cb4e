"""`shardyard delete`: asked back, refused in words, and through when the command is."""

import json
import os
import pty
import subprocess
from pathlib import Path

from tests.service.control_plane import ControlPlane
from tests.service_cli.command import COMMAND, DEADLINE_S, environment, shardyard
from tests.service_cli.contract_server import JOB_ID, Script, serving
from tests.service_cli.test_commands import submit


def finished(plane: ControlPlane, job_file: Path) -> str:
    job_id = submit(plane, job_file)
    plane.await_state(job_id, "succeeded")
    return job_id


def at_a_terminal(plane: ControlPlane, *arguments: str, answer: str) -> tuple[int, str]:
    """The exit code and what was said to somebody who types `answer` when asked."""
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [*COMMAND, *arguments], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(plane.url),
    )  # fmt: skip
    os.write(ours, answer.encode() + b"\n")
    said, _ = done.communicate(timeout=DEADLINE_S)
    os.close(ours)
    os.close(theirs)
    return done.returncode, said


def test_it_is_asked_back(plane: ControlPlane, job_file: Path) -> None:
    job_id = finished(plane, job_file)
    storage = Path(plane.job(job_id)["storage"])
    with_what = "with 0 checkpoints, its logs and its metrics"
    question = f"Delete {job_id} (small, succeeded) {with_what}? This cannot be undone."
    refused = shardyard("delete", job_id, url=plane.url)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{question} No terminal to ask on: add --yes" in refused.stderr
    code, said = at_a_terminal(plane, "delete", job_id, answer="n")
    assert (code, f"{question} [y/N]" in said, "nothing was done" in said) == (1, True, True)
    assert storage.exists()
    code, said = at_a_terminal(plane, "delete", job_id, answer="y")
    assert (code, f"{job_id} is deleted" in said) == (0, True)
    assert not storage.exists()
    gone = shardyard("show", job_id, url=plane.url)
    assert (gone.returncode, f"{job_id} was deleted by user:local at 20" in gone.stderr) == (2, True)


def test_with_yes_and_json(plane: ControlPlane, job_file: Path) -> None:
    job_id = finished(plane, job_file)
    done = shardyard("delete", job_id, "--yes", "--json", url=plane.url)
    record = json.loads(done.stdout)
    assert (done.returncode, record["id"], record["state"]) == (0, job_id, "deleted")
    assert record["finished_at"] >= record["requested_at"]


def test_a_running_job_is_cancelled_first_where_that_was_said(plane: ControlPlane, job_file: Path) -> None:
    job_file.write_text(job_file.read_text().replace("num_steps: 5", "num_steps: 100000"))
    job_id = submit(plane, job_file, step_ms="5")
    plane.await_state(job_id, "running")
    refused = f"shardyard: {job_id} is running; only a finished or paused job can be deleted; use --cancel"
    for asked in ([], ["--yes"]):  # nobody is asked about what is not done
        told = shardyard("delete", job_id, *asked, url=plane.url)
        assert (told.returncode, told.stderr) == (1, f"{refused} to cancel it first\n")
    done = shardyard("delete", job_id, "--yes", "--cancel", url=plane.url)
    assert (done.returncode, done.stdout) == (0, f"{job_id} is deleted\n")


def test_a_job_that_ends_before_it_is_cancelled_is_deleted_all_the_same() -> None:
    script, path = Script(), f"/v1/jobs/{JOB_ID}"
    job = {"id": JOB_ID, "name": "x", "state": "running"}
    script.answer("GET", path, 200, job)
    script.answer("GET", f"{path}/checkpoints", 200, {"items": []})
    script.answer("POST", f"{path}/cancel", 409, {"status": 409, "detail": f"{JOB_ID} has succeeded"})
    script.answer("DELETE", path, 202, {})
    script.answer("GET", path, 410, {"status": 410, "detail": f"{JOB_ID} was deleted"})
    script.answer("DELETE", path, 200, {"id": JOB_ID, "state": "deleted"})
    with serving(script) as url:
        done = shardyard("delete", JOB_ID, "--yes", "--cancel", url=url)
    assert (done.returncode, done.stdout) == (0, f"{JOB_ID} is deleted\n"), done.stderr


def test_what_cannot_be_removed_is_said(plane: ControlPlane, job_file: Path) -> None:
    job_id = finished(plane, job_file)
    storage = Path(plane.job(job_id)["storage"])
    moved = storage.rename(storage.with_name("moved"))
    storage.symlink_to(moved)
    done = shardyard("delete", job_id, "--yes", url=plane.url)
    assert done.returncode == 1
    assert "cannot be deleted yet" in done.stderr
    assert "is a symbolic link, which is not followed" in done.stderr
    assert (moved / "spec.json").exists()
    shown = shardyard("show", job_id, url=plane.url)
    assert "deleting  cannot be deleted yet" in shown.stdout
    storage.unlink()
    assert shardyard("delete", job_id, "--yes", url=plane.url).returncode == 0
