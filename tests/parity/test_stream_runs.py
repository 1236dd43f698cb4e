"""Runs on a stream under several layouts: the batches of one process, also after resuming on other ranks, and a fault
of one rank's files raised on all."""

import json
import os
import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe.interchange.expand import expand
from moe.spec import JobSpec, SpecError
from tests.interchange.test_chat_jobs import chat_folder
from tests.parity.gloo_ranks import Pools
from tests.parity.test_checkpoint_ranks import assert_same_course, run_course
from tests.unit import chats
from tests.unit.language_runs import language_job
from tests.unit.streams import texts_of, write_shards

MODEL = {
    "model_dim": 16, "num_layers": 1, "ffn_dim": 16,
    "moe": {"num_experts": 4, "hidden_dim": 8, "router": "softmax_topk", "top_k": 2, "group_tokens": 32},
}  # fmt: skip


def stream_spec(
    folder: Path,
    workers: int = 1,
    parallel: dict[str, int] | None = None,
    num_shards: tuple[int, int] = (5, 2),
    num_documents: int = 80,
    num_steps: int = 30,
    **stream: Any,
) -> JobSpec:
    """Eight token groups of a sequence, in windows of about 16 sequences, from shards of two sources."""
    sources = [
        {
            "name": name,
            "paths": [write_shards(folder / "data", name, [texts_of(f"{name}{i}", num_documents) for i in range(n)])],
        }
        for name, n in zip("ab", num_shards, strict=True)
    ]
    stream = {"shuffle_bytes": 4 * 64 * 32, **stream}
    data = {"corpus": "documents", "max_tokens": 32, "held_out": 0.1, "sources": sources, "stream": stream}
    return language_job(
        data, num_steps=num_steps, workers=workers, parallel=parallel or {}, model=MODEL,
        train={"dtype": "float64", "evaluation": {"num_examples": 0, "max_sequences": 4}},
        checkpoint={"every_steps": 7, "keep": 2},
    )  # fmt: skip


