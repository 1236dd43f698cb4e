"""The demo, with a job small enough to wait for: from one command to a translation, and nothing left running."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from service.cli.footprint import MARK, Footprint
from tests.processes import CTRL_C_IN_THE_MIDST, DEADLINE_S, await_that, heed_ctrl_c
from tests.ray.control_plane import NUM_STEPS, job_spec
from tests.service_cli.command import COMMAND, check_refused, environment, shardyard

DEMO_DEADLINE_S = 3 * DEADLINE_S
"""From the start of Ray to the end of its job."""


def left_behind(state_dir: Path) -> list[psutil.Process]:
    """Processes that a demo with this state folder has started. Ray's workers hide their arguments."""
    processes = []
    for process in psutil.process_iter():
        try:
            if MARK in process.environ() and str(state_dir) in " ".join(
                [*process.cmdline(), *process.environ().values()]
            ):
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_from_one_command_to_a_translation(tmp_path: Path) -> None:
    state_dir, file = tmp_path / "demo", tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_spec(name="small-demo")))
    result = shardyard("demo", file, "--state-dir", state_dir, timeout_s=DEMO_DEADLINE_S)
    assert result.returncode == 0, result.stdout + result.stderr
    for expected in (
        f"small-demo after {NUM_STEPS} steps",
        "unseen English", "seen English", "below a unigram model's",
        "all languages", "not in Latin script", "high-resource", "mid-resource", "low-resource",
        "uk  Cyrillic", "reference", "translation",
        "layer 1: 8 of 8 experts used",
        "tokens/s, median of the last 50 steps; one worker on the same CPUs would be faster",
        f"checkpoint of step {NUM_STEPS}",
    ):  # fmt: skip
        assert expected in result.stdout, expected
    usage = re.search(r"measured  \d:\d\d from start to stop, at most ([\d.]+) GiB of memory", result.stdout)
    assert 0.5 < float(usage[1]) < 6
    assert left_behind(state_dir) == []

    command = re.search(rf"  shardyard (translate --state-dir {state_dir} job-\w+) ", result.stdout)
    assert command is not None, "next commands"
    translation = shardyard(*command[1].split(), "Speichern")
    assert (translation.returncode, translation.stdout.count("\n")) == (0, 1), translation.stderr

    folder = tmp_path / "exported"
    export = shardyard("export", *command[1].split()[1:], folder)
    assert (export.returncode, export.stdout[: len(str(folder))]) == (0, str(folder)), export.stderr
    assert shardyard("translate", folder, "Speichern").stdout == translation.stdout
    check_refused("already exists", "export", *command[1].split()[1:], folder)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_signal_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    state_dir, file = tmp_path / "demo", tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_spec()))
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            [*COMMAND, "demo", str(file), f"--state-dir={state_dir}"], stdout=out, stderr=out, env=environment()
        )
    await_that(lambda: len(left_behind(state_dir)) > 1, lambda: (tmp_path / "out").read_text())
    check_refused("another demo is running in", "demo", file, "--state-dir", state_dir)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert "nothing is left running" in (tmp_path / "out").read_text()
    assert left_behind(state_dir) == []


def test_ctrl_c_while_the_control_plane_is_being_started_leaves_nothing(tmp_path: Path) -> None:
    state_dir, file = tmp_path / "demo", tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_spec()))
    program = CTRL_C_IN_THE_MIDST + "from service.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "demo", str(file), f"--state-dir={state_dir}"],
        timeout=DEADLINE_S, capture_output=True, text=True, env=environment(), preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    assert result.returncode == 128 + signal.SIGINT, result.stderr
    assert "nothing is left running" in result.stderr
    assert left_behind(state_dir) == []


def test_a_mistake_in_the_file_is_told_before_anything_is_started(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_spec(resources={"num_workers": 0})))
    check_refused("resources.num_workers (=0)", "demo", file, "--state-dir", tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_memory_is_that_of_everything_started_and_of_nothing_else(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"import time; held = b'x' * 200_000_000; open({str(ready)!r}, 'w'); time.sleep(60)"
    # Its parent ends at once, so it is found by its mark.
    orphan = ["sh", "-c", '"$@" >/dev/null & echo $!', "sh", sys.executable, "-c", code]
    environment = {**os.environ, MARK: "mine"}
    result = subprocess.run(orphan, env=environment, stdout=subprocess.PIPE, check=True, start_new_session=True)
    process = psutil.Process(int(result.stdout))
    try:
        await_that(ready.exists)
        own_footprint, other_footprint = Footprint("mine"), Footprint("others")
        own_footprint.sample()
        other_footprint.sample()
    finally:
        process.kill()
    assert (
        own_footprint.peak_bytes - other_footprint.peak_bytes > 150_000_000
    )  # both count this process, whose size changes
    assert own_footprint.peak_processes == other_footprint.peak_processes + 1
