"""Sweeps: all members or none, at most so many at a time, the best of each rung go on, whatever is killed."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe.records import StepRecord
from moe.spec import JobSpec
from service.control.store.events import NewEvent, append_events
from service.control.store.jobs import get_job
from service.control.store.sweeps import get_sweep as read_sweep
from service.control.store.sweeps import members_of
from service.control.sweeps.recovery import Progress, restored_rungs
from service.wire.states import ENDED
from tests.processes import await_that
from tests.service.control_plane import ControlPlane, spec
from tests.service.controllers import DeadlyLauncher, SimulatedKill, controller_on, local_cluster
from tests.service.databases import BOTH_DATABASES
from tests.service.test_recovery import lose_database, recorder
from tests.unit.train_runs import corpus, job

SEEDS = {"train.seed": {"values": [1, 2, 3, 4, 5, 6, 7, 8, 9]}}
HALVING = {"method": "successive_halving", "fields": SEEDS, "min_steps": 2, "factor": 3}


def sweep_body(sweep: dict[str, Any], num_steps: int = 20, **changes: Any) -> dict[str, Any]:
    return spec(train={"num_steps": num_steps, "batch_tokens": 1024}, sweep=sweep, **changes)


def post_sweep(plane: ControlPlane, sweep: dict[str, Any], **changes: Any) -> dict[str, Any]:
    answer = plane.http.post("/v1/sweeps", json=sweep_body(sweep, **changes))
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/sweeps/{answer.json()['id']}"
    return dict(answer.json())


def get_sweep(plane: ControlPlane, sweep_id: str) -> dict[str, Any]:
    return dict(plane.http.get(f"/v1/sweeps/{sweep_id}").json())


def await_end(plane: ControlPlane, sweep_id: str) -> dict[str, Any]:
    await_that(lambda: get_sweep(plane, sweep_id)["state"] != "running", lambda: str(get_sweep(plane, sweep_id)))
    return get_sweep(plane, sweep_id)


@BOTH_DATABASES
def test_a_grid_is_a_family_of_ordinary_jobs(plane: ControlPlane) -> None:
    fields = {"train.seed": {"values": [2, 1]}, "train.optimizer": {"values": [{"name": "adamw"}, {"name": "muon"}]}}
    sweep = post_sweep(plane, {"method": "grid", "fields": fields, "max_parallel": 2}, num_steps=5)
    assert (sweep["num_members"], sweep["metric"], sweep["state"]) == (4, "loss", "running")
    ended = await_end(plane, sweep["id"])
    assert ended["state"] == "succeeded"
    assert [member["values"]["train.seed"] for member in ended["members"]] == [1, 1, 2, 2]
    assert [member["value"] for member in ended["members"]] == [11 / 5, 11 / 5, 12 / 5, 12 / 5]
    job = plane.job(ended["members"][0]["job"])
    assert job["spec"]["train"]["seed"] == 1
    assert job["labels"]["sweep"] == sweep["id"]
    assert job["sweep"]["values"] == ended["members"][0]["values"]
    assert {item["id"] for item in plane.list_jobs(label=f"sweep={sweep['id']}")} == {
        member["job"] for member in ended["members"]
    }


@BOTH_DATABASES
def test_halving_continues_the_best_and_stops_the_others_with_their_checkpoints(plane: ControlPlane) -> None:
    sweep = post_sweep(plane, HALVING, labels={"commits": "yes"})
    assert sweep["rungs"] == [2, 6]
    ended = await_end(plane, sweep["id"])
    assert [member["values"]["train.seed"] for member in ended["members"]] == [1, 2, 3, *range(4, 10)]
    assert [member["step"] for member in ended["members"]] == [20, 6, 6, *[2] * 6]
    assert [member["state"] for member in ended["members"]] == ["succeeded", *["cancelled"] * 8]
    choices = [decision for decision in ended["decisions"] if decision["kind"] == "choose"]
    assert [(choice["step"], choice["continues"]) for choice in choices] == [(2, [1, 2, 3]), (6, [1])]
    assert ended["decisions"][-1]["kind"] == "end"
    stopped = ended["members"][-1]["job"]
    reasons = [event.data["reason"] for event in plane.events(stopped) if event.kind == "state"]
    assert reasons[-1].startswith(f"stopped at rung 1 of {sweep['id']}, at step 2, with loss 9.5")
    assert plane.act(stopped, "cancel").status_code == 409
    best = ended["members"][0]["job"]
    assert plane.job(best)["attempt"] == 3  # one per rung, from where the last one paused
    steps = [event.data["step"] for event in plane.events(best) if event.kind == "metric"]
    assert steps == list(range(1, 21))


@BOTH_DATABASES
def test_a_sweep_is_limited_to_its_places(own_plane: ControlPlane) -> None:
    own_plane.start()
    hold = own_plane.hold()
    fields = {"train.seed": {"values": [1, 2, 3, 4]}}
    sweep = post_sweep(own_plane, {"method": "grid", "fields": fields, "max_parallel": 2}, labels={"hold": hold.name})
    await_that(lambda: get_sweep(own_plane, sweep["id"])["members_by_state"].get("running") == 2)
    members = get_sweep(own_plane, sweep["id"])["members"]
    held = [member for member in members if member["is_held"]]
    assert len(held) == 2
    assert own_plane.http.post(f"/v1/jobs/{held[0]['job']}/move", params={"to": "first"}).status_code == 409
    assert own_plane.act(held[0]["job"], "cancel").status_code == 202  # an ordinary job
    hold.unlink()
    assert await_end(own_plane, sweep["id"])["members_by_state"] == {"succeeded": 3, "cancelled": 1}


def test_a_sweep_survives_kills_of_the_control_plane(own_plane: ControlPlane) -> None:
    own_plane.start()
    sweep = post_sweep(own_plane, {**HALVING, "max_parallel": 3}, labels={"step_ms": "5"})

    def num_launched() -> int:
        return len(own_plane.launcher.launches())

    for count in (2, 6, 10):
        await_that(lambda count=count: num_launched() >= count)
        own_plane.kill()
        own_plane.start()
    ended = await_end(own_plane, sweep["id"])
    assert [member["step"] for member in ended["members"]] == [20, 6, 6, *[2] * 6]
    assert num_launched() == 9 + 3 + 1  # nothing twice
    assert [decision["kind"] for decision in ended["decisions"]] == ["choose", "choose", "end"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after the call"])
@pytest.mark.parametrize("call", range(1, 9))  # at least four launches, and an observation of each
def test_killed_at_any_call_to_the_cluster(tmp_path: Path, call: int, after: bool) -> None:
    """A new controller makes the same choices, and launches nothing twice."""
    cluster = local_cluster(tmp_path)
    body = sweep_body({"method": "successive_halving", "fields": {"train.seed": {"values": [3, 1, 2]}}, "min_steps": 2,
                       "max_parallel": 2}, num_steps=6, labels={"silent": "yes"})  # fmt: skip
    first = controller_on(tmp_path, DeadlyLauncher(cluster, call, after))
    sweep, _ = first.sweeps.post(body, "tester")
    with first.database.write() as tx:  # in place of what the silent runs would have told
        for member in members_of(tx, sweep.number):
            data = {"step": 6, "loss": json.loads(member.field_values)["train.seed"]}
            append_events(tx, member.job_number, [NewEvent("metric", 1, 1, "run", json.dumps(data), step=6)])

    def has_ended(services: Any) -> bool:
        services.controller.step()
        with services.database.read() as tx:
            stored = read_sweep(tx, sweep.id)
        return stored is not None and stored.state in ENDED

    with pytest.raises(SimulatedKill):
        await_that(lambda: has_ended(first))
    second = controller_on(tmp_path, cluster)
    await_that(lambda: has_ended(second))
    assert len(cluster.launches()) == len(set(cluster.launches())) == 3 + 1
    cluster.end_all()
    for services in (first, second):
        services.database.close()


@BOTH_DATABASES
def test_all_members_are_stored_or_none(plane: ControlPlane) -> None:
    before = plane.http.get("/v1/jobs", params={"count": True, "limit": 1}).json()["total"]
    roots = plane.folder / "state" / "jobs"
    folders = sorted(roots.iterdir()) if roots.exists() else []
    fields = {"train.clip_norm": {"values": [1.0, "x", -1.0]}, "train.optimiser": {"values": [1, 2]}}
    answer = plane.http.post("/v1/sweeps", json=sweep_body({"method": "grid", "fields": fields}))
    assert answer.status_code == 422
    problems = {(problem["code"], problem["path"]) for problem in answer.json()["errors"]}
    assert problems == {
        ("wrong_type", "train.clip_norm"), ("out_of_range", "train.clip_norm"),
        ("unknown_key", "sweep.fields.train.optimiser"),
    }  # fmt: skip
    assert 'train.clip_norm="x"' in answer.text.replace('\\"', '"')
    assert plane.http.get("/v1/jobs", params={"count": True, "limit": 1}).json()["total"] == before
    assert (sorted(roots.iterdir()) if roots.exists() else []) == folders


def test_members_have_the_plans_of_single_jobs(tmp_path: Path) -> None:
    """Members that differ only in what planning does not read share a plan."""
    fields = {
        "train.seed": [5], "train.schedule.decay": ["linear"], "train.optimizer.peak_lr": [0.5],
        "train.optimizer.weight_decay": [0.3], "train.optimizer.beta1": [0.5], "train.optimizer.beta2": [0.9],
        "train.optimizer.eps": [0.1], "train.label_smoothing": [0.3], "train.batch_tokens": [2048],
        "train.num_steps": [7],
    }  # fmt: skip
    services = controller_on(tmp_path, local_cluster(tmp_path))
    train = {"num_steps": 20, "batch_tokens": 1024, "optimizer": {"name": "adamw"}}
    for path, values in fields.items():
        default = {"train.batch_tokens": 1024, "train.num_steps": 20, "train.schedule.decay": "cosine"}.get(path, 0)
        values = [default or (1e-3 if "lr" in path or "eps" in path else 0), *values]
        body = spec(train=train, sweep={"method": "grid", "fields": {path: {"values": values}}})
        sweep, _ = services.sweeps.post(body, "tester")
        with services.database.read() as tx:
            jobs = [get_job(tx, member.job_id) for member in members_of(tx, sweep.number)]
        for stored in jobs:
            assert stored is not None
            alone = services.requests.plans.forecast(JobSpec.parse(json.loads(stored.spec))).plan
            assert alone is not None
            assert json.loads(stored.plan or "") == alone.model_dump(mode="json"), path
    services.database.close()


def test_a_job_with_a_sweep_is_posted_elsewhere(plane: ControlPlane) -> None:
    answer = plane.http.post("/v1/jobs", json=sweep_body(HALVING))
    assert answer.status_code == 422
    assert [(problem["code"], problem["path"]) for problem in answer.json()["errors"]] == [("not_allowed", "sweep")]
    assert plane.http.post("/v1/sweeps", json=spec()).json()["errors"][0]["path"] == "sweep"


@BOTH_DATABASES
def test_an_idempotency_key_gives_one_sweep(plane: ControlPlane) -> None:
    body = sweep_body({"method": "grid", "fields": {"train.seed": {"values": [1, 2]}}}, num_steps=3)
    first, again = (
        plane.http.post("/v1/sweeps", json=body, headers={"idempotency-key": "sweep-key"}) for _ in range(2)
    )
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    other = plane.http.post("/v1/sweeps", json={**body, "name": "other"}, headers={"idempotency-key": "sweep-key"})
    assert other.status_code == 409
    assert await_end(plane, first.json()["id"])["num_members"] == 2


@BOTH_DATABASES
def test_cancelled_and_deleted(own_plane: ControlPlane) -> None:
    own_plane.start()
    hold = own_plane.hold()
    fields = {"train.seed": {"values": [1, 2, 3]}}
    sweep = post_sweep(own_plane, {"method": "grid", "fields": fields, "max_parallel": 1}, labels={"hold": hold.name})
    path = f"/v1/sweeps/{sweep['id']}"
    await_that(lambda: get_sweep(own_plane, sweep["id"])["members_by_state"].get("running") == 1)
    assert own_plane.http.delete(path).status_code == 409
    assert own_plane.http.post(f"{path}/cancel").status_code == 202
    assert await_end(own_plane, sweep["id"])["members_by_state"] == {"cancelled": 3}
    assert own_plane.http.post(f"{path}/cancel").status_code == 409
    storages = [Path(own_plane.job(member["job"])["storage"]) for member in sweep["members"]]
    assert all(storage.exists() for storage in storages)
    assert own_plane.http.delete(path).status_code == 202
    await_that(lambda: own_plane.http.get(path).status_code == 410)
    assert not any(storage.exists() for storage in storages)
    assert own_plane.list_jobs() == []
    assert own_plane.http.get("/v1/sweeps").json()["items"] == []
    assert own_plane.http.delete(path).status_code == 202  # again, with nothing to do


@BOTH_DATABASES
def test_a_member_that_ends_early_does_not_hold_up_the_others(plane: ControlPlane) -> None:
    """It fails before its rung: the others are compared without it."""
    fields = {"train.seed": {"values": [1, 2, 3]}}
    halving = {"method": "successive_halving", "fields": fields, "min_steps": 5, "factor": 2}
    sweep = post_sweep(plane, halving, num_steps=10, labels={"step_ms": "30"})
    victim = sweep["members"][0]["job"]
    plane.await_state(victim, "running", "paused")
    plane.act(victim, "cancel")
    ended = await_end(plane, sweep["id"])
    assert ended["state"] == "succeeded"
    assert {member["values"]["train.seed"]: member["state"] for member in ended["members"]} == {
        1: "cancelled", 2: "succeeded", 3: "cancelled",
    }  # fmt: skip


@pytest.mark.slow
def test_a_trained_sweep_chooses_by_held_out_losses_and_changes_none(own_plane: ControlPlane, tmp_path: Path) -> None:
    """Real losses and checkpoints: the job that passed every rung has those of the same job by itself."""
    plane = own_plane.start(data_roots=[str(tmp_path)])
    base = job(corpus(tmp_path), train={"evaluation": {"every_steps": 2, "max_pairs": 6}}).model_dump(mode="json")
    rates = [1e-7, 3e-3, 1e-3]
    halving = {"method": "successive_halving", "fields": {"train.optimizer.peak_lr": {"values": rates}},
               "min_steps": 2, "factor": 2, "rungs": 2, "max_parallel": 2}  # fmt: skip
    answer = plane.http.post("/v1/sweeps", json={**base, "labels": {"trains": "yes"}, "sweep": halving})
    assert answer.status_code == 201, answer.text
    assert (answer.json()["metric"], answer.json()["rungs"]) == ("held_out", [2, 4])
    ended = await_end(plane, answer.json()["id"])
    best, *others = ended["members"]
    assert ended["state"] == "succeeded", ended
    assert (best["state"], best["step"], sorted(member["step"] for member in others)) == ("succeeded", 8, [2, 2])
    values = {member["values"]["train.optimizer.peak_lr"]: member["value"] for member in ended["members"]}
    choice = ended["decisions"][0]
    at_rung = {
        member["number"]: plane.metrics(member["job"], name="held_out")[0]["held_out"] for member in ended["members"]
    }
    means = {number: sum(losses.values()) / len(losses) for number, losses in at_rung.items()}
    assert choice["continues"] == [min(means, key=lambda number: means[number])]
    assert values[1e-7] == pytest.approx(max(means.values()))
    alone = plane.submit(plane.job(best["job"])["spec"])["id"]
    plane.await_state(alone, "succeeded")
    assert plane.losses(alone) == plane.losses(best["job"])
    assert all(Path(plane.job(member["job"])["storage"], "checkpoints").iterdir() for member in others)
    assert plane.act(others[0]["job"], "resume").status_code == 202  # after all, to its end
    assert plane.await_state(others[0]["job"], "succeeded")["step"] == 8


def test_bad_requests_name_path_and_rule(plane: ControlPlane) -> None:
    def codes(sweep: Any) -> list[tuple[str, str]]:
        answer = plane.http.post("/v1/sweeps", json=sweep_body(sweep))
        assert answer.status_code == 422, answer.text
        return [(problem["code"], problem["path"]) for problem in answer.json()["errors"]]

    assert codes(None) == [("wrong_type", "sweep")]
    assert codes({**HALVING, "metric": "held_out"}) == [("requires", "sweep.metric")]
    assert codes({**HALVING, "min_steps": 20}) == [("out_of_range", "sweep.min_steps")]
    assert plane.http.get("/v1/sweeps", params={"state": "odd"}).json()["errors"][0]["code"] == "not_a_choice"
    assert plane.http.get("/v1/sweeps/sweep-aaaaaaaaaaaa").status_code == 404
    assert plane.http.get("/v1/sweeps/job-1").status_code == 404


@BOTH_DATABASES
def test_a_sweep_is_paused_and_resumed_as_one(own_plane: ControlPlane) -> None:
    own_plane.start()
    hold = own_plane.hold()
    fields = {"train.seed": {"values": [1, 2, 3]}}
    sweep = post_sweep(own_plane, {"method": "grid", "fields": fields, "max_parallel": 1},
                       labels={"hold": hold.name, "commits": "yes"})  # fmt: skip
    path = f"/v1/sweeps/{sweep['id']}"
    await_that(lambda: get_sweep(own_plane, sweep["id"])["members_by_state"].get("running") == 1)
    paused = own_plane.http.post(f"{path}/pause")
    assert (paused.status_code, paused.json()["state"]) == (202, "paused")
    assert own_plane.http.post(f"{path}/pause").json()["decisions"] == paused.json()["decisions"]
    await_that(lambda: get_sweep(own_plane, sweep["id"])["members_by_state"] == {"paused": 1, "queued": 2})
    assert own_plane.http.delete(path).status_code == 409
    launches = own_plane.launcher.launches()
    resumed = own_plane.http.post(f"{path}/resume")
    assert (resumed.status_code, resumed.json()["state"]) == (202, "running")
    hold.unlink()
    ended = await_end(own_plane, sweep["id"])
    assert (ended["state"], ended["members_by_state"]) == ("succeeded", {"succeeded": 3})
    assert [decision["kind"] for decision in ended["decisions"]] == ["pause", "resume", "end"]
    assert len(own_plane.launcher.launches()) == len(launches) + 3
    assert [own_plane.http.post(f"{path}/{verb}").status_code for verb in ("pause", "resume")] == [409, 409]


def test_a_paused_sweep_is_cancelled(own_plane: ControlPlane) -> None:
    own_plane.start()
    hold = own_plane.hold()
    sweep = post_sweep(own_plane, {"method": "grid", "fields": {"train.seed": {"values": [1, 2]}}},
                       labels={"hold": hold.name})  # fmt: skip
    path = f"/v1/sweeps/{sweep['id']}"
    await_that(lambda: get_sweep(own_plane, sweep["id"])["members_by_state"].get("running") == 2)
    assert own_plane.http.post(f"{path}/pause").status_code == 202
    assert own_plane.http.post(f"{path}/cancel").status_code == 202
    assert own_plane.http.post(f"{path}/resume").status_code == 409
    assert await_end(own_plane, sweep["id"])["members_by_state"] == {"cancelled": 2}


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({1: (0, None), 2: (2, 1.0)}, {1: (0, False), 2: (0, False)}),  # nothing was chosen yet
        ({1: (6, 1.0), 2: (2, 2.0), 3: (2, 3.0)}, {1: (1, False), 2: (0, True), 3: (0, True)}),
        ({1: (20, 1.0), 2: (2, 2.0), 3: (2, 3.0)}, {1: (2, False), 2: (0, True), 3: (0, True)}),
        # Two of six go on: one has trained further, and the best of the others was chosen but had not started.
        ({1: (3, 9.0), 2: (2, 2.0), 3: (2, 1.0), 4: (2, 4.0), 5: (2, None), 6: (1, 0.1)},
         {1: (1, False), 2: (0, True), 3: (1, False), 4: (0, True), 5: (0, True), 6: (0, True)}),
    ],
)  # fmt: skip
def test_survived_rungs_follow_from_steps_and_values(
    members: dict[int, tuple[int, float | None]], expected: dict[int, tuple[int, bool]]
) -> None:
    progress = [Progress(number, step, value) for number, (step, value) in members.items()]
    assert restored_rungs(progress, (2, 6), 3, "min") == expected


def test_a_lost_database_is_rebuilt_with_its_sweeps(own_plane: ControlPlane) -> None:
    own_plane.start()
    ended = await_end(own_plane, post_sweep(own_plane, HALVING, labels={"commits": "yes"})["id"])
    for member in ended["members"]:
        run = recorder(own_plane, own_plane.job(member["job"]))
        for step in range(1, member["step"] + 1):
            run.metric(StepRecord(step, loss=member["value"]))
        run.close(patience_s=0.1)
    hold = own_plane.hold()
    fields = {"train.seed": {"values": [1, 2]}}
    sweep = post_sweep(own_plane, {"method": "grid", "fields": fields, "max_parallel": 1},
                       labels={"hold": hold.name, "commits": "yes"})  # fmt: skip
    await_that(lambda: get_sweep(own_plane, sweep["id"])["members_by_state"].get("running") == 1)
    lose_database(own_plane)
    own_plane.launcher.end_all()
    own_plane.start()
    await_that(lambda: own_plane.http.get("/v1/sweeps").json()["items"][1:] != [])
    recovered = await_end(own_plane, ended["id"])
    kept = ("number", "job", "state", "values", "value", "step", "rung", "is_out")
    assert [{key: member[key] for key in kept} for member in recovered["members"]] == [
        {key: member[key] for key in kept} for member in ended["members"]
    ]
    same = ("id", "name", "state", "metric", "method", "rungs", "fields", "spec", "created_at")
    assert {key: recovered[key] for key in same} == {key: ended[key] for key in same}
    unfinished = get_sweep(own_plane, sweep["id"])
    assert (unfinished["state"], unfinished["num_members"]) == ("paused", 2)
    hold.unlink()
    for member in unfinished["members"]:
        own_plane.await_state(member["job"], "paused")
    assert own_plane.http.post(f"/v1/sweeps/{sweep['id']}/resume").status_code == 202
    assert await_end(own_plane, sweep["id"])["members_by_state"] == {"succeeded": 2}
