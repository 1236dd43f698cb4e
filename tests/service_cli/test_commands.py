"""Commands against a real control plane: what is printed, and the exit code."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import jsonschema
import pytest
import yaml

from service.cli import checks
from service.settings import Settings
from tests.processes import DEADLINE_S, await_that, heed_ctrl_c
from tests.service.control_plane import ControlPlane
from tests.service_cli.command import (
    COMMAND,
    EXAMPLE,
    NOWHERE,
    check_refused,
    environment,
    json_of,
    output_of,
    shardyard,
)


def submit(plane: ControlPlane, job_file: Path, **labels: str) -> str:
    """Submit a job whose labels steer the local driver; return its id."""
    text = job_file.read_text().replace("{team: research}", json.dumps({"team": "research", **labels}))
    job_file.write_text(text)
    return output_of("submit", job_file, url=plane.url).strip()


def submit_long(plane: ControlPlane, job_file: Path) -> str:
    """Submit a job that runs until it is ended; return its id, once it runs."""
    job_file.write_text(job_file.read_text().replace("num_steps: 5", "num_steps: 100000"))
    job_id = submit(plane, job_file, step_ms="5")
    plane.await_state(job_id, "running")
    return job_id


def test_a_job_from_submit_to_its_end(plane: ControlPlane, job_file: Path) -> None:
    result = shardyard("submit", job_file, url=plane.url)
    assert (result.returncode, result.stderr.count("shardyard watch")) == (0, 1)
    job_id = result.stdout.strip()
    assert re.fullmatch(r"job-[a-z2-7]{12}", job_id), "only the id, so that scripts can take it"

    lines = output_of("watch", job_id, url=plane.url).splitlines()
    assert [line.split()[2].rstrip(":") for line in lines if " state " in line] == [
        "queued", "starting", "running", "succeeded",
    ]  # fmt: skip
    assert any(re.search(r"step 5/5  loss 2\.000  tokens/s 1,000", line) for line in lines)
    assert f"{job_id} succeeded: finished at step 5" in lines

    assert re.search(rf"{job_id} +small +succeeded +5/5", output_of("ls", url=plane.url))
    output = output_of("show", job_id, url=plane.url)
    assert re.search(r"state +succeeded  finished at step 5", output)
    assert re.search(r"labels +team=research", output)
    assert "succeeded: finished at step 5" in output_of("submit", job_file, "--watch", url=plane.url)


def test_a_job_that_fails_is_exit_code_1(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit(plane, job_file, fail="yes")
    result = shardyard("watch", job_id, url=plane.url)
    assert result.returncode == 1
    assert f"'shardyard logs {job_id}'" in result.stdout


def test_json_of_everything_that_prints(plane: ControlPlane, job_file: Path) -> None:
    job_id = json_of("submit", job_file, url=plane.url)["id"]
    events = [json.loads(line) for line in output_of("watch", job_id, "--json", url=plane.url).splitlines()]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert json_of("show", job_id, url=plane.url)["state"] == "succeeded"
    assert job_id in {job["id"] for job in json_of("ls", url=plane.url)["items"]}
    assert json_of("checkpoints", job_id, url=plane.url) == {"items": []}
    assert json_of("plan", job_file, url=plane.url)["num_workers"] == 1
    output_of("logs", job_id, "--json", url=plane.url)


def test_the_same_key_and_file_make_one_job(plane: ControlPlane, job_file: Path) -> None:
    command = ("submit", job_file, "--idempotency-key=k1")
    first, second = (output_of(*command, url=plane.url) for _ in range(2))
    assert first == second
    job_file.write_text(job_file.read_text().replace("num_steps: 5", "num_steps: 6"))
    check_refused("this Idempotency-Key belongs to", *command, url=plane.url, code=1)


def test_lists_are_filtered_and_limited(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit(plane, job_file, colour="blue")
    plane.await_state(job_id, "succeeded")
    items = json_of("ls", "--label", "colour=blue", url=plane.url)["items"]
    assert [job["id"] for job in items] == [job_id]
    assert len(json_of("ls", "--limit=1", url=plane.url)["items"]) == 1
    assert output_of("ls", "--state", "paused", url=plane.url) == "no jobs\n"
    check_refused("query.state (='happy') is not a job state", "ls", "--state", "happy", url=plane.url)


def test_pause_resume_and_cancel(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit_long(plane, job_file)
    assert f"continue it with 'shardyard resume {job_id}'" in output_of("pause", job_id, url=plane.url)
    plane.await_state(job_id, "paused")
    output_of("resume", job_id, url=plane.url)
    plane.await_state(job_id, "running")
    output_of("cancel", job_id, url=plane.url)
    plane.await_state(job_id, "cancelled")
    assert check_refused("cancelled", "cancel", job_id, url=plane.url, code=1).startswith("shardyard: ")
    assert shardyard("watch", job_id, url=plane.url).returncode == 1


def test_ctrl_c_stops_watching_and_nothing_else(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit_long(plane, job_file)
    watcher = subprocess.Popen(
        [*COMMAND, "watch", job_id], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(plane.url), preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    assert any(re.search(r"step +[1-9]", line) for line in watcher.stdout)  # of a metric
    watcher.send_signal(signal.SIGINT)
    _, errors = watcher.communicate(timeout=DEADLINE_S)
    assert watcher.returncode == 130
    assert f"{job_id} continues. Follow it with 'shardyard watch {job_id}'" in errors
    plane.await_state(job_id, "running")
    plane.act(job_id, "cancel")
    plane.await_state(job_id, "cancelled")


def test_watch_goes_on_over_a_restart_of_the_control_plane(tmp_path: Path, job_file: Path) -> None:
    with closing(ControlPlane(tmp_path / "own")) as plane:
        plane.start()
        job_file.write_text(job_file.read_text().replace("num_steps: 5", "num_steps: 300"))
        job_id = submit(plane, job_file, step_ms="10")
        out = tmp_path / "events"
        with out.open("w") as file:
            watcher = subprocess.Popen(
                [*COMMAND, "watch", job_id, "--json"], stdout=file, stderr=subprocess.PIPE, text=True,
                env=environment(plane.url),
            )  # fmt: skip
            await_that(lambda: '"metric"' in out.read_text())
            plane.kill()
            time.sleep(0.5)  # a while in which nobody answers
            plane.start()
            _, errors = watcher.communicate(timeout=DEADLINE_S)
    assert watcher.returncode == 0, errors
    assert f"cannot reach {plane.url}" in errors
    events = [json.loads(line) for line in out.read_text().splitlines()]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert [event["data"]["step"] for event in events if event["kind"] == "metric"] == list(range(1, 301))


def test_an_unknown_job_is_answered_with_those_like_it(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit(plane, job_file)
    typo = job_id[:-1] + ("a" if job_id[-1] != "a" else "b")
    for command in ("show", "cancel", "logs"):
        words = f"shardyard: there is no job {typo!r} at {plane.url}; did you mean "
        assert job_id in check_refused(words, command, typo, url=plane.url)
    check_refused("did you mean job-", "watch", "small", url=plane.url)
    assert shardyard("show", "../cluster", url=plane.url).returncode == 2


def test_every_problem_of_a_spec_on_a_line_of_its_own(plane: ControlPlane, job_file: Path) -> None:
    job_file.write_text(job_file.read_text().replace("num_steps: 5", "num_steps: 0, colour: blue"))
    first, second = check_refused("", "submit", job_file, url=plane.url).splitlines()
    assert first.startswith("shardyard: train.num_steps (=0) must be ")
    assert second.startswith("           train.colour (='blue') ")


def test_a_file_that_cannot_be_read(plane: ControlPlane, tmp_path: Path) -> None:
    broken, missing = tmp_path / "broken.yaml", tmp_path / "missing.yaml"
    broken.write_text("name: x\n  model: [\n")
    check_refused("broken.yaml, line 2, column", "submit", broken, url=plane.url)
    check_refused(f"shardyard: {missing}: No such file or directory\n", "submit", missing, url=plane.url)


def test_no_control_plane() -> None:
    check_refused(f"shardyard: cannot reach {NOWHERE}: is 'shardyard up' running?\n", "ls", url=NOWHERE, code=1)


MISUSES = [["bogus"], ["ls", "--limit", "0"], ["submit"], ["ls", "--wrong"], ["ls", "--url", "nonsense"]]


def test_misuse_is_exit_code_2() -> None:
    assert [shardyard(*arguments).returncode for arguments in MISUSES] == [2] * len(MISUSES)


def test_a_pipe_whose_reader_has_gone_is_no_traceback() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*COMMAND, "schema"], env=environment(), **pipes) as pipe:
        pipe.stdout.close()
        assert pipe.stderr.read() == b""


def test_the_schema_accepts_the_examples() -> None:
    of_jobs, of_sweeps = (
        jsonschema.Draft202012Validator(json.loads(output_of("schema", *options))) for options in ((), ("--sweep",))
    )
    for path in sorted(EXAMPLE.parent.glob("*.yaml")):
        document = yaml.safe_load(path.read_text())
        (of_sweeps if "sweep" in document else of_jobs).validate(document.get("spec", document))


def test_doctor_finds_what_is_there(plane: ControlPlane, tmp_path: Path) -> None:
    result = shardyard("doctor", "--state-dir", tmp_path / "state", "--json", url=plane.url)
    findings = {finding["what"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["service"]["detail"] == f"a control plane is running at {plane.url}"
    assert {findings[name]["verdict"] for name in ("Python", "torch", "Ray", "corpus", "state")} == {"ok"}
    assert result.returncode == 0
    no_folder = tmp_path / "file"
    no_folder.touch()
    assert findings["cluster"]["detail"] == "1 node(s), 8 CPUs, 0 GPUs"
    in_use = json.loads(shardyard("doctor", "--json", url=plane.url).stdout)["findings"]
    [state] = [finding["detail"] for finding in in_use if finding["what"] == "state"]
    assert state.startswith(f"{plane.database.parent}, "), "of the control plane that answers, not the default"
    offline_result = shardyard("doctor", "--state-dir", no_folder / "state", url="http://127.0.0.1:1")
    assert "is 'shardyard up' running?" in offline_result.stdout


def test_doctor_waits_for_no_cluster_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control plane answers at once, but for its cluster."""
    monkeypatch.setattr(checks, "PATIENCE_S", 0.5)  # of eight seconds
    release = threading.Event()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/cluster":
                release.wait(DEADLINE_S)
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"state_dir": "/tmp"}')

        def log_message(self, *_: object) -> None:
            """Nothing on the tests' output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            findings = list(checks.check_machine(Settings(), f"http://127.0.0.1:{server.server_port}", None))
        finally:
            release.set()
            server.shutdown()
    verdicts = {finding.what: finding.verdict for finding in findings}
    assert (verdicts["service"], verdicts["cluster"]) == ("ok", "fault")
    [words] = [finding.detail for finding in findings if finding.what == "cluster"]
    assert words == "the cluster has not answered the control plane: no data for 0.5 s"


def test_help_is_quick_and_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; sys.argv = ['shardyard', '--help']\n"
        "from service.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'fastapi', 'sqlalchemy', 'httpx', 'pydantic', 'rich.table'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    commands = ("up", "submit", "ls", "show", "watch", "logs", "cancel", "pause", "resume", "move", "plan",
                "checkpoints", "translate", "generate", "evaluate", "export", "doctor")  # fmt: skip
    for command in commands:
        assert f"\n  {command} " in result.stdout


@pytest.mark.slow
def test_another_tools_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "model.safetensors").touch()
    check_refused(f"{tmp_path} holds a model in Hugging Face format", "translate", tmp_path, "Haus")
    check_refused("holds a model in Hugging Face format", "export", tmp_path, tmp_path / "new")
    (tmp_path / "config.json").write_text("{}")
    check_refused("its config.json has no shardyard version", "translate", tmp_path, "Haus")
    check_refused(f"{tmp_path / 'none'} does not exist", "translate", tmp_path / "none", "Haus")
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    for command, argument in (("generate", "x = "), ("translate", "x"), ("export", "new")):
        errors = check_refused(f"{tmp_path} holds a PEFT adapter", command, tmp_path, argument)
        assert f"'adapter: {{from: {tmp_path}}}'" in errors
    for option in ("--merge", "--chat-template"):
        check_refused(f"{option} requires --format huggingface", "export", tmp_path, tmp_path / "new", option)


def test_version_is_that_of_the_installation() -> None:
    assert output_of("--version") == f"shardyard {version('shardyard')}\n"
