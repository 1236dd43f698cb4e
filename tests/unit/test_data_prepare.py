"""Preparing a corpus: once for a content, whole or not at all, by however many processes."""

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
from tests.refusals import refused
from tests.unit.data_corpora import LANGS, job, sentences, write_jsonl


@pytest.fixture
def spec(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", sentences(150))
    return job({"corpus": "jsonl", "paths": [path], "held_out_messages": 0.1, "held_out_pairs": 0.1})


def run(spec, cache_dir, **fields):
    said = []
    prepared = prepare(spec.data, spec.model, cache_dir, report=said.append, **fields)
    return prepared, said


def test_stores_hold_the_texts_their_tokens_and_their_languages(spec, tmp_path):
    prepared, said = run(spec, tmp_path / "cache")
    stores = {"train": prepared.train, **prepared.held_out}
    expected = {(row["source"], row["target"], row["lang"]) for row in sentences(150)}
    found = [store.text(index) for store in stores.values() for index in range(store.num_pairs)]
    assert Counter(found) == Counter(expected)
    for name, store in stores.items():
        assert store.num_pairs == prepared.stats["pairs"][name] > 0
        for index in range(0, store.num_pairs, 7):
            source, target, lang = store.text(index)
            assert store.source(index).tolist() == [*prepared.tokenizers.source.encode(source), EOS]
            assert store.target(index).tolist() == [*prepared.tokenizers.target.encode(target), EOS]
            assert store.source(index).dtype == np.int32
            assert store.source_lengths[index] == len(store.source(index))
            assert store.target_lengths[index] == len(store.target(index))
            assert store.langs[store.lang_ids[index]] == lang
    assert said[-1].startswith("prepared 600 pairs in 4 languages")
    assert "600 pairs read from 1 files, 600 kept" in describe(prepared.stats)[0]


def test_held_out_text_is_apart_from_training(spec, tmp_path):
    prepared, _ = run(spec, tmp_path / "cache")

    def texts(store):
        return [store.text(index) for index in range(store.num_pairs)]

    in_training = set(texts(prepared.train))
    trained_targets = {target for _, target, _ in in_training}
    assert not trained_targets & {target for _, target, _ in texts(prepared.held_out["unseen"])}
    for source, target, lang in texts(prepared.held_out["seen"]):
        assert (source, target, lang) not in in_training
        assert any(t == target and other != lang for _, t, other in in_training)


def test_tokenizers_never_see_held_out_text(spec, tmp_path):
    """Changing what is held out, and nothing else, leaves the tokenizers the very same."""
    prepared, _ = run(spec, tmp_path / "cache")
    marked = sentences(150)
    unseen = {prepared.held_out["unseen"].text(i)[1] for i in range(prepared.held_out["unseen"].num_pairs)}
    for row in marked:
        if row["target"] in unseen:
            row["source"] = "Ω" * 9 + row["source"]
    path = write_jsonl(tmp_path / "b.jsonl", marked)
    other = job({**spec.data.model_dump(), "paths": [path]})
    again, _ = run(other, tmp_path / "cache")
    assert again.folder != prepared.folder
    assert again.tokenizers.source.to_json() == prepared.tokenizers.source.to_json()


def test_too_long_pairs_are_counted_and_none_is_stored(spec, tmp_path):
    shorter = job({**spec.data.model_dump(), "max_tokens": 8})
    prepared, _ = run(shorter, tmp_path / "cache")
    assert prepared.stats["dropped"]["too_long"] > 0
    assert prepared.stats["dropped"]["too_long"] + sum(prepared.stats["pairs"].values()) == 600
    for store in (prepared.train, *prepared.held_out.values()):
        assert max(store.source_lengths.max(), store.target_lengths.max()) <= 8


def test_what_is_built_is_found_again(spec, tmp_path):
    first, _ = run(spec, tmp_path / "cache")
    again, said = run(spec, tmp_path / "cache")
    assert again.folder == first.folder
    assert said == []
    assert again.stats == first.stats


@pytest.mark.parametrize(
    ("part", "field", "value", "same"),
    [
        ("data", "sampling_exponent", 0.9, True),
        ("model", "num_encoder_layers", 3, True),
        ("train", "num_steps", 999, True),
        ("data", "max_tokens", 50, False),
        ("data", "held_out_pairs", 0.2, False),
        ("data", "languages", ["de", "fr"], False),
        ("model", "share_vocabulary", False, False),
        ("seed", "", 1, False),
        ("corpus", "", "", False),
    ],
)
def test_only_what_matters_builds_anew(spec, tmp_path, part, field, value, same):
    first, _ = run(spec, tmp_path / "cache")
    seed = 0
    if part == "seed":
        seed = value
    elif part == "corpus":
        write_jsonl(tmp_path / "a.jsonl", sentences(151))
    else:
        given = spec.model_dump(mode="json")
        given[part][field] = value
        spec = type(spec).parse(given)
    again, _ = run(spec, tmp_path / "cache", seed=seed)
    assert (again.folder == first.folder) is same


def damage_truncate(folder):
    path = folder / "train" / "source.ids.npy"
    path.write_bytes(path.read_bytes()[:-3])


def damage_flip(folder):
    path = folder / "seen" / "text.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_marker(folder):
    (folder / "complete.json").write_text('{"version": 1')


def damage_no_marker(folder):
    (folder / "complete.json").unlink()


def damage_missing(folder):
    (folder / "tokenizers" / "tokenizer.json").unlink()


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_marker, damage_no_marker, damage_missing])
def test_a_damaged_store_is_built_anew_and_the_same(spec, tmp_path, damage):
    first, _ = run(spec, tmp_path / "cache")
    digests = (first.folder / "complete.json").read_text()
    old = Sampler(first.train, spec).batch(3).part(0, 2).source
    damage(first.folder)
    again, said = run(spec, tmp_path / "cache")
    assert said[0].startswith(f"rebuilding {first.folder.name}: ")
    before, after = (json.loads(digests)["files"], json.loads((again.folder / "complete.json").read_text())["files"])
    assert {name: before[name] for name in before if name != "stats.json"} == {
        name: after[name] for name in after if name != "stats.json"
    }
    assert np.array_equal(Sampler(again.train, spec).batch(3).part(0, 2).source, old)
    assert problem(again.folder) is None
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == [again.folder.name]


