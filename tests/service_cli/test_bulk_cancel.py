"""`shardyard cancel --label`: all that have a label and have not ended, and nothing else."""

import json

from tests.service.control_plane import ControlPlane
from tests.service_cli.command import shardyard
from tests.service_cli.test_delete import at_a_terminal


def queued(plane: ControlPlane, **labels: str) -> str:
    return str(plane.post(labels=labels, resources={"num_workers": 900})["id"])


def test_all_with_a_label_are_asked_back_and_each_is_told_of(plane: ControlPlane) -> None:
    first, second = queued(plane, sweep="a", size="1"), queued(plane, sweep="a", size="2")
    other, ended = queued(plane, sweep="b"), queued(plane, sweep="a")
    plane.http.post(f"/v1/jobs/{ended}/cancel")
    refused = shardyard("cancel", "--label", "sweep=a", url=plane.url)
    assert (refused.returncode, refused.stdout) == (2, "")
    question = f"Cancel 2 jobs with sweep=a: {second} (small, queued), {first} (small, queued)?"
    assert f"{question} No terminal to ask on: add --yes" in refused.stderr
    code, said = at_a_terminal(plane, "cancel", "--label", "sweep=a", answer="n")
    assert (code, question in said) == (1, True)
    assert plane.job(first)["state"] == "queued"
    done = shardyard("cancel", "--label", "sweep=a", "--yes", url=plane.url)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [f"{each} is cancelled (cancelled by local)" for each in (second, first)],
    )
    assert plane.job(other)["state"] == "queued"
    again = shardyard("cancel", "--label", "sweep=a", url=plane.url)
    assert (again.returncode, again.stdout) == (0, "no unfinished job has sweep=a\n")


def test_several_labels_must_all_match_and_json_says_what_became_of_each(plane: ControlPlane) -> None:
    one, both = queued(plane, colour="red"), queued(plane, colour="red", size="large")
    done = shardyard("cancel", "--label", "colour=red", "--label", "size", "--yes", "--json", url=plane.url)
    assert json.loads(done.stdout) == {"items": [{"id": both, "state": "cancelled", "error": None}]}
    assert plane.job(one)["state"] == "queued"


def test_a_job_or_a_label_and_not_both(plane: ControlPlane) -> None:
    for arguments in ((), ("job-aaaaaaaaaaaa", "--label", "a=b")):
        wrong = shardyard("cancel", *arguments, url=plane.url)
        assert wrong.returncode == 2
        assert "give a JOB, or --label KEY=VALUE for all jobs with that label" in wrong.stderr


def test_labels_are_not_left_out_unnoticed(plane: ControlPlane) -> None:
    """More labels must never match more jobs."""
    answer = plane.http.get("/v1/jobs", params={"label": [f"k{number}" for number in range(33)]})
    assert answer.status_code == 422
