"""Preparing a corpus of pairs: once for the same content, completely or not at all, by any number of processes."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moe.data.cache import Cache, problem
from moe.data.pairs import Sampler, Tokenizers, describe, prepare
from moe.data.pairs.jsonl import JsonlPairs
from moe.data.tokenizer import EOS
from tests.processes import DEADLINE_S
from tests.refusals import expect_problem
from tests.unit.data_corpora import LANGS, job, sentences, write_jsonl


@pytest.fixture
def spec(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", sentences(150))
    return job({"corpus": "jsonl", "paths": [path], "held_out_messages": 0.1, "held_out_pairs": 0.1})


def run(spec, tmp_path, **fields):
    report = []
    return prepare(spec.data, spec.model, tmp_path / "cache", report=report.append, **fields), report


def texts(store):
    return [store.text(index) for index in range(store.num_pairs)]


def test_stores_hold_texts_tokens_and_languages_and_held_out_messages_are_not_trained_on(spec, tmp_path):
    corpus, report = run(spec, tmp_path)
    stores = {"train": corpus.train, **corpus.held_out}
    expected = {(row["source"], row["target"], row["lang"]) for row in sentences(150)}
    assert Counter(text for store in stores.values() for text in texts(store)) == Counter(expected)
    for name, store in stores.items():
        assert store.num_pairs == corpus.stats["pairs"][name] > 0
        for index in range(0, store.num_pairs, 7):
            source, target, lang = store.text(index)
            assert store.source(index).tolist() == [*corpus.tokenizers.source.encode(source), EOS]
            assert store.target(index).tolist() == [*corpus.tokenizers.target.encode(target), EOS]
            assert store.source(index).dtype == np.int32
            assert store.source_lengths[index] == len(store.source(index))
            assert store.target_lengths[index] == len(store.target(index))
            assert store.langs[store.lang_ids[index]] == lang
    assert report[-1].startswith("prepared 600 pairs in 4 languages")
    assert "600 pairs read from 1 files, 600 kept" in describe(corpus.stats)[0]
    training_targets = {(target, lang) for _, target, lang in texts(corpus.train)}
    for _, target, _ in texts(corpus.held_out["unseen"]):
        assert not any((target, lang) in training_targets for lang in LANGS)
    for _, target, lang in texts(corpus.held_out["seen"]):
        assert (target, lang) not in training_targets
        assert any((target, other_lang) in training_targets for other_lang in LANGS)


def test_tokenizers_never_see_held_out_text(spec, tmp_path):
    """Different source text in held-out messages leaves the tokenizers identical."""
    corpus, _ = run(spec, tmp_path)
    unseen = {target for _, target, _ in texts(corpus.held_out["unseen"])}
    rows = sentences(150)
    for row in rows:
        if row["target"] in unseen:
            row["source"] = "Ω" * 9 + row["source"]
    variant, _ = run(job({**spec.data.model_dump(), "paths": [write_jsonl(tmp_path / "b.jsonl", rows)]}), tmp_path)
    assert variant.folder != corpus.folder
    assert variant.tokenizers.source.to_json() == corpus.tokenizers.source.to_json()


def test_pairs_that_are_too_long_are_counted_and_not_stored(spec, tmp_path):
    corpus, _ = run(job({**spec.data.model_dump(), "max_tokens": 8}), tmp_path)
    assert corpus.stats["dropped"]["too_long"] > 0
    assert corpus.stats["dropped"]["too_long"] + sum(corpus.stats["pairs"].values()) == 600
    for store in (corpus.train, *corpus.held_out.values()):
        assert max(store.source_lengths.max(), store.target_lengths.max()) <= 8


@pytest.mark.parametrize(
    ("part", "field", "value", "is_same"),
    [
        ("data", "sampling_exponent", 0.9, True), ("model", "num_encoder_layers", 3, True),
        ("train", "num_steps", 999, True), ("data", "max_tokens", 50, False), ("data", "held_out_pairs", 0.2, False),
        ("data", "languages", ["de", "fr"], False), ("model", "share_vocabulary", False, False),
        ("seed", "", 1, False), ("corpus", "", "", False),
    ],
)  # fmt: skip
def test_a_corpus_is_rebuilt_for_what_changes_its_content_only(spec, tmp_path, part, field, value, is_same):
    first, _ = run(spec, tmp_path)
    if part == "corpus":
        write_jsonl(tmp_path / "a.jsonl", sentences(151))
    elif part != "seed":
        body = spec.model_dump(mode="json")
        body[part][field] = value
        spec = type(spec).parse(body)
    second, report = run(spec, tmp_path, seed=value if part == "seed" else 0)
    assert (second.folder == first.folder) is is_same
    if is_same:
        assert (report, second.stats) == ([], first.stats)


def flip_last_byte(path):
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


DAMAGES = {
    "truncated": lambda folder: (folder / "train/source.ids.npy").write_bytes(b"\x93NUMPY"),
    "a flipped bit": lambda folder: flip_last_byte(folder / "seen/text.npy"),
    "a torn marker": lambda folder: (folder / "complete.json").write_text('{"version": 1'),
    "no marker": lambda folder: (folder / "complete.json").unlink(),
    "a missing file": lambda folder: (folder / "tokenizers/tokenizer.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_store_is_rebuilt_with_the_same_content(spec, tmp_path, damage):
    def digests(folder):
        files = json.loads((folder / "complete.json").read_text())["files"]
        return {name: digest for name, digest in files.items() if name != "stats.json"}

    first, _ = run(spec, tmp_path)
    before, rows = digests(first.folder), Sampler(first.train, spec).batch(3).part(0, 2).source
    damage(first.folder)
    second, report = run(spec, tmp_path)
    assert report[0].startswith(f"rebuilding {first.folder.name}: ")
    assert digests(second.folder) == before
    assert np.array_equal(Sampler(second.train, spec).batch(3).part(0, 2).source, rows)
    assert problem(second.folder) is None
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == [second.folder.name]


PREPARE = """
import hashlib, json, sys
from moe.data.pairs import Sampler, prepare
from moe.spec import JobSpec
spec = JobSpec.parse(json.loads(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
report = []
prepared = prepare(spec.data, spec.model, sys.argv[2], report=report.append)
rows = hashlib.sha256()
for step in range(20):
    batch = Sampler(prepared.train, spec).batch(step)
    rows.update(batch.rows.tobytes() + batch.part(0, batch.num_groups).target_in.tobytes())
print(json.dumps([report, str(prepared.folder), rows.hexdigest()]))
"""
HALF_BUILD = """
import sys
from moe.data.cache import Cache
def build(folder):
    (folder / "half").write_text("half of it")
    print("building", flush=True)
    sys.stdin.readline()
Cache(sys.argv[1], print).find_or_build("key", build)
"""


def start(program, *arguments):
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_one_of_several_processes_builds_and_all_read_the_same(spec, tmp_path):
    processes = [start(PREPARE, spec.model_dump_json(), str(tmp_path / "cache")) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    reports, folders, digests = zip(
        *(json.loads(process.communicate(timeout=DEADLINE_S)[0]) for process in processes), strict=True
    )
    assert sum(map(len, reports)) == 1
    assert (len(set(folders)), len(set(digests))) == (1, 1)


def test_a_build_that_is_killed_or_fails_leaves_no_lock_and_no_folder(tmp_path):
    process = start(HALF_BUILD, str(tmp_path))
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    assert any(tmp_path.glob("key.building-*"))

    def fail(folder):
        (folder / "half").write_text("half of it")
        raise OSError("no space left")

    cache = Cache(tmp_path, lambda message: None)
    with pytest.raises(OSError, match="no space"):
        cache.find_or_build("key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    place = cache.find_or_build("key", lambda folder: (folder / "whole").write_text("all"))
    assert (place / "whole").read_text() == "all"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


@pytest.mark.slow
def test_the_default_corpus_is_as_measured_and_its_unseen_messages_are_trained_on_in_no_language(tmp_path):
    """On the demo's own job."""
    body = job({"corpus": "catalogs"}, batch_tokens=1024, group_tokens=512).model_dump(mode="json")
    body["model"] |= {"source_vocab_size": 4096, "target_vocab_size": 4096}
    spec = type(job({"corpus": "catalogs"})).parse(body)
    corpus, _ = run(spec, tmp_path)
    stats = corpus.stats
    sizes = [sum(lang[part] for part in stats["pairs"]) for lang in stats["languages"].values()]
    assert len(sizes) == len(corpus.train.langs) == pytest.approx(171, abs=5)
    page = " ".join((Path(__file__).parents[2] / "docs" / "jobs.md").read_text().split())
    assert f"{sum(size >= 500 for size in sizes)} languages with 500 pairs or more" in page
    assert stats["pairs"] == pytest.approx({"train": 300_000, "unseen": 5_400, "seen": 3_000}, rel=0.1)
    assert stats["dropped"]["untranslated"] == pytest.approx(129_000, rel=0.05)
    assert stats["distinct_targets"] == pytest.approx(16_000, rel=0.05)
    assert stats["unreadable"] == []
    assert [stats["languages"][lang]["script"] for lang in ("ru", "de")] == ["Cyrillic", "Latin"]
    assert stats["languages"]["ja"]["script"] in ("CJK", "Katakana", "Hiragana")
    batches = [Sampler(corpus.train, spec).batch(step) for step in range(300)]
    assert sum(b.num_tokens for b in batches) >= 0.9 * sum(b.num_positions for b in batches)
    unseen, training_targets = (
        {target.casefold() for _, target, _ in texts(store)} for store in (corpus.held_out["unseen"], corpus.train)
    )
    assert unseen
    assert not unseen & training_targets
    Tokenizers.load(corpus.folder / "tokenizers")
    assert set(LANGS) <= set(corpus.train.langs)


def test_a_corpus_that_changes_while_it_is_read_is_not_stored_under_its_first_hash(tmp_path, monkeypatch):
    path = tmp_path / "mine.jsonl"
    spec = job({"corpus": "jsonl", "paths": [write_jsonl(path, sentences(60))], "held_out_pairs": 0.1})
    read = JsonlPairs.pairs

    def change_first(corpus):
        write_jsonl(path, sentences(61))
        return read(corpus)

    monkeypatch.setattr(JsonlPairs, "pairs", change_first)
    with expect_problem("changed", "data", None):
        run(spec, tmp_path)
    monkeypatch.undo()
    assert run(spec, tmp_path)[0].stats["read"] == 61 * len(LANGS)


def test_progress_goes_through_every_stage_and_never_back(spec, tmp_path):
    """Catalogs know the share that has been read; a user's file does not until its end."""
    steps = []
    run(spec, tmp_path, progress=lambda *step: steps.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in steps)) == [
        "reading", "learning the tokenizer", "encoding", "writing",
    ]  # fmt: skip
    shares = [share for _, share, _ in steps if share is not None]
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < shares[-1] < 1.0
    run(spec, tmp_path, progress=lambda *step: pytest.fail("what is found is not prepared"))
    steps.clear()
    catalogs = job({"corpus": "catalogs", "languages": ["de", "fr"]})
    run(catalogs, tmp_path, progress=lambda *step: steps.append(step))
    reading = [share for stage, share, _ in steps if stage == "reading"]
    assert all(share is not None for _, share, _ in steps)
    assert reading == sorted(reading)
    assert (reading[0], reading[-1] > 0.1) == (0.0, True)
