"""Posting, listing, planning, health: what a client sees of a control plane that is well."""

import json
import re
import sqlite3
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe.plan import Plan
from moe.spec import JobSpec
from moe.train.checkpoint.marker import SUFFIX, FileSeal, Marker
from tests.service.control_plane import ControlPlane, spec
from tests.service.databases import BOTH_DATABASES

JOBS_DOCUMENT = Path(__file__).parents[2] / "docs" / "jobs.md"


def test_201_says_where_the_job_is(plane: ControlPlane) -> None:
    answer = plane.http.post("/v1/jobs", json=spec(labels={"a": "b"}))
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert plane.http.get(answer.headers["location"]).json()["id"] == job["id"]
    assert job["spec"] == JobSpec.parse(spec(labels={"a": "b"})).model_dump(mode="json")
    assert set(job) >= {
        "id", "name", "owner", "labels", "state", "reason", "attempt", "created_at", "updated_at", "started_at",
        "finished_at", "step", "num_steps", "last_metric", "dashboard_url", "storage", "result", "spec",
    }  # fmt: skip
    assert job["created_at"].endswith("Z")
    assert datetime.fromisoformat(job["created_at"]).utcoffset() is not None


def test_yaml_is_read_too(plane: ControlPlane) -> None:
    text = yaml.safe_dump(spec(name="from-yaml"))
    answer = plane.http.post("/v1/jobs", content=text, headers={"content-type": "application/yaml; charset=utf-8"})
    assert (answer.status_code, answer.json()["name"]) == (201, "from-yaml")
    large = text + "#" * 1_000_000
    answer = plane.http.post("/v1/jobs", content=large, headers={"content-type": "application/yaml"})
    assert answer.status_code == 413


def test_the_same_key_and_spec_give_the_same_job(plane: ControlPlane) -> None:
    headers = {"idempotency-key": "once"}
    first = plane.http.post("/v1/jobs", json=spec(name="once"), headers=headers)
    repeat = plane.http.post("/v1/jobs", json=dict(reversed(spec(name="once").items())), headers=headers)
    assert (first.status_code, repeat.status_code) == (201, 200)
    assert first.json()["id"] == repeat.json()["id"]
    assert repeat.headers["location"] == first.headers["location"]
    conflict = plane.http.post("/v1/jobs", json=spec(name="other"), headers=headers)
    assert conflict.status_code == 409
    assert f"this Idempotency-Key belongs to {first.json()['id']}" in conflict.json()["detail"]
    assert plane.list_jobs(name="other") == []
    assert plane.http.post("/v1/jobs", json=spec(), headers={"idempotency-key": "k" * 256}).status_code == 422


@BOTH_DATABASES
def test_pages_are_unmoved_by_jobs_that_come_meanwhile(plane: ControlPlane) -> None:
    job_ids = [plane.post(name="paged", resources={"num_workers": 900})["id"] for _ in range(6)]
    listed_ids: list[str] = []
    num_pages = 0
    query: dict[str, Any] = {"name": "paged", "limit": 2}
    while True:
        page = plane.http.get("/v1/jobs", params=query).json()
        listed_ids += [item["id"] for item in page["items"]]
        num_pages += 1
        plane.post(name="paged", resources={"num_workers": 900})
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert listed_ids == job_ids[::-1]  # newest first, without the jobs posted while paging
    assert num_pages == 3, "a full last page is the last"


@BOTH_DATABASES
def test_lists_are_filtered_by_label_state_and_name(plane: ControlPlane) -> None:
    def post(**labels: str) -> str:
        return str(plane.post(labels=labels, resources={"num_workers": 901})["id"])

    red, blue, red_large = post(colour="red"), post(colour="blue"), post(colour="red", size="large")
    plane.act(red, "cancel")
    for query, expected in (
        ({"label": "colour=red"}, {red, red_large}),
        ({"label": "colour"}, {red, blue, red_large}),
        ({"label": ["colour=red", "size=large"]}, {red_large}),
        ({"label": "colour=green"}, set()),
        ({"label": "colour", "state": "queued"}, {blue, red_large}),
        ({"label": "colour", "state": "queued,cancelled"}, {red, blue, red_large}),
        ({"label": "colour", "state": ["running", "cancelled"]}, {red}),
    ):
        assert {item["id"] for item in plane.list_jobs(limit=200, **query)} == expected, query
    (item,) = plane.list_jobs(label="size")
    assert "spec" not in item
    assert item["labels"] == {"colour": "red", "size": "large"}