PREPARE = """
import hashlib, json, sys
from moe.data.pairs import Sampler, prepare
from moe.spec import JobSpec
spec = JobSpec.parse(json.loads(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
said = []
prepared = prepare(spec.data, spec.model, sys.argv[2], report=said.append)
rows = hashlib.sha256()
for step in range(20):
    batch = Sampler(prepared.train, spec).batch(step)
    rows.update(batch.rows.tobytes() + batch.part(0, batch.num_groups).target_in.tobytes())
print(json.dumps({"said": said, "folder": str(prepared.folder), "rows": rows.hexdigest()}))
"""


def start(program, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_of_processes_that_start_at_once_one_builds_and_all_see_the_same(spec, tmp_path):
    processes = [start(PREPARE, spec.model_dump_json(), str(tmp_path / "cache")) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate(timeout=DEADLINE_S)[0]) for process in processes]
    assert sum(len(answer["said"]) for answer in answers) == 1
    assert len({(answer["folder"], answer["rows"]) for answer in answers}) == 1


HALF_BUILD = """
import sys
from moe.data.cache import Cache
def build(folder):
    (folder / "half").write_text("half of it")
    print("building", flush=True)
    sys.stdin.readline()
Cache(sys.argv[1], print).find_or_build("key", build)
"""


