"""Preparing documents: what a run reads, and what determines its key. What preparation of pairs has in common (one
build by several processes, damage, a changing corpus) is in test_data_prepare.py."""

import lzma
import math
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
from tests.refusals import expect_problem
from tests.unit.data_corpora import write_jsonl
from tests.unit.documents import VOCAB_SIZE, job, texts
from tests.unit.test_data_document_tokenizer import given_tokenizer


@pytest.fixture
def spec(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(150)])
    (tmp_path / "b.txt").write_text("# other text\n" * 40)
    sources = [{"name": "code", "paths": [path]}, {"name": "notes", "paths": [f"{tmp_path}/b.txt"]}]
    return job({"corpus": "documents", "sources": sources, "held_out": 0.1, "max_tokens": 32}, batch_tokens=256)


def run(spec, tmp_path, tokenizer=None, vocab_size=VOCAB_SIZE, **reports):
    return prepare(spec.data, vocab_size, tmp_path / "cache", tokenizer, **reports)


def all_rows(store):
    return store.rows(np.arange(store.num_rows))


def with_data(spec, **fields):
    return type(spec).parse({**spec.model_dump(mode="json"), "data": {**spec.data.model_dump(mode="json"), **fields}})


def test_rows_hold_the_documents(spec, tmp_path):
    report, steps = [], []
    corpus = run(spec, tmp_path, report=report.append, progress=lambda *step: steps.append(step))
    documents = list(DocumentFiles(spec.data, None).documents())
    training_texts = [document.text for document in documents if not document.is_held_out]
    assert corpus.train.sources == tuple(corpus.held_out) == ("code", "notes")
    assert [text.decode() for store in corpus.held_out.values() for text in store.texts()] == [
        document.text for document in documents if document.is_held_out
    ]
    ids, labels = corpus.tokenizer.encode_batch(training_texts), all_rows(corpus.train).labels
    expected = np.bincount(np.concatenate(ids), minlength=VOCAB_SIZE)
    expected[corpus.tokenizer.eos_id] += len(ids)
    assert np.array_equal(np.bincount(labels[labels >= 0], minlength=VOCAB_SIZE), expected)
    assert corpus.train.num_bytes == sum(len(text.encode()) for text in training_texts)
    stats, held_out = corpus.stats["train"], corpus.stats["held_out"]
    assert stats["documents"] + held_out["code"]["documents"] + held_out["notes"]["documents"] == len(documents)
    assert stats["waste"] <= 0.02
    assert sum(stats["rows_of"].values()) == stats["rows"] == corpus.train.num_rows
    assert report == describe(corpus.stats)
    assert report[0].startswith(f"prepared {corpus.train.num_documents} documents for training (")
    assert list(dict.fromkeys(stage for stage, _, _ in steps)) == [
        "reading", "learning the tokenizer", "encoding", "counting",
    ]  # fmt: skip
    shares = [share for _, share, _ in steps if share is not None]
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < shares[-1] < 1.0


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "is_same"),
    [("none", True), ("weight", True), ("steps", True), ("text", False), ("max_tokens", False), ("held_out", False),
     ("vocabulary", False), ("tokenizer", False)],
)  # fmt: skip
def test_the_key_follows_the_content_and_not_its_order(spec, tmp_path, change, is_same):
    first, report = run(spec, tmp_path), []
    sources = [source.model_dump(mode="json") for source in spec.data.sources]
    match change:
        case "weight":
            spec = with_data(spec, sources=[{**sources[0], "weight": 3.0}, sources[1]])
        case "steps":
            spec = spec.model_copy(update={"train": spec.train.model_copy(update={"num_steps": 99, "seed": 3})})
        case "text":
            (tmp_path / "b.txt").write_text("# other text\n" * 41)
        case "max_tokens" | "held_out":
            spec = with_data(spec, **{change: {"max_tokens": 64, "held_out": 0.2}[change]})
    tokenizer = given_tokenizer() if change == "tokenizer" else None
    second = run(spec, tmp_path, tokenizer, VOCAB_SIZE + (change == "vocabulary"), report=report.append)
    assert (second.key == first.key) is is_same
    if is_same:
        assert (second.folder, second.stats, report) == (first.folder, first.stats, [])
        assert second.tokenizer_files() == first.tokenizer_files()