@pytest.mark.slow
def test_metrics_say_since_when_the_queue_waits(own_plane: ControlPlane) -> None:
    def oldest() -> list[float]:
        lines = own_plane.http.get("/metrics").text.splitlines()
        return [
            float(line.split()[1]) for line in lines if line.startswith("shardyard_queue_oldest_timestamp_seconds ")
        ]

    own_plane.start()
    assert oldest() == []
    jobs = [own_plane.post(resources={"num_workers": 902}) for _ in range(2)]
    queued_times = [datetime.fromisoformat(job["created_at"]).timestamp() for job in jobs]
    assert oldest() == pytest.approx(queued_times[:1])
    own_plane.act(jobs[0]["id"], "cancel")
    assert oldest() == pytest.approx(queued_times[1:])


def test_plans(plane: ControlPlane) -> None:
    plan = Plan.model_validate(plane.http.post("/v1/plans", json=spec()).json())
    assert plan.num_workers == 1
    assert plan.defaults == {"train.dtype": "float32"}
    job = plane.post()
    of_job = Plan.model_validate(plane.http.get(f"/v1/jobs/{job['id']}/plan").json())
    assert of_job == plan.model_copy(update={"defaults": {}}), "all that a stored job says is written out"
    request = {"spec": spec(resources={"min_workers": 1, "max_workers": 8}), "num_workers": 4}
    assert plane.http.post("/v1/plans", json=request).json()["num_workers"] == 4
    for wrong, path in (
        ({"spec": spec(), "clutser": {}}, "clutser"),
        ({"spec": spec(), "num_workers": 0}, "num_workers"),
        ({"spec": spec(), "cluster": {"num_nodes": 1}}, "cluster.devices_per_node"),
        ({"spec": spec(), "cluster": {"num_nodes": 0, "devices_per_node": 1, "memory_bytes": 1}}, "cluster.num_nodes"),
        ({"spec": spec(), "cluster": {"num_nodes": 1, "devices_per_node": 1, "memory_bytes": 1}}, "resources"),
    ):  # fmt: skip
        answer = plane.http.post("/v1/plans", json=wrong)
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)


def test_checkpoints_are_what_their_markers_on_storage_say(plane: ControlPlane) -> None:
    job = plane.post()
    path = f"/v1/jobs/{job['id']}/checkpoints"
    assert plane.http.get(path).json() == {"items": [], "next_cursor": None}
    folder = Path(job["storage"]) / "checkpoints"
    folder.mkdir()
    files = {"a": FileSeal(size_bytes=3, sha256="x"), "b": FileSeal(size_bytes=4, sha256="y")}
    for step in (100, 50):
        marker = Marker(step=step, attempt=1, group=0, num_workers=2, created_at="2026-01-01T00:00:00Z", files=files)
        (folder / (marker.name + SUFFIX)).write_bytes(marker.to_bytes())
    (folder / f"step-00000150.a1.g0{SUFFIX}").write_text("torn")
    (folder / "step-00000200.a1.g0").mkdir()  # never committed
    items = plane.http.get(path).json()["items"]
    faults = {item["step"]: item["fault"] for item in items}
    assert faults == {50: None, 100: None, 150: "its marker is incomplete"}
    assert (items[0]["num_files"], items[0]["size_bytes"], items[0]["num_workers"]) == (2, 7, 2)
    assert items[0]["path"] == str(folder / "step-00000050.a1.g0")


def test_a_measured_cluster(own_plane: ControlPlane) -> None:
    plan = own_plane.start().http.post("/v1/plans", json=spec()).json()
    assert plan["made_for"]["calibration"] is None
    assert own_plane.http.get("/v1/cluster").json()["calibrations"] == []
    answer = own_plane.http.post("/v1/cluster/calibration")
    assert (answer.status_code, answer.json()["flops_per_s"]) == (200, {"float32": 1e9})
    cluster = own_plane.http.get("/v1/cluster").json()
    assert (cluster["num_nodes"], cluster["cpus"], cluster["gpus"]) == (1, 8, 0)
    assert cluster["nodes"][0]["ip"] == "127.0.0.1"
    assert cluster["calibrations"] == [answer.json()]
    calibrated_plan = own_plane.http.post("/v1/plans", json=spec()).json()
    assert calibrated_plan["made_for"]["calibration"]
    assert calibrated_plan["predicted"]["products_s"] > plan["predicted"]["products_s"]

    (own_plane.launcher.folder / "no-room").touch()
    refusal = own_plane.http.post("/v1/cluster/calibration")
    assert (refusal.status_code, refusal.json()["detail"]) == (409, "2 workers were not placed within 120 s")


