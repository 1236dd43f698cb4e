"""Preparing documents: once for a content, by however many processes, to what a run reads."""

import json
import lzma
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from moe.data.sequences import (
    SequenceSampler,
    describe,
    load_tokenizer,
    prepare,
    prepared,
    unigram_nats_per_source,
    xz_bits_per_byte,
)
from moe.data.sequences.documents import DocumentFiles
from moe.data.sequences.package_list import Distribution
from moe.data.sequences.packages import Packages
from moe.spec import PackagesSpec
from tests.processes import DEADLINE_S
from tests.refusals import refused
from tests.unit.data_corpora import write_jsonl
from tests.unit.documents import VOCAB_SIZE, job, texts
from tests.unit.test_data_document_tokenizer import given_tokenizer


@pytest.fixture
def spec(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(150)])
    (tmp_path / "b.txt").write_text("# other text\n" * 40)
    sources = [{"name": "code", "paths": [path]}, {"name": "notes", "paths": [f"{tmp_path}/b.txt"]}]
    data = {"corpus": "documents", "sources": sources, "held_out": 0.1, "max_tokens": 32}
    return job(data, batch_tokens=256)


def run(spec, tmp_path, tokenizer=None, vocab_size=VOCAB_SIZE):
    said = []
    found = prepare(spec.data, vocab_size, tmp_path / "cache", tokenizer, report=said.append)
    return found, said


def whole(store):
    return store.rows(np.arange(store.num_rows))


def with_data(spec, **fields):
    return type(spec).parse({**spec.model_dump(mode="json"), "data": {**spec.data.model_dump(mode="json"), **fields}})


def test_rows_hold_the_documents(spec, tmp_path):
    found, said = run(spec, tmp_path)
    documents = list(DocumentFiles(spec.data, None).documents())
    assert found.train.sources == tuple(found.held_out) == ("code", "notes")
    assert [text.decode() for store in found.held_out.values() for text in store.texts()] == [
        document.text for document in documents if document.is_held_out
    ]
    ids = found.tokenizer.encode_batch([document.text for document in documents if not document.is_held_out])
    rows = whole(found.train)
    labels = np.bincount(rows.labels[rows.labels >= 0], minlength=VOCAB_SIZE)
    expected = np.bincount(np.concatenate(ids), minlength=VOCAB_SIZE)
    expected[found.tokenizer.eos_id] += len(ids)
    assert np.array_equal(labels, expected)
    assert found.train.num_bytes == sum(len(d.text.encode()) for d in documents if not d.is_held_out)
    train, held_out = found.stats["train"], found.stats["held_out"]
    assert train["documents"] + held_out["code"]["documents"] + held_out["notes"]["documents"] == len(documents)
    assert train["waste"] <= 0.02
    assert sum(train["rows_of"].values()) == train["rows"] == found.train.num_rows
    assert said == describe(found.stats)
    assert said[0].startswith(f"prepared {found.train.num_documents} documents for training (")


def test_what_is_built_is_found_again(spec, tmp_path):
    first, _ = run(spec, tmp_path)
    again, said = run(spec, tmp_path)
    assert again.folder == first.folder
    assert said == []
    assert again.stats == first.stats
    assert again.tokenizer_files() == first.tokenizer_files()


@pytest.mark.parametrize("same", ["weight", "steps"])
def test_what_decides_only_the_order_builds_nothing_anew(spec, tmp_path, same):
    first, _ = run(spec, tmp_path)
    sources = [source.model_dump(mode="json") for source in spec.data.sources]
    if same == "weight":
        spec = with_data(spec, sources=[{**sources[0], "weight": 3.0}, sources[1]])
    else:
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"num_steps": 99, "seed": 3})})
    assert run(spec, tmp_path)[0].key == first.key


@pytest.mark.parametrize("other", ["text", "max_tokens", "held_out", "vocabulary", "tokenizer"])
def test_what_decides_the_content_has_another_key(spec, tmp_path, other):
    first, _ = run(spec, tmp_path)
    tokenizer, vocab_size = None, VOCAB_SIZE
    if other == "text":
        (tmp_path / "b.txt").write_text("# other text\n" * 41)
    elif other == "vocabulary":
        vocab_size += 1
    elif other == "tokenizer":
        tokenizer = given_tokenizer()
    else:
        spec = with_data(spec, **{other: {"max_tokens": 64, "held_out": 0.2}[other]})
    assert run(spec, tmp_path, tokenizer, vocab_size)[0].key != first.key


def test_a_given_tokenizer_is_kept_as_it_is_and_known_from_its_files_alone(spec, tmp_path):
    given = given_tokenizer()
    given = type(given)({**given.files, "tokenizer_config.json": b"{ }"}, given.eos_id, bos_id=4)
    found, _ = run(spec, tmp_path, given)
    files = {**found.tokenizer_files(), **found.carried_files()}
    assert {name: files[name] for name in given.files} == given.files
    assert type(given).of_files(files) == given
    other, _ = run(spec, tmp_path, replace(given, files={**given.files, "LICENSE": b"as you like"}, ends=(9,)))
    assert other.key == found.key, "whose tokens are the same"
    assert other.folder != found.folder
    rows = whole(found.train)
    assert rows.tokens[0, 0] == 4
    assert np.count_nonzero(rows.labels == given.eos_id) == found.train.num_documents

    def read(name):
        if name not in files:
            raise FileNotFoundError(name)
        return files[name]

    loaded = load_tokenizer(read)
    assert (loaded.bos_id, loaded.eos_id) == (4, given.eos_id)
    assert loaded.encode("def f(x): <|end|>") == found.tokenizer.encode("def f(x): <|end|>")
    with refused("out_of_range", "model.vocab_size", 200):
        run(spec, tmp_path, given, 200)  # although it has been built


