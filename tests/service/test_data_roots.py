"""Users' corpora: a file allowed at the POST is checked again by the process that reads it."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moe.data.pairs import prepare
from service.wire.launch import Launch
from tests.interchange.test_chat_ends import ROW, base_folder
from tests.interchange.test_chat_ends import job as chat_job
from tests.interchange.test_jobs import mixtral
from tests.processes import await_that
from tests.refusals import expect_problem
from tests.service.control_plane import ControlPlane, spec
from tests.service.local_launcher import launches
from tests.unit.data_corpora import sentences, write_jsonl
from tests.unit.language_runs import documents


def _await_launch(plane: ControlPlane, job: dict[str, str]) -> Launch:
    storage = plane.job(job["id"])["storage"]
    await_that(lambda: launches(storage, 1) != [])
    return Launch.model_validate_json(launches(storage, 1)[0].read_bytes())


def test_a_file_swapped_for_a_link_after_the_post_is_not_read(own_plane: ControlPlane, tmp_path: Path) -> None:
    root, secret = tmp_path / "data", tmp_path / "secret.jsonl"
    root.mkdir()
    write_jsonl(secret, sentences(20))
    pairs_file = Path(write_jsonl(root / "mine.jsonl", sentences(20)))
    own_plane.start(data_roots=[str(root)])
    launch = _await_launch(own_plane, own_plane.post(data={"corpus": "jsonl", "paths": [str(pairs_file)]}))
    assert launch.data_roots == (str(root),)

    pairs_file.unlink()
    pairs_file.symlink_to(secret)
    with expect_problem("not_allowed", "data.paths[0]"):
        prepare(launch.spec.data, launch.spec.model, tmp_path / "cache", roots=launch.data_roots)


def test_a_repeated_post_is_known_whatever_its_folder_says_by_then(own_plane: ControlPlane, tmp_path: Path) -> None:
    folder = mixtral(tmp_path / "root" / "model", eos_token_id=7)
    plane = own_plane.start(data_roots=[str(tmp_path / "root")])
    job = {
        "name": "again", "data": documents(tmp_path / "root" / "data"), "model": {"from": str(folder)},
        "train": {"num_steps": 2, "batch_tokens": 1024}, "resources": {"num_workers": 1},
    }  # fmt: skip
    headers = {"idempotency-key": "once"}
    first = plane.http.post("/v1/jobs", json=job, headers=headers)
    assert first.status_code == 201, first.text
    for change in (lambda: (folder / "config.json").write_text("{}"), lambda: shutil.rmtree(folder)):
        change()
        repeat = plane.http.post("/v1/jobs", json=dict(reversed(job.items())), headers=headers)
        assert (repeat.status_code, repeat.json()["id"]) == (200, first.json()["id"])
    conflict = plane.http.post("/v1/jobs", json={**job, "name": "other"}, headers=headers)
    assert conflict.status_code == 409
    assert plane.http.post("/v1/jobs", json=job).json()["errors"][0]["rule"] == "does not exist"


@pytest.mark.slow
def test_a_post_of_answers_that_end_in_nothing_is_warned_of_in_its_log(own_plane: ControlPlane, tmp_path: Path) -> None:
    own_plane.start(data_roots=[str(tmp_path)])
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    for template, warns in ((source, True), (source.replace("{% endfor", "<|im_end|>{% endfor"), False)):
        folder = base_folder(tmp_path / f"hub-{warns}", template)
        job_id = own_plane.submit(chat_job(folder, [ROW], tmp_path / f"data-{warns}"))["id"]
        own_plane.act(job_id, "cancel")
        own_plane.await_state(job_id, "cancelled", "failed")
        log_lines = [event.data for event in own_plane.events(job_id) if event.kind == "log"]
        warnings = [line["message"] for line in log_lines if line.get("level") == "warning"]
        assert any("no learned text ends in a token that ends generation" in line for line in warnings) == warns


def test_without_roots_there_is_the_services_own_corpus_and_no_other(plane: ControlPlane) -> None:
    assert _await_launch(plane, plane.post()).data_roots == ()


def test_the_service_answers_while_a_pattern_of_many_stars_is_matched(own_plane: ControlPlane, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / ("a" * 60)).touch()
    own_plane.start(data_roots=[str(root)])
    data = {"corpus": "jsonl", "paths": [f"{root}/{'*a' * number}*b" for number in range(8, 40)]}
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(own_plane.http.post, "/v1/jobs", json=spec(data=data))
        while True:
            is_over = future.done()
            assert own_plane.http.get("/healthz").status_code == 200
            if is_over:
                break
    assert future.result().status_code == 422
    assert future.result().json()["errors"][0]["rule"] == "matches no file"
