"""Text generation over HTTP by jobs' models: streamed, bounded, in a process that ends with its control plane."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moe.export.load import load_trained
from moe.records import Ending
from moe.spec.generation import GenerationSpec
from service.client import ApiError, Client
from service.client.sse import messages
from service.control.generation.generations import MAX_WAITING
from tests.processes import DEADLINE_S, await_that
from tests.service.checkpoints import commit
from tests.service.control_plane import TOKEN, ControlPlane
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import RequestAfter, run

PROMPT = "def test_"
LONG = 4000


@dataclass(frozen=True)
class TrainedModel:
    """A language model of a few steps."""

    data: Path
    storage: Path
    spec: dict[str, Any]

    @property
    def checkpoint(self) -> str:
        return str(next((self.storage / "checkpoints").glob("step-*3.a*[0-9]")))


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    folder = tmp_path_factory.mktemp("trained")
    spec = language_job(documents(folder / "data"))
    run(spec, folder / "storage", folder / "cache", control=RequestAfter("pause", 3))
    return TrainedModel(folder / "data", folder / "storage", spec.model_dump(mode="json"))


class Generation:
    """A control plane with a job that has the trained model's checkpoint."""

    def __init__(self, plane: ControlPlane, trained_model: TrainedModel, **settings: Any) -> None:
        self.plane = plane.start(data_roots=[str(trained_model.data)], **settings)
        self.job_id = self.plane.submit(trained_model.spec)["id"]
        storage = Path(self.plane.job(self.job_id)["storage"])
        shutil.copytree(trained_model.storage / "checkpoints", storage / "checkpoints", dirs_exist_ok=True)
        self.path = f"/v1/jobs/{self.job_id}/generate"

    def stream(self, prompt: str = PROMPT, **options: Any) -> Iterator[tuple[str, Any]]:
        """Events of one text, with their data."""
        with self.plane.http.stream("POST", self.path, json={"prompt": prompt, **options}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            for message in messages(answer.iter_bytes()):
                yield message.event, json.loads(message.data)

    def begin(self) -> tuple[Iterator[tuple[str, Any]], psutil.Process]:
        """Begin a long text; return its events and the process that generates it."""
        stream = self.stream(max_tokens=LONG)
        next(stream)
        (child,) = self.children()
        return stream, child

    def text(self, **options: Any) -> tuple[str, dict[str, Any]]:
        """All of one text, and how it ended."""
        *pieces, (last, ending) = self.stream(**options)
        assert last == "end", ending
        return "".join(data["text"] for _, data in pieces), ending

    def another_client(self, timeout: float | httpx.Timeout) -> httpx.Client:
        headers = self.plane.http.headers
        return httpx.Client(base_url=self.plane.url, timeout=timeout, trust_env=False, headers=headers)

    def children(self) -> list[psutil.Process]:
        processes = psutil.Process(self.plane.process.pid).children()
        return [child for child in processes if _generates(child)]


def _generates(process: psutil.Process) -> bool:
    try:
        return "service.generator.child" in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory, trained_model: TrainedModel) -> Iterator[Generation]:
    plane = ControlPlane(tmp_path_factory.mktemp("generating"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDYARD_TOKEN", TOKEN)
        plane.http.headers["authorization"] = f"Bearer {TOKEN}"
        generation = Generation(plane, trained_model)
    yield generation
    plane.close()


def test_a_text_is_what_the_model_makes_of_it(generation: Generation, trained_model: TrainedModel) -> None:
    model = load_trained(trained_model.checkpoint)
    for options in ({}, {"temperature": 0.9, "top_k": 40, "seed": 4}, {"num_beams": 3}):
        spec = GenerationSpec(max_tokens=20, **options)
        text, ending = generation.text(max_tokens=20, **options)
        assert [text] == model.generate([PROMPT], spec)
        assert ending["reason"] in ("end", "max_tokens")
        assert ending["num_tokens"] <= 20
    stop = text[2:4]
    cut, ending = generation.text(max_tokens=20, num_beams=3, stop=[stop])
    assert (cut, ending["reason"]) == (text[: text.index(stop)], "stop")


def test_the_models_own_settings_apply_where_the_request_has_none(
    generation: Generation, trained_model: TrainedModel
) -> None:
    job = generation.plane.submit(trained_model.spec)
    shutil.copytree(trained_model.storage / "checkpoints", f"{job['storage']}/checkpoints", dirs_exist_ok=True)
    (checkpoint,) = Path(job["storage"]).glob("checkpoints/step-*3.a*[0-9]")
    config = {"do_sample": True, "top_k": 9, "max_new_tokens": 7}
    (checkpoint / "tokenizers" / "generation_config.json").write_text(json.dumps(config))
    own_generation = copy(generation)
    own_generation.path = f"/v1/jobs/{job['id']}/generate"
    text, ending = own_generation.text(max_tokens=9, seed=4, log_probs=True)
    spec = GenerationSpec(max_tokens=9, temperature=1, top_k=9, seed=4)
    assert [text] == load_trained(trained_model.checkpoint).generate([PROMPT], spec)
    assert ["max_new_tokens (=7)" in note for note in ending["notes"]] == [True]
    tokens = Ending.read(ending).tokens
    assert tokens is not None
    assert len(tokens) == ending["num_tokens"]
    assert max(token.log_prob for token in tokens) < 0
    answer = generation.plane.http.post(own_generation.path, json={"prompt": "x", "temperature": 0, "top_k": 3})
    assert [error["path"] for error in answer.json()["errors"]] == ["top_k"]


def test_it_comes_as_it_is_made_by_one_process_for_all(generation: Generation) -> None:
    stream, child = generation.begin()
    assert [next(stream)[0] for _ in range(2)] == ["text"] * 2
    stream.close()  # its reader is gone: the next request runs at once, and the model is still loaded
    began = time.monotonic()
    generation.text(max_tokens=3)
    assert time.monotonic() - began < 20
    assert generation.children() == [child]
    assert generation.plane.http.get("/v1/jobs", headers={"authorization": ""}).status_code == 401
    assert not any(name.startswith("SHARDYARD_") for name in child.environ()), "it has none of the service's secrets"


def test_the_client_hands_on_pieces_and_how_it_ended(generation: Generation) -> None:
    with Client(generation.plane.url, token=TOKEN) as client:
        job = client.job(generation.job_id)
        pieces, stream = list[str](), job.generate(PROMPT, max_tokens=8)
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as stop:
                ending = stop.value
                break
        assert isinstance(ending, Ending)
        assert ("".join(pieces), ending.to_plain()) == generation.text(max_tokens=8)
        with pytest.raises(ApiError, match="temperature") as error:
            list(job.generate(PROMPT, temperature=-1.0))
        assert error.value.status == 422


def test_what_cannot_be_asked_is_refused_with_its_place(generation: Generation) -> None:
    for body, path in (
        ({}, "prompt"), ({"prompt": 3}, "prompt"), ({"prompt": "x y z " * 200}, "prompt"), ([1], "prompt"),
        ({"prompt": "x", "max_tokens": 4097}, "max_tokens"), ({"prompt": "x", "max_token": 4}, "max_token"),
        ({"prompt": "x", "top_p": 0.5}, "top_p"),
    ):  # fmt: skip
        answer = generation.plane.http.post(generation.path, json=body)
        assert answer.status_code == 422
        assert [error["path"] for error in answer.json()["errors"]] == [path]


@pytest.mark.slow
def test_jobs_that_cannot_generate(generation: Generation, trained_model: TrainedModel) -> None:
    def refusal(job_id: str) -> tuple[int, str]:
        answer = generation.plane.http.post(f"/v1/jobs/{job_id}/generate", json={"prompt": "x"})
        return answer.status_code, answer.json()["detail"]

    translates = generation.plane.post()
    commit(translates["storage"], 3)
    status, detail = refusal(translates["id"])
    assert (status, f"use 'shardyard translate {translates['id']} TEXT'" in detail) == (422, True)
    job = generation.plane.submit(trained_model.spec)
    status, detail = refusal(job["id"])
    assert (status, "has no committed checkpoint to generate with yet" in detail) == (409, True)
    commit(job["storage"], 3, spec=trained_model.spec)
    status, detail = refusal(job["id"])
    assert (status, f"the model of {job['id']} cannot be loaded" in detail) == (409, True)
    assert refusal("job-aaaaaaaaaaaa")[0] == 404


@pytest.mark.slow
def test_a_new_checkpoint_is_loaded_in_place_of_the_old(generation: Generation, trained_model: TrainedModel) -> None:
    generation.text(max_tokens=2)
    (before,) = generation.children()
    storage = Path(generation.plane.job(generation.job_id)["storage"])
    name = commit(storage, 9)  # newer, but not a model's: the one before it is used
    generation.text(max_tokens=2)
    (after,) = generation.children()
    assert after.pid != before.pid
    for left in storage.glob(f"checkpoints/{name}*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


@pytest.mark.slow
def test_requests_take_turns(generation: Generation) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda seed: generation.text(max_tokens=9, temperature=1.0, seed=seed), [1, 2, 1, 2]))
    assert texts[:2] == texts[2:]
    assert len(generation.children()) == 1


def test_whose_turn_does_not_come_is_told_to_try_again(generation: Generation) -> None:
    first, _ = generation.begin()

    def wait(_: int) -> int:
        with generation.another_client(DEADLINE_S) as client:
            return client.post(generation.path, json={"prompt": PROMPT, "max_tokens": 1}).status_code

    with ThreadPoolExecutor(MAX_WAITING + 1) as pool:
        futures = [pool.submit(wait, number) for number in range(MAX_WAITING + 1)]
        await_that(lambda: sum(future.done() for future in futures) == 1)
        answer = generation.plane.http.post(generation.path, json={"prompt": PROMPT})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        first.close()
        assert sorted(future.result() for future in futures) == [200] * MAX_WAITING + [503]


@pytest.mark.slow
def test_clients_that_have_gone_wait_no_more(generation: Generation) -> None:
    """More clients than may wait, one after another; none is refused for a full queue."""
    first, _ = generation.begin()
    for _ in range(MAX_WAITING + 2):
        with generation.another_client(httpx.Timeout(5, read=0.5)) as client, pytest.raises(httpx.ReadTimeout):
            client.post(generation.path, json={"prompt": PROMPT, "max_tokens": LONG})
    first.close()
    assert generation.text(max_tokens=2)[1]["num_tokens"] == 2


@pytest.mark.slow
def test_a_process_that_is_killed_costs_its_text_alone(generation: Generation) -> None:
    stream, child = generation.begin()
    child.kill()
    *_, (last, problem) = stream
    assert (last, problem["status"], problem["type"]) == ("error", 503, "urn:shardyard:problem:unavailable")
    assert "ended (signal SIGKILL)" in problem["detail"]
    assert generation.text(max_tokens=2)[1]["num_tokens"] == 2


def test_the_document_says_what_may_be_asked_and_what_comes(generation: Generation) -> None:
    document = generation.plane.http.get("/openapi.json").json()
    operation = document["paths"]["/v1/jobs/{job_id}/generate"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["prompt"]
    assert set(schema["properties"]) == {"prompt", *GenerationSpec.model_fields}
    assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert {"404", "409", "410", "422", "503"} <= set(operation["responses"])


@pytest.mark.slow
def test_bounds_in_time_and_an_idle_model_is_unloaded(own_plane: ControlPlane, trained_model: TrainedModel) -> None:
    bounds = {"generation_timeout_s": 1.0, "generation_idle_s": 1.5, "generation_max_tokens": 200_000}
    generation = Generation(own_plane, trained_model, **bounds)
    *pieces, (last, problem) = generation.stream(max_tokens=200_000)
    assert (last, "exceeded its time limit of 1 s" in problem["detail"]) == ("error", True)
    assert {name for name, _ in pieces} == {"text"}
    (child,) = generation.children()
    assert generation.text(max_tokens=1)[1]["num_tokens"] == 1
    assert generation.children() == [child]
    await_that(lambda: not generation.children())
    assert generation.text(max_tokens=1)[1]["num_tokens"] == 1


@pytest.mark.slow
def test_a_model_that_takes_too_much_memory_is_told_so(own_plane: ControlPlane, trained_model: TrainedModel) -> None:
    generation = Generation(own_plane, trained_model, generation_memory_bytes=2 << 30, generation_max_tokens=1 << 20)
    ((last, problem),) = generation.stream(max_tokens=1 << 20, num_beams=64)
    assert last == "error"
    assert "generation needs more memory than allowed (=2,147,483,648 bytes)" in problem["detail"]
    assert generation.text(max_tokens=2)[1]["num_tokens"] == 2


@pytest.mark.slow
def test_a_control_plane_that_stops_ends_the_text_and_the_process(
    own_plane: ControlPlane, trained_model: TrainedModel
) -> None:
    stream, child = Generation(own_plane, trained_model).begin()
    stopper = threading.Thread(target=own_plane.terminate)
    stopper.start()
    *_, (last, problem) = stream
    assert (last, problem["detail"]) == ("error", "this service is stopping")
    stopper.join()
    assert not child.is_running()


@pytest.mark.slow
def test_a_control_plane_that_is_killed_leaves_no_process(own_plane: ControlPlane, trained_model: TrainedModel) -> None:
    stream, child = Generation(own_plane, trained_model).begin()
    own_plane.kill()
    with pytest.raises(httpx.TransportError):
        list(stream)
    await_that(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
