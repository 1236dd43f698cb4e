"""`shardyard metrics`: what was recorded of each step, for people and for other programs."""

import csv
import io
import json
from pathlib import Path

from service.cli.view.metrics import columns, metric_rows, write_csv
from service.control.store.database import Database
from service.control.store.events import NewEvent, append_events
from service.control.store.jobs import get_job
from tests.service.control_plane import ControlPlane
from tests.service_cli.command import shardyard
from tests.service_cli.test_commands import submit

POINTS = [
    {"step": 1, "time": "2026-01-31T12:00:00Z", "attempt": 1, "loss": 5.25, "layers": [
        {"layer": 1, "dropped": 0.5, "load": [3, 1]}]},
    {"step": 2, "time": "2026-01-31T12:00:01Z", "attempt": 2, "loss": None, "held_out": {"seen": 1e-3}, "note": "=1+1"},
]  # fmt: skip


def as_csv(*names: str) -> list[dict[str, str]]:
    text = io.StringIO()
    write_csv(metric_rows(POINTS, names), text)
    return list(csv.DictReader(io.StringIO(text.getvalue())))


def test_what_is_nested_has_columns_of_its_own() -> None:
    assert as_csv() == [
        {"step": "1", "time": "2026-01-31T12:00:00Z", "attempt": "1", "loss": "5.25", "layers.0.layer": "1",
         "layers.0.dropped": "0.5", "held_out.seen": ""},
        {"step": "2", "time": "2026-01-31T12:00:01Z", "attempt": "2", "loss": "", "layers.0.layer": "",
         "layers.0.dropped": "", "held_out.seen": "0.001"},
    ]  # fmt: skip


def test_names_choose_columns_and_what_lies_below_them() -> None:
    assert columns(metric_rows(POINTS, ["loss", "held_out"])) == [
        "step", "time", "attempt", "loss", "held_out.seen",
    ]  # fmt: skip
    assert as_csv("layers")[0]["layers.0.load.1"] == "1"
    assert columns(metric_rows(POINTS, ["layers.0.load"]))[3:] == ["layers.0.load.0", "layers.0.load.1"]
    assert columns(metric_rows(POINTS, ["los"])) == ["step", "time", "attempt"]


def test_the_command(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit(plane, job_file)
    plane.await_state(job_id, "succeeded")
    told = shardyard("metrics", job_id, "--csv", "--since-step", "2", url=plane.url)
    assert told.returncode == 0, told.stderr
    rows = list(csv.DictReader(io.StringIO(told.stdout)))
    assert [(row["step"], row["loss"], row["tokens_per_s"]) for row in rows] == [
        (str(step), str(10 / step), "1000.0") for step in (2, 3, 4, 5)
    ]
    table = shardyard("metrics", job_id, "--name", "loss", "--max-points", "2", url=plane.url).stdout
    assert [line.split()[0] for line in table.splitlines()] == ["STEP", "1", "5"]
    assert "TOKENS_PER_S" not in table
    items = json.loads(shardyard("metrics", job_id, "--json", "--name", "loss", url=plane.url).stdout)["items"]
    assert [set(item) for item in items] == [{"step", "time", "attempt", "loss"}] * 5
    assert shardyard("metrics", job_id, "--csv", "--json", url=plane.url).returncode == 2
    assert shardyard("metrics", job_id, "--max-points", "0", url=plane.url).returncode == 2
    none = shardyard("metrics", job_id, "--name", "happiness", url=plane.url)
    assert (none.returncode, none.stdout) == (2, "")
    assert "--name (=happiness)" in none.stderr
    assert none.stderr.strip().endswith("use one of loss, tokens_per_s")
    as_csv = shardyard("metrics", job_id, "--csv", "--name", "loss", "--name", "los", url=plane.url)
    assert (as_csv.returncode, as_csv.stdout) == (2, "")
    later = shardyard("metrics", job_id, "--name", "loss", "--since-step", "9", url=plane.url)
    assert (later.returncode, later.stdout) == (0, f"no step of {job_id} has loss\n")
    for name in ("", ".", "layers."):
        wrong = shardyard("metrics", job_id, "--name", name, url=plane.url)
        assert wrong.returncode == 2
        assert wrong.stderr.startswith(f"shardyard: --name (={name!r}) must name a value")


def test_a_long_run_has_a_row_for_every_step(plane: ControlPlane, job_file: Path) -> None:
    num_steps = 10_005
    job_id = submit(plane, job_file)
    plane.await_state(job_id, "succeeded")
    database = Database(f"sqlite:///{plane.database}")
    with database.write() as tx:
        job = get_job(tx, job_id)
        assert job is not None
        more = (NewEvent("metric", 1, 1, "group-0", f'{{"step":{step},"loss":1.0}}', step)
                for step in range(6, num_steps + 1))  # fmt: skip
        append_events(tx, job.number, list(more))
    database.close()
    told = shardyard("metrics", job_id, "--csv", url=plane.url)
    rows = csv.DictReader(io.StringIO(told.stdout))
    assert [int(row["step"]) for row in rows] == list(range(1, num_steps + 1))
    few = shardyard("metrics", job_id, "--csv", "--max-points", "2", url=plane.url)
    assert [row["step"] for row in csv.DictReader(io.StringIO(few.stdout))] == ["1", str(num_steps)]