def test_health_and_figures(plane: ControlPlane) -> None:
    assert plane.http.get("/healthz").json() == {"status": "ok"}
    assert plane.http.get("/readyz").json()["controller"] == "acting"
    plane.finished_job()
    figures = plane.http.get("/metrics")
    assert figures.headers["content-type"].startswith("text/plain")
    for line in (
        'shardyard_jobs{state="succeeded"}',
        'shardyard_http_requests_total{method="POST",route="/v1/jobs",status="201"}',
        'shardyard_records_total{kind="metric"}',
        "shardyard_controller_acting 1.0\n",
    ):
        assert f"\n{line}" in figures.text


def test_the_api_describes_itself(plane: ControlPlane) -> None:
    paths = plane.http.get("/openapi.json").json()["paths"]
    assert {"/v1/jobs", "/v1/jobs/{job_id}/events", "/v1/plans", "/v1/cluster"} <= set(paths)
    assert not any(path.startswith("/internal") for path in paths)
    assert plane.http.get("/v1/schema").json()["title"] == "Shardyard job"


PLACEHOLDERS = {"{job_id}": "JOB_ID", "{sweep_id}": "SWEEP_ID", "{checkpoint}": "STEP", "{path}": "PATH"}
OTHER_DOCUMENTS = ("/v1/webhooks", "/v1/uploads", "/v1/session")
"""Routes of other documents, and of the page's login."""


def test_the_table_of_the_api_has_each_route_once(plane: ControlPlane) -> None:
    routes = []
    for path, operations in plane.http.get("/openapi.json").json()["paths"].items():
        for placeholder, word in PLACEHOLDERS.items():
            path = path.replace(placeholder, word)
        if path.startswith("/v1/") and not path.startswith(OTHER_DOCUMENTS):
            routes += [f"{method.upper()} {path}" for method in operations]
    section = JOBS_DOCUMENT.read_text().partition("## The API")[2]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = [route.partition("?")[0] for row in rows for route in re.findall("`([^`]*)`", row)]
    assert sorted(documented) == sorted(routes)


def test_checkpoints_on_storage_that_cannot_be_read(plane: ControlPlane) -> None:
    job = plane.post(resources={"num_workers": 901})
    (Path(job["storage"]) / "checkpoints").symlink_to("checkpoints")  # round in a circle
    answer = plane.http.get(f"/v1/jobs/{job['id']}/checkpoints")
    assert answer.status_code == 503
    assert f"cannot read the storage of {job['id']}" in answer.json()["detail"]


def test_actions_take_an_empty_body_or_an_empty_object(plane: ControlPlane) -> None:
    for action, expected in (("cancel", 202), ("pause", 202), ("resume", 409)):
        for body in ({}, {"json": {}}):
            path = f"/v1/jobs/{plane.post(resources={'num_workers': 902})['id']}/{action}"
            assert plane.http.post(path, **body).status_code == expected


def test_a_queued_job_is_paused_where_it_stands(plane: ControlPlane) -> None:
    job_id = plane.post(resources={"num_workers": 903})["id"]
    assert plane.act(job_id, "pause").json()["state"] == "paused"
    answer = plane.act(job_id, "resume").json()
    assert (answer["state"], answer["reason"]) == ("queued", "resumed by local; waiting for its turn")
    assert plane.act(job_id, "cancel").json()["state"] == "cancelled"
    events = list(plane.events(job_id))
    assert {event.actor for event in events} <= {"user:local", "controller"}
    assert all(event.time.tzinfo for event in events)


def test_a_job_of_another_release_is_still_shown(plane: ControlPlane) -> None:
    job = plane.post(resources={"num_workers": 904})
    stored_spec = json.dumps({**job["spec"], "invented_later": {"x": 1}, "train": {"num_steps": "all"}})
    with closing(sqlite3.connect(plane.database)) as database, database:
        database.execute("UPDATE jobs SET spec = ?, plan = ? WHERE id = ?", (stored_spec, '{"version": 9}', job["id"]))
    assert plane.job(job["id"])["spec"]["invented_later"] == {"x": 1}
    assert plane.http.get(f"/v1/jobs/{job['id']}/plan").json() == {"version": 9}
    assert plane.http.get("/v1/jobs").status_code == 200
