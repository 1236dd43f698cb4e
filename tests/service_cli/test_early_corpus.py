"""The corpus that `up` prepares before any job asks for it."""

import json
import os
import re
from pathlib import Path

import pytest

from moe.data.cache import problem
from moe.data.pairs import prepare
from moe.data.pairs.corpora import build
from moe.data.pairs.prepared import content_key
from moe.spec import JobSpec, read_job
from service.cli.early_corpus import EarlyCorpus, catalogs, machine_cache
from tests.processes import await_that
from tests.service_cli.command import EXAMPLE, ROOT
from tests.unit.data_corpora import job, sentences, write_jsonl


def test_it_is_the_one_that_the_first_jobs_read() -> None:
    """The README's job by curl, and the example: the same content, under the same key."""
    data, model = catalogs()
    [by_curl] = re.findall(r"-d '(\{.*?\})'", (ROOT / "README.md").read_text(), re.DOTALL)[:1]
    for spec in (JobSpec.model_validate(json.loads(by_curl)), read_job(EXAMPLE)):
        key = content_key(spec.data, spec.model, build(spec.data))
        assert key == content_key(data, model, build(data))


def digests(folder: Path) -> dict[str, object]:
    files: dict[str, object] = json.loads((folder / "complete.json").read_text())["files"]
    return {name: digest for name, digest in files.items() if name != "stats.json"}  # which holds durations


def job_of_pairs(folder: Path, **data: float) -> JobSpec:
    return job({"corpus": "jsonl", "paths": [write_jsonl(folder / "a.jsonl", sentences(150))], **data})


def test_what_several_caches_share_is_built_once(tmp_path: Path) -> None:
    spec = job_of_pairs(tmp_path, held_out_messages=0.1, held_out_pairs=0.1)
    reference = prepare(spec.data, spec.model, tmp_path / "alone")
    messages: list[str] = []
    first, second = (
        prepare(spec.data, spec.model, tmp_path / name, shared_dir=tmp_path / "shared", report=messages.append)
        for name in ("first", "second")
    )
    assert len([line for line in messages if line.startswith("prepared ")]) == 1
    assert digests(first.folder) == digests(second.folder) == digests(reference.folder)
    assert problem(first.folder) is None
    for name in ("train/text.npy", "tokenizers/tokenizer.json"):
        assert os.path.samefile(first.folder / name, second.folder / name), "one file on the disk"


def test_a_damaged_shared_folder_is_built_anew(tmp_path: Path) -> None:
    spec = job_of_pairs(tmp_path)
    first = prepare(spec.data, spec.model, tmp_path / "first", shared_dir=tmp_path / "shared")
    damaged_file = tmp_path / "shared" / first.key / "train" / "text.npy"
    damaged_file.unlink()
    damaged_file.write_bytes(b"x")
    second = prepare(spec.data, spec.model, tmp_path / "second", shared_dir=tmp_path / "shared")
    assert digests(second.folder) == digests(first.folder)
    assert problem(first.folder) is None


def test_without_a_shared_folder_each_builds_its_own(tmp_path: Path) -> None:
    spec = job_of_pairs(tmp_path)
    (tmp_path / "file").touch()
    corpus = prepare(spec.data, spec.model, tmp_path / "cache", shared_dir=tmp_path / "file" / "shared")
    assert problem(corpus.folder) is None


def test_it_ends_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real preparation ends midway: no process goes on, and no folder is left that a job would take for complete."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    shared_folder = machine_cache()
    assert shared_folder == tmp_path / "home" / "shardyard" / "corpora"
    with EarlyCorpus(tmp_path / "cache") as early:
        process = early._process
        await_that(lambda: list(shared_folder.glob("*.building-*")), lambda: str(process.poll()))
    assert process.poll() is not None
    assert not [folder for folder in shared_folder.iterdir() if (folder / "complete.json").exists()]