def test_a_given_tokenizer_is_stored_unchanged_and_loads_from_its_files(spec, tmp_path):
    tokenizer = given_tokenizer()
    tokenizer = type(tokenizer)({**tokenizer.files, "tokenizer_config.json": b"{ }"}, tokenizer.eos_id, bos_id=4)
    corpus = run(spec, tmp_path, tokenizer)
    files = {**corpus.tokenizer_files(), **corpus.carried_files()}
    assert {name: files[name] for name in tokenizer.files} == tokenizer.files
    assert type(tokenizer).of_files(files) == tokenizer
    variant = run(spec, tmp_path, replace(tokenizer, files={**tokenizer.files, "LICENSE": b"as you like"}, ends=(9,)))
    assert variant.key == corpus.key, "whose tokens are the same"
    assert variant.folder != corpus.folder
    rows = all_rows(corpus.train)
    assert rows.tokens[0, 0] == 4
    assert np.count_nonzero(rows.labels == tokenizer.eos_id) == corpus.train.num_documents

    def read(name):
        if name not in files:
            raise FileNotFoundError(name)
        return files[name]

    loaded_tokenizer = load_tokenizer(read)
    assert (loaded_tokenizer.bos_id, loaded_tokenizer.eos_id) == (4, tokenizer.eos_id)
    assert loaded_tokenizer.encode("def f(x): <|end|>") == corpus.tokenizer.encode("def f(x): <|end|>")
    with expect_problem("out_of_range", "model.vocab_size", 200):
        run(spec, tmp_path, tokenizer, 200)  # although it has been built


def test_a_vocabulary_without_room_for_bytes_and_a_source_held_out_whole_are_refused(spec, tmp_path):
    with expect_problem("out_of_range", "model.vocab_size", 259):
        run(spec, tmp_path, vocab_size=259)
    for index in range(200):  # until chance holds one out
        (tmp_path / "b.txt").write_text(f"{index}")
        if list(DocumentFiles(spec.data, None).documents())[-1].is_held_out:
            break
    with expect_problem("empty", "data", None):
        run(spec, tmp_path)


def test_baselines_follow_their_definitions(spec, tmp_path):
    corpus = run(spec, tmp_path)
    labels, held_out = all_rows(corpus.train).labels, all_rows(corpus.held_out["code"]).labels
    counts = np.bincount(labels[labels >= 0], minlength=VOCAB_SIZE) + 1
    nats = unigram_nats_per_source(corpus.train, corpus.held_out, VOCAB_SIZE)
    assert nats["code"] == pytest.approx(-np.mean(np.log(counts / counts.sum())[held_out[held_out >= 0]]))
    assert nats["code"] < math.log(VOCAB_SIZE)
    assert nats["notes"] is None
    noise = np.random.default_rng(0).bytes(200_000)
    # Only a dictionary as large as the text finds the repeated noise.
    contents = [*corpus.held_out["code"].texts(), noise + b"text " * 99 + noise]
    sizes = [len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in contents]
    assert xz_bits_per_byte(contents) == 8 * sum(sizes) / sum(map(len, contents))
    assert xz_bits_per_byte([]) is None


def test_a_few_installed_packages_are_prepared(tmp_path, monkeypatch):
    """The full list takes half a minute; `python -m benchmarks.packages` measures it."""
    packages = Packages([Distribution("click")], [Distribution("h11"), Distribution("sqlparse")])
    monkeypatch.setattr(prepared, "build", lambda *arguments: packages)
    corpus = prepare(data := PackagesSpec(corpus="packages"), 1024, tmp_path)
    assert (corpus.train.sources, list(corpus.held_out)) == (("packages",), ["h11", "sqlparse"])
    assert (corpus.stats["digest"], corpus.tokenizer.vocab_size) == (packages.fingerprint(), 1024)
    for store in (corpus.train, *corpus.held_out.values()):
        assert store.max_tokens == 512
        assert store.num_tokens > 0.98 * store.num_rows * 512 or store.num_rows == -(-store.num_tokens // 512)
        assert all_rows(store).tokens.max() < 1024
    first = next(corpus.held_out["h11"].texts()).decode()
    assert first in {document.text for document in packages.documents() if document.is_held_out}
    batch = SequenceSampler(corpus.train, job(data.model_dump(), batch_tokens=2048)).batch(0)
    assert corpus.tokenizer.decode(batch.part(0, 1).tokens[0].tolist()).strip()
