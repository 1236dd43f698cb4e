"""Runs on mixtures of conversations and documents under several layouts: the same course, also after a stop on other
ranks, and the same report of each source."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from moe.spec import JobSpec
from tests.interchange.test_chat_jobs import chat_job
from tests.parity.gloo_ranks import Pools
from tests.parity.test_checkpoint_ranks import assert_same_course, run_course
from tests.unit import chats


def write_sources(folder: Path, corpus: str) -> list[dict[str, Any]]:
    """Three sources of the chat corpus, one of them documents, or two of preference pairs."""
    folder.mkdir()
    rng = random.Random(corpus)
    sources = []
    for name, weight in (("big", 0.5), ("small", 3.0)):
        rows = [chats.conversation(rng, chats.STRUCTURES["llama"]) for _ in range(40)]
        if corpus == "preference":
            rows = [{"prompt": row["messages"][:-1], "chosen": row["messages"][-1:], "rejected": "no"} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append({"name": name, "weight": weight, "paths": [f"{folder}/{name}.jsonl"]})
    if corpus == "preference":
        return sources
    rows = [{"text": " ".join(chats.some_text(rng) for _ in range(20))} for _ in range(40)]
    (folder / "web.json").write_text(json.dumps(rows))
    return [*sources, {"name": "web", "corpus": "documents", "paths": [f"{folder}/web.json"]}]


def mixture_spec(
    folder: Path,
    sources: list[dict[str, Any]],
    corpus: str,
    packing: str | None,
    workers: int,
    parallel: dict[str, int],
) -> JobSpec:
    data: dict[str, Any] = {"corpus": corpus, "sources": sources, "max_tokens": 256, "held_out": 0.2, "paths": None}
    if packing is not None:
        data["packing"] = packing
    if packing == "together":
        data["sources"] = [{**source, "weight": 1.0} for source in sources]
    train = {
        "batch_tokens": 2048,
        "num_steps": 6,
        "dtype": "float64",
        "evaluation": {"every_steps": 3, "num_examples": 1},
    }
    parts = {"model": {"moe": {"group_tokens": 256}}, "resources": {"num_workers": workers}, "parallel": parallel}
    return JobSpec.parse(chat_job(folder / "hub", data=data, train=train, checkpoint={"every_steps": 2}, **parts))


CASES: list[Any] = [
    ("chat", "by_source", 2, {"expert": 2}),
    ("chat", "together", 2, {"tensor": 2, "expert": 1}),
    ("chat", "none", 2, {"fsdp": 2, "expert": 1}),
    ("chat", "by_source", 4, {"expert": 2, "fsdp": 2}),
    ("preference", None, 2, {"expert": 2}),
    ("preference", None, 2, {"context": 2, "fsdp": 2, "expert": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("corpus", "packing", "workers", "parallel"), CASES, ids=str)
def test_layouts_and_stops_do_not_change_a_mixture(
    ranks: Pools, tmp_path: Path, corpus: str, packing: str | None, workers: int, parallel: dict[str, int]
) -> None:
    sources, cache = write_sources(tmp_path / "data", corpus), tmp_path / "cache"
    spec = mixture_spec(tmp_path, sources, corpus, packing, 1, {})
    sharded_spec = mixture_spec(tmp_path, sources, corpus, packing, workers, parallel)
    _, expected, _, _, expected_report = run_course(spec, f"{tmp_path}/one", cache)
    _, first, *_ = ranks[workers].run(run_course, sharded_spec, f"{tmp_path}/many", cache, 0, 3)[0]
    _, rest, _, _, report = run_course(spec, f"{tmp_path}/many", cache, 1)
    assert_same_course(first + rest, expected)
    for name in ("num_targets", "num_tokens"):
        assert [record.get(name) for record in first + rest] == [record.get(name) for record in expected]
    names = [source["name"] for source in sources]
    assert list(expected_report["sources"]) == [*names, "all"]
    for name in names:
        assert report["sources"][name]["loss"] == pytest.approx(expected_report["sources"][name]["loss"], rel=1e-9)
        assert expected_report["sources"][name]["num_tokens"] > 0
    assert set(expected[2]["held_out"]) == set(names)
    roles = ("system", "user", "assistant", "no role")
    assert expected[2]["label_loads"]["labels"] == [
        label for name in names for label in ([name] if name == "web" else [f"{name}: {role}" for role in roles])
    ]
    assert {completion["source"] for completion in expected_report["completions"]} <= set(names)
