"""`shardyard metrics`, `logs` and `download`: what was recorded of a job, for people and for other programs."""

import csv
import io
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from service.cli.view.metrics import columns, metric_rows, write_csv
from service.control.store.database import Database
from service.control.store.events import NewEvent, append_events
from service.control.store.jobs import get_job
from service.wire.events import rfc3339
from tests.service.checkpoints import commit, fault_of
from tests.service.control_plane import ControlPlane
from tests.service.test_streams import write_log
from tests.service_cli.command import check_refused, json_of, output_of, shardyard
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


@pytest.mark.slow
def test_the_command(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit(plane, job_file)
    plane.await_state(job_id, "succeeded")
    metrics = ("metrics", job_id)
    rows = list(csv.DictReader(io.StringIO(output_of(*metrics, "--csv", "--since-step", "2", url=plane.url))))
    assert [(row["step"], row["loss"], row["tokens_per_s"]) for row in rows] == [
        (str(step), str(10 / step), "1000.0") for step in (2, 3, 4, 5)
    ]
    table = output_of(*metrics, "--name", "loss", "--max-points", "2", url=plane.url)
    assert [line.split()[0] for line in table.splitlines()] == ["STEP", "1", "5"]
    assert "TOKENS_PER_S" not in table
    items = json_of(*metrics, "--name", "loss", url=plane.url)["items"]
    assert [set(item) for item in items] == [{"step", "time", "attempt", "loss"}] * 5
    output = output_of(*metrics, "--name", "loss", "--since-step", "9", url=plane.url)
    assert output == f"no step of {job_id} has loss\n"
    assert shardyard(*metrics, "--csv", "--json", url=plane.url).returncode == 2
    for options, words in (
        (("--max-points", "0"), ""),
        (("--name", "happiness"), "--name (=happiness)"), (("--csv", "--name", "loss", "--name", "los"), "loss"),
        *((("--name", name), f"shardyard: --name (={name!r}) must name a value") for name in ("", ".", "layers.")),
    ):  # fmt: skip
        check_refused(words, *metrics, *options, url=plane.url)


def test_a_long_run_has_a_row_for_every_step(plane: ControlPlane, job_file: Path) -> None:
    num_steps = 10_005
    job_id = submit(plane, job_file)
    plane.await_state(job_id, "succeeded")
    with closing(Database(f"sqlite:///{plane.database}")) as database, database.write() as tx:
        job = get_job(tx, job_id)
        events = (NewEvent("metric", 1, 1, "group-0", f'{{"step":{step},"loss":1.0}}', step)
                for step in range(6, num_steps + 1))  # fmt: skip
        append_events(tx, job.number, list(events))
    rows = csv.DictReader(io.StringIO(output_of("metrics", job_id, "--csv", url=plane.url)))
    assert [int(row["step"]) for row in rows] == list(range(1, num_steps + 1))
    sample = csv.DictReader(io.StringIO(output_of("metrics", job_id, "--csv", "--max-points", "2", url=plane.url)))
    assert [row["step"] for row in sample] == ["1", str(num_steps)]


def test_the_options_of_logs(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit(plane, job_file)
    storage = Path(plane.await_state(job_id, "succeeded")["storage"])
    current_time = datetime.now(UTC)
    for worker, ages in (("a1.driver", (4000, 30)), ("a1.g0.rank-0", (3900, 20, 10))):
        lines = [f"{rfc3339(current_time - timedelta(seconds=age))} info age {age}\n" for age in ages]
        write_log(storage, worker, 0, "".join(lines))
    for options, ages in (
        (("--tail", "3"), [30, 20, 10]), (("--since", "10m", "--worker", "g0.rank-0"), [20, 10]),
        (("--grep", "age 3", "--tail", "1"), [30]), (("--attempt", "1", "--tail", "1"), [10]),
    ):  # fmt: skip
        output_lines = output_of("logs", job_id, *options, url=plane.url).splitlines()
        assert [int(line.split()[-1]) for line in output_lines] == ages
    entry = json_of("logs", job_id, "--tail", "1", url=plane.url)
    assert {"attempt", "worker", "message", "time"} == set(entry)
    words = "query.since (='yesterday') must be a duration"
    check_refused(words, "logs", job_id, "--since", "yesterday", url=plane.url)
    words = f"{job_id} has no attempt 99: it had 1"
    check_refused(words, "logs", job_id, "--attempt", "99", "--follow", url=plane.url)


def submit_with_checkpoint(plane: ControlPlane, job_file: Path, step: int = 5) -> tuple[str, Path, str]:
    """Id and storage of a job that has ended, and the name of its checkpoint."""
    job_id = submit(plane, job_file)
    storage = Path(plane.await_state(job_id, "succeeded")["storage"])
    return job_id, storage, commit(storage, step)


@pytest.mark.slow
def test_a_job_in_a_folder(plane: ControlPlane, job_file: Path, tmp_path: Path) -> None:
    job_id, storage, name = submit_with_checkpoint(plane, job_file)
    folder = tmp_path / "mine" / job_id
    assert output_of("download", job_id, folder.parent, url=plane.url).startswith(f"{folder}: 5 files, ")
    assert fault_of(folder, name) is None
    assert (folder / "spec.json").read_bytes() == (storage / "spec.json").read_bytes()
    assert not list(folder.glob("attempts/1/launch*"))
    second_download = json_of("download", job_id, folder.parent, url=plane.url)
    assert (
        second_download["folder"],
        second_download["fetched"],
        len(second_download["kept"]),
        second_download["gone"],
    ) == (str(folder), [], 5, [])
    result_download = json_of("download", job_id, tmp_path / "only", "--kind", "result", url=plane.url)
    assert result_download["fetched"] == ["attempts/1/result.json"]
    other_id, *_ = submit_with_checkpoint(plane, job_file, step=4)
    output_of("download", other_id, folder.parent, url=plane.url)
    assert [path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()] == [name], "kept apart"

    assert shardyard("download", "job-aaaaaaaaaaaa", tmp_path, url=plane.url).returncode == 2
    kinds = "'spec', 'result', 'checkpoints', 'logs'"
    check_refused(kinds, "download", job_id, tmp_path, "--kind", "keys", url=plane.url)
    (tmp_path / "file").touch()
    check_refused(str(tmp_path / "file"), "download", job_id, tmp_path / "file", url=plane.url)
