"""Jobs in experiment trackers, written by a control plane and read with the trackers' own libraries."""

from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from service.cli.view.details import job_details
from service.client import Client
from tests.processes import await_that
from tests.service.control_plane import ControlPlane
from tests.service.silent_run import Run, checkpoint, metric, record
from tests.tracker import readers
from tests.unit.train_runs import corpus
from tests.unit.train_runs import job as small_job

Track = dict[str, dict[str, Any]]
LIGHT: Track = {"tensorboard": {}}
ALL: Track = {"mlflow": {}, "wandb": {"mode": "offline"}, "tensorboard": {}, "trackio": {}}
WAITING: Track = {"mlflow": {"wait_for_checkpoint": True}, "wandb": {"mode": "offline", "wait_for_checkpoint": True}}
ANSWERS_AT_ONCE = frozenset({"mlflow", "tensorboard", "trackio"})
"""Trackers whose files have a step once it counts as written; W&B's process keeps the newest ones in memory."""
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries that call each other


def folder_of(plane: ControlPlane) -> Path:
    return plane.folder / "state" / "tracking"


def tracking(run: Run) -> dict[str, Any]:
    return {entry["tracker"]: entry for entry in run.plane.job(run.id)["tracking"]}


def warnings(run: Run) -> list[str]:
    """Warnings about trackers in the job's events."""
    events = run.plane.events(run.id)
    return [event.data["message"] for event in events if event.kind == "log" and event.actor == "tracking"]


def steps(first: int, last: int, attempt: int) -> list[dict[str, Any]]:
    """Records whose loss tells the attempt."""
    return [metric(step, loss=step + attempt / 8) for step in range(first, last + 1)]


def read_values(run: Run, tracker: str) -> dict[int, list[float]]:
    if tracking(run)[tracker]["place"] is None:  # not begun
        return {}
    return readers.read_values(tracker, folder_of(run.plane), run.id)


def await_steps(run: Run, tracker: str, last: int) -> None:
    """Wait until a tracker has all steps up to `last`."""
    expected = set(range(1, last + 1))
    await_that(lambda: set(read_values(run, tracker)) >= expected,
               lambda: f"{tracker}: {tracking(run)}, {run.plane.log_text()[-3000:]}")  # fmt: skip


def kill_tracker_processes(plane: ControlPlane) -> None:
    """Kill the processes that the control plane writes through."""
    children = psutil.Process(plane.process.pid).children(recursive=True)
    processes = [child for child in children if "service.tracker.child" in " ".join(child.cmdline())]
    assert processes
    for process in processes:
        process.kill()


@pytest.mark.parametrize("track", [LIGHT, pytest.param(ALL, marks=pytest.mark.slow)], ids=["light", "all"])
def test_each_step_is_written_once_through_kills_and_repeated_steps(own_plane: ControlPlane, track: Track) -> None:
    """An attempt dies at step 9, after a checkpoint of step 4; the trackers' process dies, and the control plane."""
    run = Run(own_plane.start(), track=track)
    run.send(0, record("started", group=0, workers=[]), *steps(1, 4, 1), checkpoint(4), *steps(5, 7, 1))
    for tracker in sorted(ANSWERS_AT_ONCE & track.keys()):
        await_steps(run, tracker, 7)
    kill_tracker_processes(own_plane)
    run.send(9, *steps(8, 9, 1))
    for tracker in sorted(ANSWERS_AT_ONCE & track.keys()):
        await_steps(run, tracker, 9)
    own_plane.kill()
    own_plane.start()
    run.kill_driver()
    run.token = run.launch(2)["token"]
    run.send(0, record("started", group=0, workers=[]), record("resumed", group=0, step=4), *steps(5, 12, 2), attempt=2)
    run.end()
    for tracker in track:
        await_steps(run, tracker, 12)
        last_old = 9 if tracker == "mlflow" else 4
        expected = {step: [step + (0.25 if step > last_old else 0.125)] for step in range(1, 13)}
        if tracker == "wandb":  # had the first values in memory only when its process was killed, or not
            assert {step: len(values) for step, values in read_values(run, tracker).items()} == dict.fromkeys(
                expected, 1
            )
        else:
            assert read_values(run, tracker) == expected
    assert {tracker: entry["trouble"] for tracker, entry in tracking(run).items()} == dict.fromkeys(track)


@pytest.mark.slow
def test_trackers_that_wait_for_checkpoints_have_no_repeated_steps(own_plane: ControlPlane) -> None:
    run = Run(own_plane.start(), track=WAITING)
    run.send(0, record("started", group=0, workers=[]), *steps(1, 4, 1), checkpoint(4), *steps(5, 9, 1))
    await_steps(run, "mlflow", 4)
    run.kill_driver()
    run.token = run.launch(2)["token"]
    run.send(0, record("started", group=0, workers=[]), *steps(5, 8, 2), checkpoint(8), *steps(9, 10, 2), attempt=2)
    await_steps(run, "mlflow", 8)
    run.end()
    for tracker in WAITING:
        await_steps(run, tracker, 10)
        assert read_values(run, tracker) == {
            step: [step + (0.25 if step > 4 else 0.125)] for step in range(1, 11)
        }  # fmt: skip