def test_a_vocabulary_without_room_for_bytes_is_refused(spec, tmp_path):
    with refused("out_of_range", "model.vocab_size", 259):
        run(spec, tmp_path, vocab_size=259)


def test_a_source_of_which_all_is_held_out_is_refused(spec, tmp_path):
    for index in range(200):  # until chance holds one out
        (tmp_path / "b.txt").write_text(f"{index}")
        if list(DocumentFiles(spec.data, None).documents())[-1].is_held_out:
            break
    with refused("empty", "data", None):
        run(spec, tmp_path)


def test_a_corpus_that_changes_while_it_is_read_is_not_kept_under_the_name_of_another(spec, tmp_path, monkeypatch):
    """The name is a hash of what was there before."""
    read = DocumentFiles.documents

    def changed_first(corpus):
        (tmp_path / "b.txt").write_text("changed")
        return read(corpus)

    monkeypatch.setattr(DocumentFiles, "documents", changed_first)
    with refused("changed", "data", None):
        run(spec, tmp_path)


PREPARE = """
import hashlib, json, sys
from moe.data.sequences import SequenceSampler, prepare
from moe.spec import JobSpec
spec = JobSpec.parse(json.loads(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
said = []
prepared = prepare(spec.data, spec.model.vocab_size, sys.argv[2], report=said.append)
rows = hashlib.sha256()
for step in range(20):
    batch = SequenceSampler(prepared.train, spec).batch(step)
    rows.update(batch.rows.tobytes() + batch.part(0, batch.num_groups).labels.tobytes())
print(json.dumps({"said": said, "key": prepared.key, "rows": rows.hexdigest()}))
"""


@pytest.mark.slow
def test_of_processes_that_start_at_once_one_builds_and_all_see_the_same(spec, tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PREPARE, spec.model_dump_json(), str(tmp_path / "cache")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate(timeout=DEADLINE_S)[0]) for process in processes]
    assert sum(bool(answer["said"]) for answer in answers) == 1
    assert len({(answer["key"], answer["rows"]) for answer in answers}) == 1


def test_baselines_are_those_of_the_definitions(spec, tmp_path):
    found, _ = run(spec, tmp_path)
    labels = whole(found.train).labels
    counts = np.bincount(labels[labels >= 0], minlength=VOCAB_SIZE) + 1
    held_out = whole(found.held_out["code"]).labels
    expected = -np.mean(np.log(counts / counts.sum())[held_out[held_out >= 0]])
    nats = unigram_nats_per_source(found.train, found.held_out, VOCAB_SIZE)
    assert nats["code"] == pytest.approx(expected)
    assert nats["notes"] is None
    assert nats["code"] < math.log(VOCAB_SIZE)
    kept = list(found.held_out["code"].texts())
    noise = np.random.default_rng(0).bytes(200_000)
    kept.append(noise + b"text " * 99 + noise)  # found again beyond any dictionary but one of its own size
    sizes = [len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in kept]
    assert xz_bits_per_byte(kept) == 8 * sum(sizes) / sum(map(len, kept))
    assert xz_bits_per_byte([]) is None


def test_a_few_installed_packages_are_prepared(tmp_path, monkeypatch):
    """The whole list takes half a minute; `python -m benchmarks.packages` measures it."""
    few = Packages([Distribution("click")], [Distribution("h11"), Distribution("sqlparse")])
    monkeypatch.setattr(prepared, "build", lambda data, roots, tokenizer: few)
    found = prepare(data := PackagesSpec(corpus="packages"), 1024, tmp_path)
    assert found.train.sources == ("packages",)
    assert list(found.held_out) == ["h11", "sqlparse"]
    assert found.stats["digest"] == few.fingerprint()
    assert found.tokenizer.vocab_size == 1024
    for store in (found.train, *found.held_out.values()):
        assert store.max_tokens == 512
        assert store.num_tokens > 0.98 * store.num_rows * 512 or store.num_rows == -(-store.num_tokens // 512)
        rows = whole(store)
        assert rows.tokens.max() < 1024
    first = next(found.held_out["h11"].texts()).decode()
    assert first in {document.text for document in few.documents() if document.is_held_out}
    sampler = SequenceSampler(found.train, job(data.model_dump(), batch_tokens=2048))
    text = found.tokenizer.decode(sampler.batch(0).part(0, 1).tokens[0].tolist())
    assert text.strip()


def test_progress_goes_through_every_stage_and_never_back(spec, tmp_path):
    told = []
    prepare(spec.data, VOCAB_SIZE, tmp_path / "cache", progress=lambda *step: told.append(step))
    stages = [stage for stage, _, _ in told]
    assert list(dict.fromkeys(stages)) == ["reading", "learning the tokenizer", "encoding", "counting"]
    shares = [share for _, share, _ in told if share is not None]
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < shares[-1] < 1.0
