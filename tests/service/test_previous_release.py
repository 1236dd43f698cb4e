"""What the previous release left is used by this one: checkpoints, exported folders, and a control plane's database.

`tests/golden/previous-release.tar.xz` was written by commit f027cfc5 and is never written anew. For each kind of model
it holds step 2 of 4 of a run in float32 on two processes (experts on both, or FSDP), the loss and gradient norm of each
step, the exported folder, and texts by that model; for a control plane, its database as SQL, storage and answers.
"""

import json
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from moe.export.load import load_trained
from moe.spec import JobSpec
from moe.spec.generation import GenerationSpec
from moe.train.checkpoint.spec_changes import SPEC
from service.client.sse import messages
from tests.parity.gloo_ranks import Pools
from tests.service.control_plane import ControlPlane
from tests.unit.language_runs import documents
from tests.unit.train_runs import corpus, course, prepare_pairs, rewrite, run

ARCHIVE = Path(__file__).parents[1] / "golden" / "previous-release.tar.xz"
MODELS = ("language-dense", "language-MoE", "translation-dense", "translation-MoE")
CHECKPOINT = "storage/checkpoints/step-00000002.a1.g0"
TEXTS = {"greedy": GenerationSpec(max_tokens=8), "beams": GenerationSpec(max_tokens=8, num_beams=3)}
FLOAT32 = 1e-5
"""Relative tolerance: processors round differently."""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


def with_data(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The spec, with its corpus written into a folder."""
    if spec["model"]["kind"] == "language":
        return {**spec, "data": {**spec["data"], "sources": documents(folder / "data")["sources"]}}
    return {**spec, "data": {**spec["data"], "paths": corpus(folder)["paths"]}}


def put_data(storage: Path, checkpoint: Path, folder: Path) -> JobSpec:
    """Write a checkpoint's corpus into a folder, and its place into the checkpoint."""
    spec = with_data(json.loads((checkpoint / SPEC).read_text()), folder)
    state = json.loads((checkpoint / "run.json").read_text())
    state["data"]["prepared"] = prepare_pairs(JobSpec.parse(spec), folder / "cache").key
    rewrite(storage, SPEC, lambda _: json.dumps(spec).encode())
    rewrite(storage, "run.json", lambda _: json.dumps(state).encode())
    return JobSpec.parse(spec)


def resume_run(spec: JobSpec, folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step that follows."""
    _, recorder = run(spec, folder / "storage", folder / "cache", attempt=2)
    return [(step["loss"], step["grad_norm"]) for step in course(recorder)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_sharded_checkpoint_goes_on(previous: Path, tmp_path: Path, ranks: Pools, model: str, workers: int) -> None:
    """On as many processes as wrote it, and on one."""
    shutil.copytree(previous / model / "storage", tmp_path / "storage")
    spec = put_data(tmp_path / "storage", tmp_path / CHECKPOINT, tmp_path)
    if workers == 1:
        single_spec = {**spec.model_dump(mode="json"), "parallel": {}, "resources": {"num_workers": 1}}
        steps = resume_run(JobSpec.parse(single_spec), tmp_path)
    else:
        steps = ranks[workers].run(resume_run, spec, tmp_path)[0]
    expected = json.loads((previous / model / "losses.json").read_text())[2:]
    assert steps == [pytest.approx(tuple(step), rel=FLOAT32) for step in expected]


@pytest.mark.parametrize("folder", ["exported", CHECKPOINT])
@pytest.mark.parametrize("model", MODELS)
def test_its_models_make_the_same_texts(previous: Path, model: str, folder: str) -> None:
    expected = json.loads((previous / model / "texts.json").read_text())
    generator = load_trained(str(previous / model / folder))
    assert {name: generator.generate(expected["prompts"], spec) for name, spec in TEXTS.items()} == {
        name: expected[name] for name in TEXTS
    }


@pytest.fixture(scope="module")
def restored_plane(previous: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of this release on the database and storage of the previous one."""
    folder = tmp_path_factory.mktemp("restored")
    (folder / "state").mkdir()
    shutil.copytree(previous / "service" / "storage", folder / "state" / "storage")
    with closing(sqlite3.connect(folder / "state" / "shardyard.db")) as database:
        database.executescript((previous / "service" / "database.sql").read_text().replace("/FOLDER", str(folder)))
    (checkpoint,) = folder.glob("state/storage/*/checkpoints/*.g0")
    put_data(checkpoint.parents[1], checkpoint, folder)
    plane = ControlPlane(folder, data_roots=[str(folder)]).start()
    yield plane
    plane.close()


@pytest.fixture(scope="module")
def answers(previous: Path, restored_plane: ControlPlane) -> dict[str, Any]:
    """What the previous release answered."""
    text = (previous / "service" / "answers.json").read_text()
    return dict(json.loads(text.replace("/FOLDER", str(restored_plane.folder))))


def test_its_jobs_are_listed_and_shown(restored_plane: ControlPlane, answers: dict[str, Any]) -> None:
    job_id = answers["job"]["id"]
    assert restored_plane.job(job_id) == answers["job"] | {
        "tracking": [],
        "sweep": None,
        "loss": answers["job"]["last_metric"]["loss"],
    }
    jobs = restored_plane.http.get("/v1/jobs").json()
    assert {job["id"]: job.pop("loss") for job in jobs["items"]}[job_id] == answers["job"]["last_metric"]["loss"]
    assert jobs == answers["jobs"]
    for name in ("metrics", "plan"):
        assert restored_plane.http.get(f"/v1/jobs/{job_id}/{name}").json() == answers[name]
    (checkpoint,) = restored_plane.http.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"]
    assert checkpoint["fault"] is None
    assert checkpoint["name"] == answers["checkpoints"]["items"][0]["name"]
    assert [event.model_dump(mode="json") for event in restored_plane.events(job_id)] == answers["events"]


@pytest.mark.slow
def test_its_job_serves_texts(restored_plane: ControlPlane, answers: dict[str, Any]) -> None:
    path, body = f"/v1/jobs/{answers['job']['id']}/generate", {"prompt": "def f(", "max_tokens": 4}
    with restored_plane.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        events = [(message.event, json.loads(message.data)) for message in messages(answer.iter_bytes())]
    assert events[-1][0] == "end"
    assert "".join(data["text"] for kind, data in events if kind == "text")


@pytest.mark.slow
def test_a_new_job_trains_on_from_it(restored_plane: ControlPlane, answers: dict[str, Any]) -> None:
    spec = with_data(answers["job"]["spec"], restored_plane.folder)
    train = {**spec["train"], "num_steps": 6}
    start = {"job": answers["job"]["id"], "step": 4}
    answer = restored_plane.http.post("/v1/jobs", json={**spec, "name": "on", "train": train, "start_from": start})
    assert answer.status_code == 201, answer.text
    job = restored_plane.await_state(answer.json()["id"], "succeeded", "failed")
    assert (job["state"], job["step"]) == ("succeeded", 6), job["reason"]
    metrics = restored_plane.http.get(f"/v1/jobs/{job['id']}/metrics").json()["items"]
    assert [point["step"] for point in metrics] == [5, 6]