def assert_same_stream(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert_same_course(actual, expected)
    for name in ("step", "tokens", "source_tokens"):
        assert [record[name] for record in actual] == [record[name] for record in expected]


@pytest.mark.slow
def test_two_ranks_read_what_one_does_and_one_goes_on_where_they_stop(ranks: Pools, tmp_path: Path) -> None:
    spec, sharded_spec = stream_spec(tmp_path, num_steps=11), stream_spec(tmp_path, 2, {"expert": 2}, num_steps=11)
    cache = tmp_path / "cache"
    _, expected, *_ = run_course(spec, f"{tmp_path}/one", cache)
    _, first, *_ = ranks[2].run(run_course, sharded_spec, f"{tmp_path}/many", cache, 0, 6)[0]
    _, rest, *_ = run_course(spec, f"{tmp_path}/many", cache, 1)
    assert_same_stream(first + rest, expected)
    assert not list((cache / "streams").iterdir())


def course_or_problems(spec: JobSpec, storage: str, cache: Path) -> tuple[Any, list[str]]:
    """(problems or course of a run, command lines of this process's children afterwards)"""
    try:
        result: Any = run_course(spec, storage, cache)
    except SpecError as error:
        result = [(problem.code, problem.path, problem.value) for problem in error.problems]
    return result, [" ".join(child.cmdline()) for child in psutil.Process(os.getpid()).children()]


@pytest.mark.slow
def test_a_fault_of_one_rank_is_raised_on_all(ranks: Pools, tmp_path: Path) -> None:
    spec = stream_spec(tmp_path, 2, {"expert": 2}, num_shards=(9, 2), num_documents=6)
    path = tmp_path / "data" / "a-008.jsonl"  # which preparing, with the beginnings of eight files, does not read
    path.with_suffix(".jsonl.gz").unlink()
    path.write_text("\n".join([*(json.dumps({"text": text}) for text in texts_of("a8", 5)), "{broken"]))
    data = spec.data.model_dump(mode="json")
    data["sources"][0]["paths"].append(str(path))
    spec = JobSpec.parse({**spec.model_dump(mode="json"), "data": data})
    results = ranks[2].run(course_or_problems, spec, f"{tmp_path}/storage", tmp_path / "cache")
    for problems, children in results:
        assert problems == [("invalid_syntax", "data.sources[0].paths[1]", f"{path}, line 6")]
        assert not any("stream" in child for child in children)


LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (2, {"tensor": 2, "expert": 1}),
    (2, {"fsdp": 2, "expert": 2}),
    (4, {"expert": 4}),
    (4, {"expert": 2, "tensor": 2, "fsdp": 2, "expert_fsdp": 2}),
    (8, {"expert": 2, "fsdp": 4}),
    (4, {"expert": 2, "context": 2, "fsdp": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "parallel"), LAYOUTS, ids=str)
def test_layouts_and_stops_do_not_change_the_stream(
    ranks: Pools, tmp_path: Path, workers: int, parallel: dict[str, int]
) -> None:
    """Stopped twice, at random steps; the middle part on one process."""
    draws = random.Random(str(parallel))
    stops = draws.randint(2, 14), draws.randint(2, 14)
    partitions = draws.choice([1, 3, 8])
    spec, cache = stream_spec(tmp_path, partitions=partitions, shuffle_bytes=8 * 64 * 32), tmp_path / "cache"
    sharded_spec = stream_spec(tmp_path, workers, parallel, partitions=partitions, shuffle_bytes=8 * 64 * 32)
    _, expected, *_ = run_course(spec, f"{tmp_path}/one", cache)
    _, first, *_ = ranks[workers].run(run_course, sharded_spec, f"{tmp_path}/many", cache, 0, stops[0])[0]
    _, second, *_ = run_course(spec, f"{tmp_path}/many", cache, 1, stops[1])
    _, rest, *_ = ranks[workers].run(run_course, sharded_spec, f"{tmp_path}/many", cache, 2)[0]
    assert_same_stream(first + second + rest, expected)


def chat_spec(folder: Path, workers: int = 1, parallel: dict[str, int] | None = None) -> JobSpec:
    """A job on streamed conversations, with documents beside them."""
    draws, data = random.Random(0), folder / "data"
    data.mkdir(exist_ok=True)
    rows = [chats.conversation(draws, chats.STRUCTURES["llama"]) for _ in range(60)]
    (data / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of("t", 60)))
    sources = [
        {"paths": [f"{data}/chats.jsonl"]},
        {"paths": [f"{data}/texts.jsonl"], "corpus": "documents", "weight": 2.0},
    ]
    fields = {
        "model": {"from": str(folder / "hub"), "moe": {"group_tokens": 128}},
        "data": {
            "corpus": "chat", "sources": sources, "max_tokens": 128, "held_out": 0.1, "date": "2026-03-09",
            "stream": {"shuffle_bytes": 4 * 64 * 128},
        },
        "train": {"num_steps": 9, "batch_tokens": 512, "dtype": "float64",
                  "evaluation": {"num_examples": 0, "max_sequences": 4}},
        "resources": {"num_workers": workers}, "parallel": parallel or {}, "checkpoint": {"every_steps": 4, "keep": 2},
    }  # fmt: skip
    return JobSpec.parse(expand(fields, None))


@pytest.mark.slow
def test_two_ranks_read_the_conversations_that_one_does(ranks: Pools, tmp_path: Path) -> None:
    chat_folder(tmp_path / "hub")
    spec, sharded_spec = chat_spec(tmp_path), chat_spec(tmp_path, 2, {"expert": 2})
    cache = tmp_path / "cache"
    _, expected, *_ = run_course(spec, f"{tmp_path}/one", cache)
    _, first, *_ = ranks[2].run(run_course, sharded_spec, f"{tmp_path}/many", cache, 0, 5)[0]
    _, rest, *_ = run_course(spec, f"{tmp_path}/many", cache, 1)
    assert_same_stream(first + rest, expected)
