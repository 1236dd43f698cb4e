"""Specs of documents for language models: their formats, names and weights, and which model takes them."""

from typing import Any

import pytest

from moe.spec import JobSpec, ProblemCode, SourceSpec
from moe.spec.data_files import format_of
from tests.refusals import expect_problem

LANGUAGE = {
    "kind": "language", "model_dim": 8, "num_layers": 1, "ffn_dim": 8, "vocab_size": 300,
    "attention": {"kind": "grouped_query", "num_heads": 1, "num_kv_heads": 1, "head_dim": 8},
}  # fmt: skip
SOURCE = {"paths": ["/data/a.jsonl"]}


def job(data: dict[str, Any], model: dict[str, Any] = LANGUAGE) -> JobSpec:
    return JobSpec.parse({"model": model, "data": data, "train": {"num_steps": 1, "batch_tokens": 2048}})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b.jsonl", "jsonl"), ("s3://bucket/*.jsonl.gz", "jsonl"), ("/a/b.PARQUET", "parquet"), ("/a/b.txt", "text"),
        ("/a/*", None), ("/a/b.csv", None), ("/a.jsonl/b", None), ("/a/.xz", None),
    ],
)  # fmt: skip
def test_a_suffix_implies_the_format(path: str, expected: str | None) -> None:
    assert format_of(path) == expected
    assert SourceSpec(paths=(path,), format="text").file_format == "text"


def test_a_small_spec_is_small() -> None:
    packages, documents = (job({"corpus": "packages"}).data, job({"corpus": "documents", "sources": [SOURCE]}).data)
    assert packages.max_tokens == documents.max_tokens == packages.padded_tokens == 512
    assert documents.held_out == 0.01
    (source,) = documents.sources
    assert (source.file_format, source.column, source.weight) == ("jsonl", "text", 1.0)
    assert documents.source_names == ("source-1",)


@pytest.mark.parametrize(
    ("source", "code", "path", "value"),
    [
        ({"paths": ["/a/*"]}, "missing", "format", None),
        ({"paths": ["/a/b.txt", "/a/b.jsonl"]}, "missing", "format", None),
        ({**SOURCE, "weight": 0.0}, "out_of_range", "weight", 0.0),
        ({**SOURCE, "weight": 1e-5}, "out_of_range", "weight", 1e-5),
        ({**SOURCE, "name": "all"}, "duplicate", "name", "all"),
        ({"paths": ["/a.txt"], "column": "body"}, "not_applicable", "column", "body"),
        ({**SOURCE, "paths": []}, "empty", "paths", []),
        ({**SOURCE, "name": "../x"}, "invalid_value", "name", "../x"),
        ({**SOURCE, "key": "text"}, "unknown_key", "key", "text"),
    ],
)
def test_a_wrong_source_is_refused(source: dict[str, Any], code: ProblemCode, path: str, value: Any) -> None:
    with expect_problem(code, f"data.sources[0].{path}", value):
        job({"corpus": "documents", "sources": [source]})


def test_two_sources_of_one_name() -> None:
    with expect_problem("duplicate", "data.sources[1].name", "source-2"):
        job({"corpus": "documents", "sources": [{**SOURCE, "name": "source-2"}, SOURCE]})


@pytest.mark.parametrize(
    "data", [{"corpus": "packages"}, {"corpus": "documents", "sources": [SOURCE]}, {"corpus": "synthetic"}]
)
def test_documents_are_for_language_models(data: dict[str, Any]) -> None:
    data = {**data, "max_tokens": 512}
    job(data)
    with expect_problem("not_applicable", "data.corpus"):
        job(data, {"preset": "gshard-tiny"})


def test_pairs_are_for_translation_models_and_groups_hold_whole_sequences() -> None:
    with expect_problem("not_applicable", "data.corpus", "catalogs"):
        job({"corpus": "catalogs"})
    with expect_problem("not_divisible", "train.batch_tokens", 2048):
        job({"corpus": "packages", "max_tokens": 500})
    assert job({"corpus": "packages"}).num_groups == 4


@pytest.mark.parametrize(
    ("stream", "code", "path", "value"),
    [
        ({"partitions": 5}, "out_of_range", "partitions", 5),
        ({"partitions": 2, "shuffle_bytes": 2 * 64 * 512 - 1}, "out_of_range", "shuffle_bytes", 2 * 64 * 512 - 1),
        ({"buffer": 7}, "unknown_key", "buffer", 7),
    ],
)
def test_a_wrong_stream_is_refused(stream: dict[str, Any], code: ProblemCode, path: str, value: Any) -> None:
    """A batch has four token groups."""
    with expect_problem(code, f"data.stream.{path}", value):
        job({"corpus": "documents", "sources": [SOURCE], "stream": stream})


def test_positions_of_a_stream_are_limited() -> None:
    sources = [{"paths": [f"/data/{index}.jsonl"]} for index in range(100)]
    data = {"corpus": "documents", "sources": sources, "max_tokens": 2}
    with expect_problem("too_large", "data.stream.partitions", 41):
        job({**data, "stream": {"partitions": 41}})
    spec = job({**data, "stream": {"partitions": 40}})
    assert spec.data.stream.window_bytes(2, 40) == (32 << 20) // 40


def test_a_stream_has_defaults_for_any_batch() -> None:
    spec = job({"corpus": "documents", "sources": [SOURCE], "stream": {}})
    assert (spec.data.stream.num_partitions(2), spec.data.stream.num_partitions(100)) == (2, 4)
    assert spec.data.stream.window_bytes(2**20, 4) == 64 * 2**20


@pytest.mark.parametrize(
    "data",
    [
        {"corpus": "packages"},
        {"corpus": "preference", "paths": ["/a.jsonl"]},
        {"corpus": "unpaired_preference", "paths": ["/a.jsonl"]},
    ],
    ids=str,
)
def test_only_documents_and_chats_are_streamed(data: dict[str, Any]) -> None:
    with expect_problem("not_applicable", "data.stream"):
        job({**data, "stream": {}})
