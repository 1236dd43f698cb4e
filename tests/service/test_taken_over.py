"""What a run recorded while nobody listened is taken over from storage, and counts as what it is: history, mostly."""

import json
from typing import Any

from tests.processes import await_that
from tests.service.control_plane import ControlPlane
from tests.service.local_launcher import launches
from tests.service.quiet_run import TIME, Run, checkpoint, metric


def test_failures_that_nobody_heard_of_count(own_plane: ControlPlane) -> None:
    run = Run(own_plane.start())
    own_plane.kill()
    sealed = run.storage / "metrics/a1.driver"
    sealed.mkdir(parents=True)
    records = [{"seq": seq, "kind": "recovering", "time": TIME, "data": {"reason": "died"}} for seq in (0, 1)]
    (sealed / "segment-00000000.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    driver = own_plane.launcher.process(f"{run.id}-a1")
    assert driver is not None
    driver.kill()
    own_plane.start()
    await_that(lambda: launches(run.storage, 2) != [])
    assert own_plane.job(run.id)["failures"] == 3
    assert run.launch(2)["max_failures"] == 0
    run.end()


def test_a_checkpoint_that_is_heard_of_late_forgives_too(own_plane: ControlPlane) -> None:
    """It was committed on a node that died with its worker group, and another group has begun since."""
    run = Run(own_plane.start())
    failure = {"kind": "recovering", "time": TIME, "data": {"reason": "a node died"}}
    run.send(0, failure, failure, writer="driver")
    run.send(0, metric(51), writer="group-1")
    sealed = run.storage / "metrics/a1.g0"
    sealed.mkdir(parents=True)
    (sealed / "segment-00000000.jsonl").write_text(json.dumps({"seq": 0, **checkpoint(50)}) + "\n")
    driver = own_plane.launcher.process(f"{run.id}-a1")
    assert driver is not None
    driver.kill()
    await_that(lambda: launches(run.storage, 2) != [])
    assert own_plane.job(run.id)["failures"] == 1, "the driver's"
    run.end()


def test_what_nobody_could_deliver_is_taken_over_from_storage(plane: ControlPlane) -> None:
    run = Run(plane)
    run.send(0, metric(1))
    sealed = run.storage / "metrics/a1.g0"
    sealed.mkdir(parents=True)
    lines = [json.dumps({"seq": step - 1, **metric(step)}) for step in range(1, 6)]
    (sealed / "segment-00000000.jsonl").write_text("\n".join(lines[:3]) + "\n")
    (sealed / "segment-00000001.jsonl").write_text("\n".join(lines[3:]) + '\n{"seq": 5, "torn')
    driver = run.storage / "metrics/a1.driver"
    driver.mkdir()
    log = {"seq": 0, "kind": "log", "time": TIME, "data": {"level": "info", "message": "last words"}}
    (driver / "segment-00000000.jsonl").write_text(json.dumps(log) + "\n")
    run.end()
    assert run.steps() == [1, 2, 3, 4, 5]
    events = list(plane.events(run.id))
    assert [event.data.get("message") for event in events if event.actor == "driver"] == ["last words"]
    assert events[-1].data["state"] == "cancelled"  # the end comes after all that led to it


def seal(run: Run, writer: str, *records: dict[str, Any]) -> None:
    """Puts records on storage as a writer's first segment."""
    folder = run.storage / "metrics" / writer
    folder.mkdir(parents=True)
    lines = (json.dumps({"seq": seq, **record}) for seq, record in enumerate(records))
    (folder / "segment-00000000.jsonl").write_text("\n".join(lines) + "\n")


def test_what_is_heard_late_of_an_older_group_is_history_and_no_news(plane: ControlPlane) -> None:
    run = Run(plane)
    run.send(0, metric(4, loss=2.0), metric(5, loss=2.0), writer="group-1")
    seal(run, "a1.g0", *(metric(step, loss=1.0) for step in range(1, 7)))
    run.end()
    points = plane.http.get(f"/v1/jobs/{run.id}/metrics").json()["items"]
    assert [(point["step"], point["loss"]) for point in points] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 1.0),
    ]  # fmt: skip
    assert plane.job(run.id)["step"] == 5


def test_what_an_older_attempt_left_is_taken_over_at_the_next_end(plane: ControlPlane) -> None:
    run = Run(plane)
    run.send(0, {"kind": "started", "time": TIME, "data": {"group": 0}}, metric(1))
    process = plane.launcher.process(f"{run.id}-a1")
    assert process is not None
    process.kill()
    await_that(lambda: launches(run.storage, 2) != [])
    seal(run, "a1.g0", {"kind": "log", "time": TIME, "data": {}}, metric(1), metric(2))  # by attempt 2
    newer = run.launch(2)["token"]
    assert run.send(0, metric(3), attempt=2, token=newer).status_code == 200
    run.end()
    assert run.steps() == [1, 2, 3]
    assert plane.job(run.id)["step"] == 3
