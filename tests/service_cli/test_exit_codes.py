"""Errors around a command: one line each, and an exit code, 1 for failure and 2 for misuse."""

import json
import re
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from service.control.launcher.launcher import NodeFacts
from tests.nameless import HOMES, NAMELESS, can_be_nameless
from tests.service.control_plane import ControlPlane, spec
from tests.service_cli.command import COMMAND, check_refused, environment, output_of

TOO_SMALL = NodeFacts(id="n0", ip="127.0.0.1", cpus=1, memory_bytes=16 << 30)


@pytest.mark.parametrize("token", ["0123456789-пароль", "0123456789abcdef\n", " 0123456789abcdef"])
def test_a_token_that_no_request_can_carry(tmp_path: Path, token: str) -> None:
    variables = {"SHARDYARD_TOKEN": token, "SHARDYARD_STATE_DIR": str(tmp_path)}
    for command in (["ls"], ["translate", "job-aaaaaaaaaaaa", "Haus"], ["up", "--port=0"]):
        errors = check_refused("must be printable ASCII without surrounding spaces", *command, **variables)
        assert (errors.count("\n"), token in errors) == (1, False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("buffering", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [["schema"], ["ls"], ["ls", "--json"]])
def test_output_that_cannot_be_written_is_said(plane: ControlPlane, arguments: list[str], buffering: str) -> None:
    plane.post()
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env=environment(plane.url, PYTHONUNBUFFERED=buffering),
        )  # fmt: skip
    message = "shardyard: cannot write the output: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, message)


def test_what_a_job_does_not_have_yet_has_failed_and_an_unknown_job_is_misuse(tmp_path: Path) -> None:
    with closing(ControlPlane(tmp_path)) as plane:
        plane.launcher.set_reachable(False)  # so that there is no plan
        job_id = plane.start().post()["id"]
        for command, words in (("plan", "has no plan yet"), ("translate", "no committed checkpoint")):
            check_refused(words, command, job_id, url=plane.url, code=1)
            check_refused("there is no job 'job-aaaaaaaaaaaa'", command, "job-aaaaaaaaaaaa", url=plane.url)


def test_an_empty_id_is_misuse(plane: ControlPlane) -> None:
    """As from an unset shell variable; it means neither all jobs nor the current folder."""
    tasks = ("--tasks", "examples/evaluate/tasks.yaml")
    for command, *options in (("show",), ("logs",), ("download",), ("translate",), ("evaluate", *tasks)):
        check_refused("the job's id must not be empty", command, "", *options, url=plane.url)


YAML = "name: by-pipe  # YAML\nmodel: {preset: gshard-tiny}\ndata: {corpus: catalogs}\n" \
       "train: {num_steps: 5, batch_tokens: 1024}\n"  # fmt: skip


@pytest.mark.slow
def test_a_job_on_standard_input(plane: ControlPlane) -> None:
    job = spec(name="by-pipe")
    for text in (json.dumps(job), json.dumps(job, indent="\t"), YAML):
        job_id = output_of("submit", "-", url=plane.url, stdin=text).strip()
        assert plane.job(job_id)["name"] == "by-pipe"
        output_of("plan", "-", "--json", url=plane.url, stdin=text)
    broken = check_refused("", "submit", "-", url=plane.url, stdin="name: x\n  model: [\n")
    assert re.match(r"shardyard: standard input, line 2, column \d+ ", broken)
    for text in ("", "[]", "job.yaml", "\xff"):
        check_refused("standard input is empty", "submit", "-", url=plane.url, stdin=text)


@pytest.mark.sample(2)
@pytest.mark.skipif(not can_be_nameless(), reason="only root becomes a user without a name")
@pytest.mark.parametrize("arguments", [["doctor"], ["down"], ["recover"], ["up", "--port=0"], ["demo"]])
def test_a_user_without_a_home_is_told_to_name_the_state_folder(arguments: list[str]) -> None:
    variables = {name: value for name, value in environment().items() if name not in HOMES}
    result = subprocess.run(
        [*NAMELESS.split(), *COMMAND, *arguments], env=variables, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert "SHARDYARD_STATE_DIR" in result.stderr


def test_the_home_of_nobody_is_told(tmp_path: Path) -> None:
    words, root = "~no-such-user/x: there is no such home folder", "--data-root=~no-such-user/x"
    errors = check_refused(words, "up", "--port=0", root, SHARDYARD_STATE_DIR=str(tmp_path))
    assert errors.count("\n") == 1
