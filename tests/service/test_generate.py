"""Texts by jobs' language models over HTTP: streamed, bounded, by a process that goes with its control plane."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from tests.service.control_plane import ControlPlane
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import RequestAfter, run

PROMPT = "def test_"
LONG = {"prompt": PROMPT, "max_tokens": 4000}
"""Takes many seconds."""


@dataclass(frozen=True)
class Trained:
    """A language model of a few steps."""

    data: Path
    storage: Path
    spec: dict[str, Any]

    @property
    def checkpoint(self) -> str:
        return str(next((self.storage / "checkpoints").glob("step-*3.a*[0-9]")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    spec = language_job(documents(folder / "data"))
    run(spec, folder / "storage", folder / "cache", control=RequestAfter("pause", 3))
    return Trained(folder / "data", folder / "storage", spec.model_dump(mode="json"))


class Generating:
    """A control plane with a job that has the trained model's checkpoint."""

    def __init__(self, folder: Path, trained: Trained, **settings: Any) -> None:
        self.plane = ControlPlane(folder, data_roots=[str(trained.data)], **settings).start()
        self.job_id = self.post(trained)
        storage = Path(self.plane.job(self.job_id)["storage"])
        shutil.copytree(trained.storage / "checkpoints", storage / "checkpoints", dirs_exist_ok=True)
        self.path = f"/v1/jobs/{self.job_id}/generate"

    def post(self, trained: Trained) -> str:
        answer = self.plane.http.post("/v1/jobs", json=trained.spec)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def stream(self, **asked: Any) -> Iterator[tuple[str, Any]]:
        """Events of one text, with their data."""
        with self.plane.http.stream("POST", self.path, json=asked) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            for message in messages(answer.iter_bytes()):
                yield message.event, json.loads(message.data)

    def text(self, **asked: Any) -> tuple[str, dict[str, Any]]:
        """All of one text, and how it ended."""
        *pieces, (last, ending) = self.stream(**asked)
        assert last == "end", ending
        return "".join(data["text"] for _, data in pieces), ending

    def children(self) -> list[psutil.Process]:
        assert self.plane.process is not None
        started = psutil.Process(self.plane.process.pid).children()
        return [each for each in started if _generates(each)]


def _generates(process: psutil.Process) -> bool:
    try:
        return "service.generator.child" in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory, trained: Trained) -> Iterator[Generating]:
    found = Generating(tmp_path_factory.mktemp("plane"), trained)
    yield found
    found.plane.close()


def test_a_text_is_what_the_model_makes_of_it(generating: Generating, trained: Trained) -> None:
    model = load_trained(trained.checkpoint)
    for options in ({}, {"temperature": 0.9, "top_k": 40, "seed": 4}, {"num_beams": 3}):
        spec = GenerationSpec(max_tokens=20, **options)
        text, ending = generating.text(prompt=PROMPT, max_tokens=20, **options)
        assert [text] == model.generate([PROMPT], spec)
        assert ending["reason"] in ("end", "max_tokens")
        assert ending["num_tokens"] <= 20
    stop = text[2:4]
    cut, ending = generating.text(prompt=PROMPT, max_tokens=20, num_beams=3, stop=[stop])
    assert (cut, ending["reason"]) == (text[: text.index(stop)], "stop")


def test_it_comes_as_it_is_made_by_one_process_for_all(generating: Generating) -> None:
    streamed = generating.stream(**LONG)
    assert [next(streamed)[0] for _ in range(3)] == ["text"] * 3
    (child,) = generating.children()
    streamed.close()  # whoever read it has gone: the next one's turn comes at once, and the model is still loaded
    began = time.monotonic()
    generating.text(prompt=PROMPT, max_tokens=3)
    assert time.monotonic() - began < 20
    assert generating.children() == [child]


