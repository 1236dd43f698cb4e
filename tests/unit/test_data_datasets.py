"""Datasets as the library `datasets` saves them, and as repositories of datasets hold them: written by `datasets`."""

import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pyarrow
import pytest

from moe.data.sequences import check
from moe.data.sequences.corpora import build
from moe.spec import DocumentsSpec, JsonlSpec, ProblemCode, SpecError
from tests.grid import num_cases
from tests.refusals import expect_problem
from tests.unit.chats import ANSWER, USER
from tests.unit.test_data_same_records import ROWS, records_of

datasets.disable_progress_bars()
TEXTS = [{"text": f"text {number}"} for number in range(10)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")


def documents_of(folder: Path, split: str | None = None) -> DocumentsSpec:
    return DocumentsSpec(corpus="documents", sources=({"dataset": str(folder), "split": split},), held_out=0.0)


def documents(folder: Path, split: str | None = None) -> list[str]:
    """Texts of a dataset."""
    data = documents_of(folder, split)
    return [document.text for document in build(data, [str(folder.parent)]).documents()]


def write_repository(folder: Path, dataset: datasets.Dataset, num_shards: int) -> Path:
    """Parquet files as `push_to_hub` writes them."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for index in range(num_shards):
        path = folder / "data" / f"train-{index:05d}-of-{num_shards:05d}.parquet"
        dataset.shard(num_shards, index).to_parquet(path, batch_size=3)
    return folder


@pytest.mark.sample(2)
@pytest.mark.parametrize("corpus", ROWS)
def test_datasets_have_the_records_of_json_lines(corpus: str, tmp_path: Path) -> None:
    """Saved whole, split, selected, shuffled and formatted, or as Parquet of a repository; `to_json` says which."""
    random = Random(corpus)
    for number in range(num_cases(6)):
        folder = tmp_path / str(number)
        (folder / "plain").mkdir(parents=True)
        rows = [ROWS[corpus](random) for _ in range(random.randrange(4, 40))]
        dataset = datasets.Dataset.from_list(rows, on_mixed_types="use_json").shuffle(seed=number)
        parts = datasets.DatasetDict(
            train=dataset.select(range(0, len(rows), 2)), test=dataset.with_format("numpy", columns=[])
        )
        parts.save_to_disk(folder / "parts", num_shards={"train": 1 + len(rows) // 9, "test": 2})
        dataset.save_to_disk(folder / "whole")
        write_repository(folder / "hub", dataset, 2)
        for split, part in parts.items():
            part.to_json(folder / "plain" / f"{split}.jsonl")
            plain = records_of(corpus, paths=[f"{folder}/plain/{split}.jsonl"])
            assert records_of(corpus, dataset=f"{folder}/parts", split=split) == plain
        assert records_of(corpus, dataset=f"{folder}/whole") == plain
        assert records_of(corpus, dataset=f"{folder}/hub") == plain


def test_json_columns_are_parsed(tmp_path: Path) -> None:
    """`datasets` has them for messages and arguments with different keys; nulls in them stay."""
    call = {"function": {"name": "f", "arguments": {"a": None, "b": [1, "x"]}}}
    other_call = {"function": {"name": "g", "arguments": {"c": {"d": 2}}}}
    rows = [
        {"messages": [USER, {**ANSWER, "tool_calls": [call]}], "tools": [{"function": {"name": "f", "default": None}}]},
        {"messages": [USER, {**ANSWER, "tool_calls": [call, other_call]}], "tools": None},
        {"messages": [USER, ANSWER, USER, {**ANSWER, "weight": 0}, USER, ANSWER], "tools": []},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = records_of("chat", paths=[f"{tmp_path}/rows.jsonl"])
    json_types = [
        datasets.Features(messages=datasets.List(datasets.Json()), tools=datasets.List(datasets.Json())),
        datasets.Features(messages=datasets.Json(), tools=datasets.Json()),
    ]
    for number, features in enumerate(json_types):
        dataset = datasets.Dataset.from_list(rows, features=features)
        dataset.save_to_disk(tmp_path / f"saved-{number}")
        dataset.to_parquet(tmp_path / f"{number}.parquet")
        assert records_of("chat", dataset=f"{tmp_path}/saved-{number}") == plain
        assert records_of("chat", paths=[f"{tmp_path}/{number}.parquet"]) == plain
    table = pyarrow.table({"messages": pyarrow.array(['[{"role"', "[]"], pyarrow.json_())})
    pyarrow.parquet.write_table(table, tmp_path / "broken.parquet")
    with pytest.raises(SpecError) as error:
        records_of("chat", paths=[f"{tmp_path}/broken.parquet"])
    first, second, _ = error.value.problems
    assert (first.code, first.value) == ("invalid_syntax", f"{tmp_path}/broken.parquet, row 1")
    assert (second.code, second.value) == ("invalid_value", f"{tmp_path}/broken.parquet, row 2")


@pytest.mark.parametrize(
    "names",
    [
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
        ["train-00000-of-00002-0af12bc.parquet", "train-00001-of-00002-9fe2.parquet", "README.md"],
        ["train/0000.parquet", "train/0001.parquet", "test/0000.parquet"],
        ["train-a.jsonl.zst", "train-b.jsonl.gz", "dataset_infos.json"],
        ["data/train.json"], ["train.jsonl", "test.jsonl"],
    ],
    ids=lambda names: names[0],
)  # fmt: skip
def test_layouts_of_repositories(names: list[str], tmp_path: Path) -> None:
    dataset, cut = datasets.Dataset.from_list(TEXTS), 4 if len(names) > 1 and "0" in names[1] + names[0] else 10
    if "train-b" in names[-2:][0]:
        cut = 4
    parts = [range(cut), range(cut, 10), range(3)] if cut < 10 else [range(10), range(3)]
    for name, part in zip(names, parts, strict=False):
        path = tmp_path / "hub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            dataset.select(part).to_parquet(path)
        elif name.endswith((".md", "infos.json")):
            path.write_text("{}")
        else:
            dataset.select(part).to_json(path, compression="infer")
    assert documents(tmp_path / "hub") == documents(tmp_path / "hub", "train") == [row["text"] for row in TEXTS]


def test_a_cache_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    """Its files have no suffixes: they are named after their digests."""
    hub = write_repository(tmp_path / "hub", datasets.Dataset.from_list(TEXTS), 2)
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted((hub / "data").iterdir())):
        os.rename(path, tmp_path / "blobs" / f"{9 - number}abc")
        path.symlink_to(tmp_path / "blobs" / f"{9 - number}abc")
    assert sorted(documents(hub)) == sorted(row["text"] for row in TEXTS)
    chats = datasets.Dataset.from_list([{"messages": [USER, ANSWER]}] * 3)
    (path,) = (write_repository(tmp_path / "chats", chats, 1) / "data").iterdir()
    os.rename(path, tmp_path / "blobs" / "chats")
    path.symlink_to(tmp_path / "blobs" / "chats")
    assert len(records_of("chat", dataset=f"{tmp_path}/chats")) == 3


def _without(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _with_state(**fields: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "train" / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def _with_content(name: str, content: bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(content)


def _cut(num_bytes: int) -> Any:
    def change(folder: Path) -> None:
        path = folder / "train" / "data-00001-of-00002.arrow"
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return change


DAMAGES: dict[str, tuple[Any, ProblemCode, str]] = {
    "no shard": (_without("train/data-00001-of-00002.arrow"), "not_found", "dataset"),
    "no state": (_without("train/state.json"), "not_found", "dataset"),
    "indices": (_with_state(_indices_data_files=[{"filename": "indices.arrow"}]), "unsupported", "dataset"),
    "outside": (_with_state(_data_files=[{"filename": "../../x.arrow"}]), "corrupt", "dataset"),
    "no files": (_with_state(_data_files=None), "corrupt", "dataset"),
    "odd files": (_with_state(_data_files=[{"filename": 3}]), "corrupt", "dataset"),
    "no json": (_with_content("train/state.json", b"{"), "corrupt", "dataset"),
    "deep json": (_with_content("train/state.json", b"[" * 10**6), "corrupt", "dataset"),
    "odd splits": (_with_content("dataset_dict.json", b'{"splits": ["../x"]}'), "corrupt", "dataset"),
    "no end": (_cut(8), "unreadable", "dataset"),
    "cut": (_cut(200), "unreadable", "dataset"),
    "no arrow": (_with_content("train/data-00000-of-00002.arrow", b'{"text": "x"}'), "unreadable", "dataset"),
}


@pytest.mark.parametrize("damage", [
    pytest.param(damage, marks=pytest.mark.slow if damage == "cut" else ()) for damage in DAMAGES
])  # fmt: skip
def test_damaged_folders_are_refused(damage: str, tmp_path: Path) -> None:
    saved = datasets.DatasetDict(train=datasets.Dataset.from_list(TEXTS), test=datasets.Dataset.from_list(TEXTS[:2]))
    saved.save_to_disk(tmp_path / "saved", num_shards={"train": 2, "test": 1})
    change, code, field = DAMAGES[damage]
    change(tmp_path / "saved")
    with pytest.raises(SpecError) as error:
        documents(tmp_path / "saved")
    (problem,) = error.value.problems
    assert (problem.code, problem.path) == (code, f"data.sources[0].{field}")
    assert str(problem.value).startswith(str(tmp_path / "saved"))
    with expect_problem("corrupt" if damage == "no arrow" else code, f"data.sources[0].{field}"):
        check(documents_of(tmp_path / "saved"), [str(tmp_path)])
    if damage != "odd splits":
        assert documents(tmp_path / "saved", "test") == ["text 0", "text 1"]


@pytest.mark.parametrize(
    ("split", "code", "field"), [("dev", "not_found", "split"), (None, "missing", "split"), ("a", None, None)]
)
def test_splits_are_chosen_by_name(split: str | None, code: ProblemCode | None, field: str, tmp_path: Path) -> None:
    parts = datasets.DatasetDict(a=datasets.Dataset.from_list(TEXTS[:1]), b=datasets.Dataset.from_list(TEXTS))
    parts.save_to_disk(tmp_path / "saved")
    if code is None:
        assert documents(tmp_path / "saved", split) == ["text 0"]
        shutil.rmtree(tmp_path / "saved" / "b")
        (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["a"]}')
        assert documents(tmp_path / "saved") == ["text 0"], "the only one"
        with expect_problem("not_found", "data.sources[0].split", "b"):
            documents(tmp_path / "saved" / "a", "b")
        return
    with expect_problem(code, f"data.sources[0].{field}", split):
        documents(tmp_path / "saved", split)


def test_incomplete_downloads_and_other_folders_are_refused(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(TEXTS)
    hub = write_repository(tmp_path / "hub", dataset, 3)
    (hub / "data" / "train-00001-of-00003.parquet").unlink()
    with expect_problem("mismatch", "data.sources[0].dataset", str(hub)):
        documents(hub)
    write_repository(hub, dataset, 3)
    write_repository(hub, dataset, 2)
    with expect_problem("mismatch", "data.sources[0].dataset", str(hub)):
        documents(hub)
    for folder in (tmp_path / "nothing", tmp_path):
        with expect_problem("not_found", "data.sources[0].dataset", str(folder)):
            documents(folder)
    with expect_problem("not_allowed", "data.sources[0].dataset", str(hub)):
        check(documents_of(hub), [str(tmp_path / "roots")])


def test_a_dataset_is_prepared_again_only_if_its_rows_change(tmp_path: Path) -> None:
    data = DocumentsSpec(corpus="documents", sources=({"dataset": f"{tmp_path}/saved"},))
    dataset = datasets.Dataset.from_list(TEXTS)
    fingerprints = []
    for rows in (dataset, dataset, dataset.select(range(9))):
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        rows.save_to_disk(tmp_path / "saved")
        fingerprints.append(build(data).fingerprint())
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_translations_are_keys_of_objects(tmp_path: Path) -> None:
    """As in OPUS and WMT, whose records have no column with the language."""
    rows = [{"translation": {"de": f"Haus {number}", "en": f"house {number}"}} for number in range(9)]
    features = datasets.Features(translation=datasets.Translation(languages=["de", "en"]))
    dataset = datasets.Dataset.from_list(rows, features=features)
    write_repository(tmp_path / "hub", dataset, 2)
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_json(tmp_path / "rows.jsonl")
    columns = {"lang": "de", "source_column": "translation.de", "target_column": "translation.en"}
    files: list[dict[str, Any]] = [
        {"dataset": f"{tmp_path}/hub"}, {"dataset": f"{tmp_path}/saved"}, {"paths": [f"{tmp_path}/rows.jsonl"]},
    ]  # fmt: skip
    for fields in files:
        assert records_of("jsonl", **fields, **columns) == [
            ("de", row["translation"]["de"], row["translation"]["en"]) for row in rows
        ]
        with pytest.raises(SpecError) as error:
            records_of("jsonl", **fields, **{**columns, "target_column": "translation.fr"})
        problem = error.value.problems[0]
        assert (problem.code, problem.path, problem.value) == ("not_found", "data.target_column", "translation.fr")
    english = DocumentsSpec(
        corpus="documents", sources=({"dataset": f"{tmp_path}/saved", "column": "translation.en"},), held_out=0.0
    )
    assert [document.text for document in build(english).documents()] == [row["translation"]["en"] for row in rows]
    with expect_problem("not_applicable", "lang_column", "language"):
        JsonlSpec(corpus="jsonl", paths=["/a.jsonl"], lang="de", lang_column="language")
