"""Specs of documents for language models: their formats, names and weights, and which model takes them."""

from typing import Any

import pytest

from moe.spec import DocumentsSpec, JobSpec, PackagesSpec, SourceSpec, SpecError
from moe.spec.sequences import format_of
from tests.refusals import refused

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
def test_a_suffix_says_the_format(path: str, expected: str | None) -> None:
    assert format_of(path) == expected


def test_a_small_spec_is_small() -> None:
    packages, documents = (job({"corpus": "packages"}).data, job({"corpus": "documents", "sources": [SOURCE]}).data)
    assert isinstance(packages, PackagesSpec)
    assert isinstance(documents, DocumentsSpec)
    assert packages.max_tokens == documents.max_tokens == packages.padded_tokens == 512
    assert documents.held_out == 0.01
    (source,) = documents.sources
    assert (source.file_format, source.column, source.weight) == ("jsonl", "text", 1.0)
    assert documents.source_names == ("source-1",)


def test_the_format_that_is_written_counts() -> None:
    assert SourceSpec(paths=("/a/*",), format="text").file_format == "text"
    assert SourceSpec(paths=("/a/b.txt",), format="jsonl").file_format == "jsonl"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            {"paths": ["/a/*"]},
            "data.sources[0].format is required unless file names imply it; "
            "write jsonl, text or parquet, one per source",
        ),
        (
            {"paths": ["/a/b.txt", "/a/b.jsonl"]},
            "data.sources[0].format is required if paths imply several (jsonl, text)",
        ),
        ({**SOURCE, "weight": 0.0}, "data.sources[0].weight (=0.0) must be greater than or equal to 0.001; raise it"),
        ({**SOURCE, "weight": 1e-5}, "data.sources[0].weight (=1e-05) must be greater than or equal to 0.001"),
        ({**SOURCE, "name": "all"}, "data.sources[0].name (='all') is reserved for the total in reports"),
        (
            {"paths": ["/a.txt"], "column": "body"},
            "data.sources[0].column (='body') does not apply to text files, which are one document each",
        ),
        ({**SOURCE, "paths": []}, "data.sources[0].paths"),
        ({**SOURCE, "name": "../x"}, "data.sources[0].name (='../x')"),
        ({**SOURCE, "key": "text"}, "data.sources[0].key (='text') is not a known key"),
    ],
)
def test_mistakes_in_a_source(source: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as caught:
        job({"corpus": "documents", "sources": [source]})
    assert told in str(caught.value)


def test_two_sources_of_one_name() -> None:
    with refused("duplicate", "data.sources[1].name", "source-2"):
        job({"corpus": "documents", "sources": [{**SOURCE, "name": "source-2"}, SOURCE]})


@pytest.mark.parametrize(
    "data", [{"corpus": "packages"}, {"corpus": "documents", "sources": [SOURCE]}, {"corpus": "synthetic"}]
)
def test_documents_are_for_language_models(data: dict[str, Any]) -> None:
    data = {**data, "max_tokens": 512}
    job(data)
    with refused("not_applicable", "data.corpus"):
        job(data, {"preset": "gshard-tiny"})


def test_pairs_are_not() -> None:
    with refused("not_applicable", "data.corpus", "catalogs"):
        job({"corpus": "catalogs"})


def test_a_group_holds_whole_sequences() -> None:
    with refused("not_divisible", "train.batch_tokens", 2048):
        job({"corpus": "packages", "max_tokens": 500})
    assert job({"corpus": "packages"}).num_groups == 4