def test_the_client_hands_on_pieces_and_how_it_ended(generating: Generating) -> None:
    with Client(generating.plane.url) as client:
        job = client.job(generating.job_id)
        pieces, making = list[str](), job.generate(PROMPT, max_tokens=8)
        while True:
            try:
                pieces.append(next(making))
            except StopIteration as over:
                ending = over.value
                break
        assert isinstance(ending, Ending)
        text, told = generating.text(prompt=PROMPT, max_tokens=8)
        assert ("".join(pieces), ending.to_plain()) == (text, told)
        with pytest.raises(ApiError, match="temperature") as error:
            list(job.generate(PROMPT, temperature=-1.0))
        assert error.value.status == 422


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "prompt"), ({"prompt": 3}, "prompt"),
        ({"prompt": "x", "max_tokens": 4097}, "max_tokens"), ({"prompt": "x", "max_token": 4}, "max_token"),
        ({"prompt": "x", "top_p": 0.5}, "top_p"), ({"prompt": "x y z " * 200}, "prompt"), ([1], "prompt"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_with_its_place(generating: Generating, body: Any, path: str) -> None:
    answer = generating.plane.http.post(
        generating.path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 422
    assert [each["path"] for each in answer.json()["errors"]] == [path]


def test_a_job_of_another_kind_is_told_its_command(generating: Generating) -> None:
    job = generating.plane.post()
    commit(job["storage"], 3)
    answer = generating.plane.http.post(f"/v1/jobs/{job['id']}/generate", json={"prompt": "x"})
    assert answer.status_code == 422
    assert answer.json()["detail"] == (
        f"{job['id']} is a translation model, which does not generate; use 'shardyard translate {job['id']} TEXT'"
    )


def test_a_job_without_a_checkpoint_that_can_be_loaded_is_409(generating: Generating, trained: Trained) -> None:
    job_id = generating.post(trained)
    path = f"/v1/jobs/{job_id}/generate"
    answer = generating.plane.http.post(path, json={"prompt": "x"})
    if answer.status_code != 409 or "has no committed checkpoint to generate with yet" not in answer.json()["detail"]:
        pytest.fail(answer.text)
    commit(generating.plane.job(job_id)["storage"], 3, spec=trained.spec)
    answer = generating.plane.http.post(path, json={"prompt": "x"})
    assert answer.status_code == 409
    assert f"the model of {job_id} cannot be loaded" in answer.json()["detail"]
    assert generating.plane.http.post("/v1/jobs/job-aaaaaaaaaaaa/generate", json={"prompt": "x"}).status_code == 404


@pytest.mark.slow
def test_a_new_checkpoint_is_loaded_in_place_of_the_old(generating: Generating, trained: Trained) -> None:
    generating.text(prompt=PROMPT, max_tokens=2)
    (before,) = generating.children()
    storage = Path(generating.plane.job(generating.job_id)["storage"])
    torn = commit(storage, 9)  # newer, and no model's: the one before it is taken
    generating.text(prompt=PROMPT, max_tokens=2)
    (after,) = generating.children()
    assert after.pid != before.pid
    for left in storage.glob(f"checkpoints/{torn}*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def test_requests_take_turns(generating: Generating) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda seed: generating.text(prompt=PROMPT, max_tokens=9, temperature=1.0, seed=seed),
                              [1, 2, 1, 2]))  # fmt: skip
    assert texts[:2] == texts[2:]
    assert len(generating.children()) == 1


def test_whose_turn_does_not_come_is_told_to_try_again(generating: Generating) -> None:
    first, leave = generating.stream(**LONG), threading.Event()
    next(first)

    def wait(_: int) -> int:
        with httpx.Client(base_url=generating.plane.url, timeout=DEADLINE_S, trust_env=False) as own:
            return own.post(generating.path, json={"prompt": PROMPT, "max_tokens": 1}).status_code

    with ThreadPoolExecutor(MAX_WAITING + 1) as pool:
        waiting = [pool.submit(wait, number) for number in range(MAX_WAITING + 1)]
        await_that(lambda: sum(each.done() for each in waiting) == 1)
        answer = generating.plane.http.post(generating.path, json={"prompt": PROMPT})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        leave.set()
        first.close()
        assert sorted(each.result() for each in waiting) == [200] * MAX_WAITING + [503]


def test_clients_that_have_gone_wait_no_more(generating: Generating) -> None:
    """More clients than may wait, one after another: none is told that too many do."""
    first = generating.stream(**LONG)
    next(first)
    for _ in range(MAX_WAITING + 2):
        with (
            httpx.Client(base_url=generating.plane.url, timeout=httpx.Timeout(5, read=0.5), trust_env=False) as gone,
            pytest.raises(httpx.ReadTimeout),
        ):
            gone.post(generating.path, json=LONG)
    first.close()
    assert generating.text(prompt=PROMPT, max_tokens=2)[1]["num_tokens"] == 2


def test_a_process_that_is_killed_costs_its_text_alone(generating: Generating) -> None:
    streamed = generating.stream(**LONG)
    next(streamed)
    (child,) = generating.children()
    child.kill()
    *_, (last, problem) = streamed
    assert (last, problem["status"], problem["type"]) == ("error", 503, "urn:shardyard:problem:unavailable")
    assert "ended (signal SIGKILL)" in problem["detail"]
    assert generating.text(prompt=PROMPT, max_tokens=2)[1]["num_tokens"] == 2


def test_the_document_says_what_may_be_asked_and_what_comes(generating: Generating) -> None:
    document = generating.plane.http.get("/openapi.json").json()
    operation = document["paths"]["/v1/jobs/{job_id}/generate"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["prompt"]
    assert set(schema["properties"]) == {"prompt", *GenerationSpec.model_fields}
    assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert {"404", "409", "410", "422", "503"} <= set(operation["responses"])


@pytest.mark.slow
def test_bounds_in_time_and_an_idle_model_is_unloaded(tmp_path: Path, trained: Trained) -> None:
    generating = Generating(
        tmp_path, trained, generation_timeout_s=1.0, generation_idle_s=1.5, generation_max_tokens=200_000
    )
    try:
        events = list(generating.stream(prompt=PROMPT, max_tokens=200_000))
        assert events[-1][0] == "error"
        assert "generation exceeded its time limit of 1 s" in events[-1][1]["detail"]
        assert {name for name, _ in events[:-1]} == {"text"}
        (child,) = generating.children()
        assert generating.text(prompt=PROMPT, max_tokens=1)[1]["num_tokens"] == 1
        assert generating.children() == [child]
        await_that(lambda: not generating.children())
        assert generating.text(prompt=PROMPT, max_tokens=1)[1]["num_tokens"] == 1
    finally:
        generating.plane.close()


@pytest.mark.slow
def test_a_model_that_takes_too_much_memory_is_told_so(tmp_path: Path, trained: Trained) -> None:
    generating = Generating(tmp_path, trained, generation_memory_bytes=2 << 30, generation_max_tokens=1 << 20)
    try:
        ((last, problem),) = generating.stream(prompt=PROMPT, max_tokens=1 << 20, num_beams=64)
        assert last == "error"
        assert "generation needs more memory than allowed (=2,147,483,648 bytes)" in problem["detail"]
        assert generating.text(prompt=PROMPT, max_tokens=2)[1]["num_tokens"] == 2
    finally:
        generating.plane.close()


@pytest.mark.slow
def test_a_control_plane_that_stops_ends_the_text_and_the_process(tmp_path: Path, trained: Trained) -> None:
    generating = Generating(tmp_path, trained)
    streamed = generating.stream(**LONG)
    next(streamed)
    (child,) = generating.children()
    stopping = threading.Thread(target=generating.plane.terminate)
    stopping.start()
    *_, (last, problem) = streamed
    assert (last, problem["detail"]) == ("error", "this service is stopping")
    stopping.join()
    assert not child.is_running()
    generating.plane.close()


def test_a_control_plane_that_is_killed_leaves_no_process(tmp_path: Path, trained: Trained) -> None:
    generating = Generating(tmp_path, trained)
    streamed = generating.stream(**LONG)
    next(streamed)
    (child,) = generating.children()
    generating.plane.kill()
    with pytest.raises(httpx.TransportError):
        list(streamed)
    await_that(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    generating.plane.close()
