"""Commands against a real control plane: what is printed, and the exit code."""

import json
import re
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import ControlPlane
from tests.service_cli.command import COMMAND, environment, shardyard

EXAMPLE = Path(__file__).parents[2] / "examples" / "translate-100-to-english.yaml"


def submit(plane: ControlPlane, job_file: Path, **labels: str) -> str:
    """The id of a job whose labels steer the local driver."""
    text = job_file.read_text().replace("{team: research}", json.dumps({"team": "research", **labels}))
    job_file.write_text(text)
    done = shardyard("submit", job_file, url=plane.url)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_job_from_submit_to_its_end(plane: ControlPlane, job_file: Path) -> None:
    done = shardyard("submit", job_file, url=plane.url)
    assert (done.returncode, done.stderr.count("shardyard watch")) == (0, 1)
    job_id = done.stdout.strip()
    assert re.fullmatch(r"job-[a-z2-7]{12}", job_id), "only the id, so that scripts can take it"

    watched = shardyard("watch", job_id, url=plane.url)
    assert watched.returncode == 0
    lines = watched.stdout.splitlines()
    assert [line.split()[2].rstrip(":") for line in lines if " state " in line] == [
        "queued", "starting", "running", "succeeded",
    ]  # fmt: skip
    assert any(re.search(r"step 5/5  loss 2\.000  tokens/s 1,000", line) for line in lines)
    assert f"{job_id} succeeded: finished at step 5" in lines

    listed = shardyard("ls", url=plane.url).stdout
    assert re.search(rf"{job_id} +small +succeeded +5/5", listed)
    shown = shardyard("show", job_id, url=plane.url).stdout
    assert re.search(r"state +succeeded  finished at step 5", shown)
    assert re.search(r"labels +team=research", shown)


def test_submit_and_watch_in_one(plane: ControlPlane, job_file: Path) -> None:
    done = shardyard("submit", job_file, "--watch", url=plane.url)
    assert done.returncode == 0
    assert "succeeded: finished at step 5" in done.stdout


