"""`shardyard sweep` and `compare`, and the commands that take a sweep's id."""

from pathlib import Path

import pytest

from tests.service.control_plane import ControlPlane
from tests.service_cli.command import check_refused, json_of, output_of, shardyard
from tests.service_cli.terminal import on_a_terminal, plain

SWEEP = """
name: small
model: {preset: gshard-tiny}
data: {corpus: catalogs}
train: {num_steps: 6, batch_tokens: 1024}
sweep:
  method: successive_halving
  fields:
    train.seed: {values: [3, 1, 2]}
  min_steps: 2
"""


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP)
    return path


def test_a_sweep_is_followed_to_its_end_and_its_jobs_compared(plane: ControlPlane, sweep_file: Path) -> None:
    output = output_of("sweep", sweep_file, "--watch", url=plane.url)
    sweep_id = output.split()[1].removesuffix(":")
    sweep = json_of("show", sweep_id, url=plane.url)
    assert sweep["state"] == "succeeded"
    best, *others = sweep["members"]
    assert (best["values"], best["state"], best["step"]) == ({"train.seed": 1}, "succeeded", 6)
    assert [member["step"] for member in others] == [2, 2]
    assert output.splitlines()[-3].split()[:2] == [best["job"], "succeeded"]
    assert "rung 1 at step 2: 1 of 3 go on" in output
    _, screen = on_a_terminal(80, "show", sweep_id, url=plane.url)
    assert max(map(len, plain(screen))) <= 80
    assert [line.split()[0] for line in plain(screen)[-3:]] == [member["job"] for member in sweep["members"]]
    _, screen = on_a_terminal(80, "compare", best["job"], others[0]["job"], url=plane.url)
    assert max(map(len, plain(screen))) <= 80
    table = output_of("compare", best["job"], others[0]["job"], url=plane.url).splitlines()
    assert table[-1].split() == ["train.seed", "1", "2"]
    comparison = json_of("compare", sweep_id, url=plane.url)
    assert [job["values"]["loss"] for job in comparison["jobs"]] == [11 / 6, 6.0, 6.5]
    assert comparison["differences"] == {
        "train.seed": {member["job"]: member["values"]["train.seed"] for member in sweep["members"]}
    }
    assert sweep_id in output_of("sweep", url=plane.url)
    output_of("delete", sweep_id, "--yes", url=plane.url)
    check_refused("was deleted", "show", sweep_id, url=plane.url)


def test_mistakes(plane: ControlPlane, sweep_file: Path, job_file: Path) -> None:
    unknown = "sweep.fields={train.sead: {values: [1, 2]}}"
    check_refused("sweep.fields.train.sead", "sweep", sweep_file, "--set", unknown, url=plane.url)
    check_refused("shardyard sweep FILE", "submit", sweep_file, url=plane.url)
    check_refused("sweep is required", "sweep", job_file, url=plane.url)
    check_refused("there is no sweep", "show", "sweep-aaaaaaaaaaaa", url=plane.url)
    check_refused("two or more different jobs", "compare", "job-aaaaaaaaaaaa", url=plane.url)


def test_a_cancelled_sweep_fails(plane: ControlPlane, sweep_file: Path) -> None:
    hold = plane.hold()
    sweep_id = output_of("sweep", sweep_file, "--set", f"labels.hold={hold.name}", url=plane.url).strip()
    check_refused("cancel it first", "delete", sweep_id, "--yes", url=plane.url, code=1)
    assert json_of("cancel", sweep_id, url=plane.url)["request"] == "cancel"
    result = shardyard("watch", sweep_id, url=plane.url)
    assert (result.returncode, "cancelled" in result.stdout) == (1, True)
    hold.unlink()
