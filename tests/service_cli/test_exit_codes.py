"""What goes wrong around a command is said in a line, and told by its exit code: 1 failed, 2 misuse."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from service.control.launcher.launcher import NodeFacts
from tests.nameless import HOMES, NAMELESS, can_be_nameless
from tests.service.control_plane import ControlPlane, spec
from tests.service_cli.command import COMMAND, environment, shardyard

TOO_SMALL = NodeFacts(id="n0", ip="127.0.0.1", cpus=1, memory_bytes=16 << 30)


@pytest.mark.parametrize("token", ["0123456789-пароль", "0123456789abcdef\n", " 0123456789abcdef"])
@pytest.mark.parametrize("command", [["ls"], ["translate", "job-aaaaaaaaaaaa", "Haus"], ["up", "--port=0"]])
def test_a_token_that_no_request_can_carry(tmp_path: Path, command: list[str], token: str) -> None:
    done = shardyard(*command, SHARDYARD_TOKEN=token, SHARDYARD_STATE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "must be printable ASCII without surrounding spaces" in done.stderr
    assert token not in done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [["schema"], ["ls"], ["ls", "--json"]])
def test_output_that_cannot_be_written_is_said(plane: ControlPlane, arguments: list[str], buffered: str) -> None:
    plane.post()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env=environment(plane.url, PYTHONUNBUFFERED=buffered),
        )  # fmt: skip
    said = "shardyard: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_what_a_job_does_not_have_yet_has_failed_and_an_unknown_job_is_misuse(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path)
    plane.launcher.set_reachable(False)  # so that there is no plan
    plane.start()
    try:
        job_id = plane.post()["id"]
        for command, said in (("plan", "has no plan yet"), ("translate", "no committed checkpoint")):
            begun = shardyard(command, job_id, url=plane.url)
            assert (begun.returncode, begun.stdout) == (1, ""), command
            assert said in begun.stderr
            unknown = shardyard(command, "job-aaaaaaaaaaaa", url=plane.url)
            assert (unknown.returncode, unknown.stdout) == (2, ""), command
            assert "there is no job 'job-aaaaaaaaaaaa'" in unknown.stderr
    finally:
        plane.close()


@pytest.mark.parametrize("command", ["show", "logs", "download", "translate", "evaluate"])
def test_an_empty_id_is_misuse(plane: ControlPlane, command: str) -> None:
    """As of a shell variable that is not set; it is neither the path of all jobs nor the present folder."""
    more = ("--tasks", "examples/evaluate/tasks.yaml") if command == "evaluate" else ()
    done = shardyard(command, "", *more, url=plane.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the job's id must not be empty" in done.stderr


@pytest.mark.parametrize(
    "text",
    [json.dumps(spec(name="by-pipe")), json.dumps(spec(name="by-pipe"), indent="\t"),
     "name: by-pipe  # YAML\nmodel: {preset: gshard-tiny}\ndata: {corpus: catalogs}\n"
     "train: {num_steps: 5, batch_tokens: 1024}\n"],
)  # fmt: skip
def test_a_job_on_standard_input(plane: ControlPlane, text: str) -> None:
    done = shardyard("submit", "-", url=plane.url, stdin=text)
    assert done.returncode == 0, done.stderr
    assert plane.job(done.stdout.strip())["name"] == "by-pipe"
    assert shardyard("plan", "-", "--json", url=plane.url, stdin=text).returncode == 0


def test_what_is_wrong_on_standard_input_is_said_with_its_place(plane: ControlPlane) -> None:
    broken = shardyard("submit", "-", url=plane.url, stdin="name: x\n  model: [\n")
    assert broken.returncode == 2
    assert re.match(r"shardyard: standard input, line 2, column \d+ ", broken.stderr)
    for text in ("", "[]", "job.yaml", "\xff"):
        done = shardyard("submit", "-", url=plane.url, stdin=text)
        assert (done.returncode, "standard input is empty" in done.stderr) == (2, True)


@pytest.mark.sample(2)
@pytest.mark.skipif(not can_be_nameless(), reason="only root becomes a user without a name")
@pytest.mark.parametrize("arguments", [["doctor"], ["down"], ["recover"], ["up", "--port=0"], ["demo"]])
def test_a_user_without_a_home_is_told_to_name_the_state_folder(arguments: list[str]) -> None:
    kept = {name: value for name, value in environment().items() if name not in HOMES}
    done = subprocess.run(
        [*NAMELESS.split(), *COMMAND, *arguments], env=kept, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "SHARDYARD_STATE_DIR" in done.stderr


def test_the_home_of_nobody_is_told(tmp_path: Path) -> None:
    done = shardyard("up", "--port=0", "--data-root=~no-such-user/x", SHARDYARD_STATE_DIR=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "~no-such-user/x: there is no such home folder" in done.stderr