def test_a_job_that_fails_is_exit_code_1(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit(plane, job_file, fail="yes")
    watched = shardyard("watch", job_id, url=plane.url)
    assert watched.returncode == 1
    assert f"'shardyard logs {job_id}'" in watched.stdout


def test_json_of_everything_that_prints(plane: ControlPlane, job_file: Path) -> None:
    submitted = json.loads(shardyard("submit", job_file, "--json", url=plane.url).stdout)
    job_id = submitted["id"]
    events = [json.loads(line) for line in shardyard("watch", job_id, "--json", url=plane.url).stdout.splitlines()]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert json.loads(shardyard("show", job_id, "--json", url=plane.url).stdout)["state"] == "succeeded"
    assert job_id in {job["id"] for job in json.loads(shardyard("ls", "--json", url=plane.url).stdout)["items"]}
    assert json.loads(shardyard("checkpoints", job_id, "--json", url=plane.url).stdout) == {"items": []}
    assert json.loads(shardyard("plan", job_file, "--json", url=plane.url).stdout)["num_workers"] == 1
    assert shardyard("logs", job_id, "--json", url=plane.url).returncode == 0


def test_the_same_key_and_file_make_one_job(plane: ControlPlane, job_file: Path) -> None:
    first, second = (shardyard("submit", job_file, "--idempotency-key=k1", url=plane.url) for _ in range(2))
    assert first.stdout == second.stdout
    job_file.write_text(job_file.read_text().replace("num_steps: 5", "num_steps: 6"))
    other = shardyard("submit", job_file, "--idempotency-key=k1", url=plane.url)
    assert (other.returncode, other.stdout) == (1, "")


def test_lists_are_filtered_and_limited(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit(plane, job_file, colour="blue")
    assert shardyard("watch", job_id, url=plane.url).returncode == 0
    found = json.loads(shardyard("ls", "--label", "colour=blue", "--json", url=plane.url).stdout)["items"]
    assert [job["id"] for job in found] == [job_id]
    assert len(json.loads(shardyard("ls", "--limit=1", "--json", url=plane.url).stdout)["items"]) == 1
    assert shardyard("ls", "--state", "paused", url=plane.url).stdout == "no jobs\n"
    wrong = shardyard("ls", "--state", "happy", url=plane.url)
    assert wrong.returncode == 2
    assert "query.state (='happy') is not a job state" in wrong.stderr


def test_pause_resume_and_cancel(plane: ControlPlane, job_file: Path) -> None:
    job_file.write_text(job_file.read_text().replace("num_steps: 5", "num_steps: 100000"))
    job_id = submit(plane, job_file, step_ms="5")
    plane.await_state(job_id, "running")
    paused = shardyard("pause", job_id, url=plane.url)
    assert (paused.returncode, f"continue it with 'shardyard resume {job_id}'" in paused.stdout) == (0, True)
    plane.await_state(job_id, "paused")
    assert shardyard("resume", job_id, url=plane.url).returncode == 0
    plane.await_state(job_id, "running")
    assert shardyard("cancel", job_id, url=plane.url).returncode == 0
    plane.await_state(job_id, "cancelled")
    again = shardyard("cancel", job_id, url=plane.url)
    assert again.returncode == 1
    assert again.stderr.startswith("shardyard: ")
    assert "cancelled" in again.stderr
    assert shardyard("watch", job_id, url=plane.url).returncode == 1


def test_ctrl_c_stops_watching_and_nothing_else(plane: ControlPlane, job_file: Path) -> None:
    import signal

    job_file.write_text(job_file.read_text().replace("num_steps: 5", "num_steps: 100000"))
    job_id = submit(plane, job_file, step_ms="5")
    watching = subprocess.Popen(
        [*COMMAND, "watch", job_id], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(plane.url),
        # Where the tests themselves run in the background, they and their children are deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert watching.stdout is not None
    assert any(re.search(r"step +[1-9]", line) for line in watching.stdout)  # of a metric
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=DEADLINE_S)
    assert watching.returncode == 130
    assert f"{job_id} continues. Follow it with 'shardyard watch {job_id}'" in said
    plane.await_state(job_id, "running")
    shardyard("cancel", job_id, url=plane.url)
    plane.await_state(job_id, "cancelled")


def test_watch_goes_on_over_a_restart_of_the_control_plane(tmp_path: Path, job_file: Path) -> None:
    plane = ControlPlane(tmp_path / "own").start()
    try:
        job_file.write_text(job_file.read_text().replace("num_steps: 5", "num_steps: 300"))
        job_id = submit(plane, job_file, step_ms="10")
        out = tmp_path / "events"
        with out.open("w") as file:
            watching = subprocess.Popen(
                [*COMMAND, "watch", job_id, "--json"], stdout=file, stderr=subprocess.PIPE, text=True,
                env=environment(plane.url),
            )  # fmt: skip
            await_that(lambda: '"metric"' in out.read_text())
            plane.kill()
            time.sleep(0.5)  # a while in which nobody answers
            plane.start()
            _, said = watching.communicate(timeout=DEADLINE_S)
        assert watching.returncode == 0, said
        assert f"cannot reach {plane.url}" in said
        events = [json.loads(line) for line in out.read_text().splitlines()]
        assert [event["id"] for event in events] == list(range(1, len(events) + 1))
        assert [event["data"]["step"] for event in events if event["kind"] == "metric"] == list(range(1, 301))
    finally:
        plane.close()


def test_an_unknown_job_is_answered_with_those_like_it(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit(plane, job_file)
    typo = job_id[:-1] + ("a" if job_id[-1] != "a" else "b")
    for command in ("show", "cancel", "logs"):
        done = shardyard(command, typo, url=plane.url)
        assert done.returncode == 2, command
        assert done.stderr.startswith(f"shardyard: there is no job {typo!r} at {plane.url}; did you mean ")
        assert job_id in done.stderr
    by_name = shardyard("watch", "small", url=plane.url)
    assert (by_name.returncode, "did you mean job-" in by_name.stderr) == (2, True)
    assert shardyard("show", "../cluster", url=plane.url).returncode == 2


def test_every_problem_of_a_spec_on_a_line_of_its_own(plane: ControlPlane, job_file: Path) -> None:
    job_file.write_text(job_file.read_text().replace("num_steps: 5", "num_steps: 0, colour: blue"))
    done = shardyard("submit", job_file, url=plane.url)
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("shardyard: train.num_steps (=0) must be ")
    assert second.startswith("           train.colour (='blue') ")


def test_a_file_that_cannot_be_read(plane: ControlPlane, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: x\n  model: [\n")
    done = shardyard("submit", broken, url=plane.url)
    assert done.returncode == 2
    assert "broken.yaml, line 2, column" in done.stderr
    missing = shardyard("submit", tmp_path / "missing.yaml", url=plane.url)
    assert missing.returncode == 2
    assert missing.stderr == f"shardyard: {tmp_path}/missing.yaml: No such file or directory\n"


def test_no_control_plane() -> None:
    done = shardyard("ls", url="http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr == "shardyard: cannot reach http://127.0.0.1:1: is 'shardyard up' running?\n"
    assert shardyard("ls", "--url", "nonsense").returncode == 2


@pytest.mark.parametrize("arguments", [["bogus"], ["ls", "--limit", "0"], ["submit"], ["ls", "--wrong"]])
def test_misuse_is_exit_code_2(arguments: list[str]) -> None:
    assert shardyard(*arguments).returncode == 2


def test_a_pipe_whose_reader_has_gone_is_no_traceback() -> None:
    with subprocess.Popen(
        [*COMMAND, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as pipe:
        assert pipe.stdout is not None
        assert pipe.stderr is not None
        pipe.stdout.close()
        assert pipe.stderr.read() == b""


def test_the_schema_accepts_the_examples() -> None:
    import jsonschema
    import yaml

    schema = json.loads(shardyard("schema").stdout)
    for path in sorted(EXAMPLE.parent.glob("*.yaml")):
        given = yaml.safe_load(path.read_text())
        jsonschema.validate(given.get("spec", given), schema)


def test_doctor_finds_what_is_there(plane: ControlPlane, tmp_path: Path) -> None:
    done = shardyard("doctor", "--state-dir", tmp_path / "state", "--json", url=plane.url)
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["service"]["detail"] == f"a control plane is running at {plane.url}"
    assert {findings[what]["verdict"] for what in ("Python", "torch", "Ray", "corpus", "state")} == {"ok"}
    assert done.returncode == 0
    no_folder = tmp_path / "file"
    no_folder.touch()
    assert findings["cluster"]["detail"] == "1 node(s), 8 CPUs, 0 GPUs"
    in_use = json.loads(shardyard("doctor", "--json", url=plane.url).stdout)["findings"]
    [state] = [finding["detail"] for finding in in_use if finding["what"] == "state"]
    assert state.startswith(f"{plane.database.parent}, "), "of the control plane that answers, not the default"
    alone = shardyard("doctor", "--state-dir", no_folder / "state", url="http://127.0.0.1:1")
    assert "is 'shardyard up' running?" in alone.stdout


def test_help_is_quick_and_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; sys.argv = ['shardyard', '--help']\n"
        "from service.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'fastapi', 'sqlalchemy', 'httpx', 'pydantic', 'rich.table'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    import sys

    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = ("up", "submit", "ls", "show", "watch", "logs", "cancel", "pause", "resume", "move", "plan",
              "checkpoints", "translate", "generate", "evaluate", "export", "doctor")  # fmt: skip
    for command in listed:
        assert f"\n  {command} " in done.stdout


def test_another_tools_model_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "model.safetensors").touch()
    done = shardyard("translate", tmp_path, "Haus")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path} holds a model in Hugging Face format, which transformers and vLLM load" in done.stderr
    again = shardyard("export", tmp_path, tmp_path / "new")
    assert (again.returncode, "holds a model in Hugging Face format" in again.stderr) == (2, True)
    (tmp_path / "config.json").write_text("{}")
    done = shardyard("translate", tmp_path, "Haus")
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds another tool's model: its config.json has no shardyard version" in done.stderr
    done = shardyard("translate", tmp_path / "none", "Haus")
    assert (done.returncode, f"{tmp_path / 'none'} does not exist" in done.stderr) == (2, True)


@pytest.mark.parametrize("command", [("generate", "x = "), ("translate", "x"), ("export", "new")])
def test_an_adapters_folder_is_refused_in_words(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    done = shardyard(command[0], tmp_path, *command[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path} holds a PEFT adapter" in done.stderr
    assert f"'adapter: {{from: {tmp_path}}}'" in done.stderr


@pytest.mark.parametrize("option", ["--merge", "--chat-template"])
def test_options_of_hugging_faces_format_are_refused_of_our_own(tmp_path: Path, option: str) -> None:
    done = shardyard("export", tmp_path, tmp_path / "new", option)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{option} requires --format huggingface" in done.stderr


def test_version_is_that_of_the_installation() -> None:
    done = shardyard("--version")
    assert (done.returncode, done.stdout) == (0, f"shardyard {version('shardyard')}\n")