def test_a_builder_that_is_killed_leaves_no_lock_and_nothing_that_counts(tmp_path):
    process = start(HALF_BUILD, str(tmp_path))
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    assert any(tmp_path.glob("key.building-*"))
    place = Cache(tmp_path, lambda message: None).find_or_build("key", lambda f: (f / "whole").write_text("all"))
    assert (place / "whole").read_text() == "all"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("half of it")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        Cache(tmp_path, lambda message: None).find_or_build("key", build)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_names_come_lazily_and_without_torch():
    program = """
import sys
from moe.data.pairs import check
assert "torch" not in sys.modules and "tokenizers" not in sys.modules and "numpy" not in sys.modules
import moe.data.pairs
for name in moe.data.pairs.__all__:
    getattr(moe.data.pairs, name)
assert "torch" not in sys.modules and "django" not in sys.modules and "pycountry" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture(scope="module")
def catalogs(tmp_path_factory):
    """The default corpus, whole: the demo's own job."""
    spec = job({"corpus": "catalogs"}, batch_tokens=1024, group_tokens=512)
    model = {**spec.model.model_dump(), "source_vocab_size": 4096, "target_vocab_size": 4096}
    spec = type(spec).parse({**spec.model_dump(mode="json"), "model": model})
    return spec, prepare(spec.data, spec.model, tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_the_catalogs_corpus_is_what_was_measured(catalogs):
    spec, prepared = catalogs
    stats = prepared.stats
    sizes = [sum(lang[part] for part in stats["pairs"]) for lang in stats["languages"].values()]
    assert len(sizes) == len(prepared.train.langs) == pytest.approx(171, abs=5)
    page = " ".join((Path(__file__).parents[2] / "docs" / "jobs.md").read_text().split())
    assert f"{sum(size >= 500 for size in sizes)} languages with 500 pairs or more" in page
    assert stats["pairs"] == pytest.approx({"train": 300_000, "unseen": 5_400, "seen": 3_000}, rel=0.1)
    assert stats["dropped"]["untranslated"] == pytest.approx(129_000, rel=0.05)
    assert stats["distinct_targets"] == pytest.approx(16_000, rel=0.05)
    assert stats["unreadable"] == []
    assert stats["languages"]["ru"]["script"] == "Cyrillic"
    assert stats["languages"]["ja"]["script"] in ("CJK", "Katakana", "Hiragana")
    assert stats["languages"]["de"]["script"] == "Latin"
    sampler = Sampler(prepared.train, spec)
    batches = [sampler.batch(step) for step in range(300)]
    assert sum(b.num_tokens for b in batches) >= 0.9 * sum(b.num_positions for b in batches)


@pytest.mark.slow
def test_the_catalogs_unseen_messages_are_trained_on_in_no_language(catalogs):
    _, prepared = catalogs
    unseen = {prepared.held_out["unseen"].text(i)[1].casefold() for i in range(prepared.stats["pairs"]["unseen"])}
    trained = {prepared.train.text(i)[1].casefold() for i in range(prepared.stats["pairs"]["train"])}
    assert unseen
    assert not unseen & trained
    Tokenizers.load(prepared.folder / "tokenizers")
    assert set(LANGS) <= set(prepared.train.langs)


def test_a_corpus_that_changes_while_it_is_read_is_not_kept_under_the_name_of_another(tmp_path, monkeypatch):
    """The name is a hash of what was there before."""
    path = tmp_path / "mine.jsonl"
    spec = job({"corpus": "jsonl", "paths": [write_jsonl(path, sentences(60))], "held_out_pairs": 0.1})
    read = JsonlPairs.pairs

    def changed_first(corpus):
        write_jsonl(path, sentences(61))
        return read(corpus)

    monkeypatch.setattr(JsonlPairs, "pairs", changed_first)
    with refused("changed", "data", None):
        prepare(spec.data, spec.model, tmp_path / "cache")
    monkeypatch.undo()
    assert prepare(spec.data, spec.model, tmp_path / "cache").stats["read"] == 61 * len(LANGS)


def test_progress_goes_through_every_stage_and_never_back(spec, tmp_path):
    """Catalogs know how much of them is read; a file of one's own does not, until it is at its end."""
    told = []
    run(spec, tmp_path / "cache", progress=lambda *step: told.append(step))
    stages = [stage for stage, _, _ in told]
    assert list(dict.fromkeys(stages)) == ["reading", "learning the tokenizer", "encoding", "writing"]
    shares = [share for _, share, _ in told if share is not None]
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < shares[-1] < 1.0
    again = []
    run(spec, tmp_path / "cache", progress=lambda *step: again.append(step))
    assert again == [], "what is found is not prepared"


def test_progress_of_catalogs_is_a_share_from_the_beginning(tmp_path):
    spec = job({"corpus": "catalogs", "languages": ["de", "fr"]})
    told = []
    run(spec, tmp_path / "cache", progress=lambda *step: told.append(step))
    assert all(share is not None for _, share, _ in told)
    reading = [share for stage, share, _ in told if stage == "reading"]
    assert reading[0] == 0.0
    assert reading == sorted(reading)
    assert reading[-1] > 0.1