def test_a_tracker_that_cannot_be_written_is_caught_up(own_plane: ControlPlane) -> None:
    """A file is where its folder should be; the other tracker is not affected."""
    folder = folder_of(own_plane)
    folder.mkdir(parents=True)
    obstacle = folder / "tensorboard"
    obstacle.touch()
    run = Run(own_plane.start(), track={"tensorboard": {}, "trackio": {}})
    run.send(0, record("started", group=0, workers=[]), *steps(1, 3, 1))
    await_steps(run, "trackio", 3)
    await_that(lambda: tracking(run)["tensorboard"]["trouble"] is not None)
    with Client(own_plane.url) as client, Console(record=True, width=200) as console:
        console.print(job_details(client.job(run.id)))
    shown = console.export_text()
    assert str(folder / "trackio") in shown
    assert "cannot be written" in shown
    run.send(4, *steps(4, 6, 1))
    obstacle.unlink()
    await_steps(run, "tensorboard", 6)
    run.end()
    await_that(lambda: tracking(run)["tensorboard"]["trouble"] is None)
    assert ["cannot write" in message for message in warnings(run)] == [True, False]
    assert set(read_values(run, "tensorboard")) == set(range(1, 7))


@pytest.mark.slow
def test_a_job_that_trains_is_tracked_to_its_scores(own_plane: ControlPlane, tmp_path: Path) -> None:
    """Its driver dies at step 7, and the next one repeats steps from a checkpoint."""
    base_spec = small_job(corpus(tmp_path)).model_dump(mode="json")
    train = {**base_spec["train"], "evaluation": {**base_spec["train"]["evaluation"], "every_steps": 2}}
    job = own_plane.start(data_roots=[str(tmp_path)]).submit(
        {**base_spec, "labels": {"trains": "yes", "die_at": "7"}, "track": {**ALL, "layers": True}, "train": train}
    )
    final_job = own_plane.await_state(job["id"], "succeeded", "failed")
    assert final_job["state"] == "succeeded", final_job["reason"]
    metrics = {point["step"]: point for point in own_plane.metrics(job["id"])}
    layers = {step: point["layers"] for step, point in metrics.items()}
    expected_values = {
        "train/loss": {step: point["loss"] for step, point in metrics.items()},
        "experts/max_over_mean": {step: max(layer["max_over_mean"] for layer in layers[step]) for step in layers},
        f"layer_{layers[1][0]['layer']}/entropy": {step: layers[step][0]["entropy"] for step in layers},
        **{
            f"held_out/{name}": {step: point["held_out"][name] for step, point in metrics.items() if step % 2 == 0}
            for name in metrics[2]["held_out"]
        },
    }
    for tracker in ALL:
        await_that(lambda: own_plane.job(job["id"])["tracking"][0]["place"] is not None)
        folder = folder_of(own_plane)
        await_that(lambda: len(readers.read_values(tracker, folder, job["id"])) == len(metrics))  # noqa: B023
        for name, expected in expected_values.items():
            values = readers.read_values(tracker, folder, job["id"], name)
            assert values == {step: [pytest.approx(value, rel=1e-6)] for step, value in expected.items()}, (
                tracker,
                name,
            )
    await_that(lambda: readers.mlflow(folder, job["id"])[1].info.status == "FINISHED")
    _, run = readers.mlflow(folder, job["id"])
    assert {name for name in run.data.metrics if name.startswith("best/")} == {"best/held_out", "best/step"}
    assert any(name.startswith("final/") for name in run.data.metrics)
    assert run.data.params["train.num_steps"] == str(base_spec["train"]["num_steps"])


@pytest.mark.slow
def test_steps_that_a_tracker_never_received_are_reported(own_plane: ControlPlane) -> None:
    folder = folder_of(own_plane)
    folder.mkdir(parents=True)
    (folder / "tensorboard").touch()
    run = Run(own_plane.start(tracking_patience_s=0.5), track={"tensorboard": {}})
    run.send(0, record("started", group=0, workers=[]), *steps(1, 3, 1))
    await_that(lambda: tracking(run)["tensorboard"]["trouble"] is not None)
    run.end()
    await_that(lambda: any("steps 1 to 3" in message for message in warnings(run)))
    assert "gave up" in warnings(run)[-1]


def test_a_job_that_never_trains_is_in_no_tracker(own_plane: ControlPlane) -> None:
    job = own_plane.start().post(track=LIGHT, resources={"num_workers": 100})
    own_plane.act(job["id"], "cancel")
    own_plane.await_state(job["id"], "cancelled")
    assert [entry["place"] for entry in own_plane.job(job["id"])["tracking"]] == [None]
    assert not folder_of(own_plane).exists()
