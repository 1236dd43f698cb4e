"""The report of a run against slow counting, and the translator loaded from its checkpoint."""

import os
import shutil
from collections import Counter

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn import functional

from moe.data.pairs import Tokenizers
from moe.export.load import load_trained
from moe.export.model_folder import ExportError, load_exported, save_exported
from moe.export.trained_model import TrainedModel
from moe.parallel import Layout
from moe.records import Example
from moe.storage.folder import MAX_READ_BYTES, Folder
from moe.tasks.batch_context import BatchContext
from moe.tasks.translation import build_model
from moe.tasks.translation.evaluate import evaluate, most_frequent_target, one_per_script, unigram_logp
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.checkpointer import CheckpointError
from tests.unit.train_runs import corpus, job, prepare_pairs, run

TOKENIZER = "tokenizers/tokenizer.json"


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """(spec, data, storage, report) of a run long enough for translations to differ between rows."""
    folder = tmp_path_factory.mktemp("trained")
    spec = job(
        corpus(folder), checkpoint={"every_steps": 1000},
        train={"num_steps": 80, "batch_tokens": 512, "evaluation": {"num_examples": 5}},
    )  # fmt: skip
    outcome, _ = run(spec, folder / "storage", folder / "cache")
    return spec, prepare_pairs(spec, folder / "cache"), folder / "storage", outcome.report


@pytest.fixture(scope="module")
def translator(long_run):
    return load_trained(f"{long_run[2]}/checkpoints/step-00000080.a1.g0")


@pytest.mark.slow
def test_baselines_equal_counting(long_run):
    store = long_run[1].train
    targets = [tuple(store.target(row).tolist()) for row in range(store.num_pairs)]
    row = next(row for row in range(store.num_pairs) if store.text(row)[1] == most_frequent_target(store))
    assert targets.count(targets[row]) == Counter(targets).most_common(1)[0][1]
    tokens = Counter(token for target in targets for token in target)
    counts = np.array([tokens[token] + 1 for token in range(400)])
    np.testing.assert_allclose(unigram_logp(store, 400), np.log(counts / counts.sum()))


def test_loss_is_that_of_each_pair_alone_without_padding_or_drops(long_run, translator):
    _, data, _, report = long_run
    model = translator.model
    for name, store in data.held_out.items():
        nll, unigram, count = 0.0, 0.0, 0
        for row in range(store.num_pairs):
            source, target = (torch.tensor(side(row).tolist())[None] for side in (store.source, store.target))
            target_in = functional.pad(target[:, :-1], (1, 0), value=1)
            with torch.no_grad():
                logits = model(source, target_in, BatchContext(training=False))
            nll += float(functional.cross_entropy(logits[0], target[0], reduction="sum"))
            unigram -= unigram_logp(data.train, 400)[target[0].numpy()].sum()
            count += target.numel()
        scores = report.sets[name]
        assert (scores.num_pairs, scores.num_target_tokens) == (store.num_pairs, count)
        assert isinstance(scores.num_target_tokens, int)
        assert scores.loss == pytest.approx(nll / count, rel=1e-5)
        assert scores.unigram_loss == pytest.approx(unigram / count)


def test_subsets_and_systems(long_run):
    _, data, _, report = long_run
    assert report.languages["not_latin"] == ("ja", "ru")
    thirds = [report.languages[third] for third in ("high", "mid", "low")]
    assert sorted(lang for third in thirds for lang in third) == ["de", "fr", "ja", "ru"]
    by_size = {lang: facts["train"] for lang, facts in data.stats["languages"].items()}
    assert min(by_size[lang] for lang in thirds[0]) >= max(by_size[lang] for lang in thirds[1])
    for name, store in data.held_out.items():
        subsets = report.sets[name].subsets
        assert subsets["all"].num_pairs == store.num_pairs
        assert sum(subsets[third].num_pairs for third in ("high", "mid", "low")) == store.num_pairs
        langs = [store.text(row)[2] for row in range(store.num_pairs)]
        assert subsets["not_latin"].num_pairs == sum(lang in ("ja", "ru") for lang in langs)
    assert report.sets["seen"].subsets["all"].model.chrf > 20
    training_texts, seen_texts = (
        [store.text(row) for row in range(store.num_pairs)] for store in (data.train, data.held_out["seen"])
    )
    assert report.most_frequent_target in {text[1] for text in training_texts}
    pairs = {text[:2] for text in training_texts}
    assert report.sets["seen"].num_with_text_in_training == sum(text[:2] in pairs for text in seen_texts)
    assert "num_with_text_in_training" not in report.sets["unseen"].to_plain()


def test_the_translator_says_what_the_report_says(long_run, translator):
    report = long_run[3]
    assert len(report.examples) == 5
    assert {row.script for row in report.examples} == {"Latin", "Cyrillic", "Hiragana"}
    translations = translator.generate([row.source for row in report.examples])
    assert translations == [row.translation for row in report.examples]
    assert len(set(translations)) > 1
    assert translator.generate([]) == []
    texts = ["", "один 1", " ", "x" * 5000, "один 1", "\ud800", "𝄞 ⟨eos⟩"]
    translations = translator.generate(texts)
    assert (len(translations), translations[0], translations[1]) == (7, "", translations[4])


def test_a_set_without_pairs_has_no_loss(tmp_path):
    data = {**corpus(tmp_path), "languages": ["de"]}  # no pair is seen in another language
    spec = job(data, checkpoint={"every_steps": 1000}, train={"num_steps": 1})
    outcome, _ = run(spec, tmp_path / "storage", tmp_path / "cache")
    empty_set = outcome.report.sets["seen"]
    assert (empty_set.num_pairs, empty_set.loss, empty_set.unigram_loss) == (0, None, None)
    assert outcome.report.sets["unseen"].loss > 0


def test_an_exported_model_is_the_model(long_run, translator, tmp_path):
    checkpoint = f"{long_run[2]}/checkpoints/step-00000080.a1.g0"
    folder = save_exported(TrainedModel.load(checkpoint), tmp_path / "deep" / "exported")
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json"]
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    expected = dict(translator.model.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in expected.items())
    texts = [row.source for row in long_run[3].examples]
    assert load_trained(str(folder)).generate(texts) == translator.generate(texts)
    assert load_exported(folder).step == 80


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        (TOKENIZER, MAX_READ_BYTES + 1, "has more than 268,435,456 bytes"),
        (TOKENIZER, b"garbage", r"not a valid tokenizer\.json: "),
        (TOKENIZER, b"\xff", "can't decode byte 0xff"),
        (TOKENIZER, None, r"tokenizer\.source\.json"),
        ("spec.json", b"[" * 200_000, "must hold a spec that this release can read, but"),
        ("spec.json", b"{}", "must hold a spec that this release can read, but"),
        ("spec.json", None, r"spec\.json"),
        (".metadata", b"garbage", "is not a checkpoint written by a run"),
    ],
)
def test_a_sealed_checkpoint_that_no_run_wrote_is_refused(long_run, tmp_path, path, content, why):
    """Sealed with its new content (`content`: bytes, a length, or None for a missing file), as a user with access to
    the storage can do."""
    name = "step-00000080.a1.g0"
    shutil.copytree(long_run[2] / "checkpoints", tmp_path / "checkpoints")
    target, checkpoints = tmp_path / "checkpoints" / name / path, Folder(f"{tmp_path}/checkpoints")
    if isinstance(content, int):
        os.truncate(target, content)
    elif content is None:
        target.unlink()
    else:
        target.write_bytes(content)
    before = markers.read(checkpoints, name)
    files = {file: seal for file, seal in before.files.items() if file != path}
    if target.exists():
        files[path] = markers.seal(target.read_bytes())
    checkpoints.write(name + markers.SUFFIX, before.model_copy(update={"files": files}).to_bytes())
    with pytest.raises(CheckpointError, match=f"(?s)must be a run's checkpoint: .*{why}"):
        TrainedModel.load(f"{tmp_path}/checkpoints/{name}")


def test_an_export_overwrites_nothing_and_leaves_nothing_unfinished(long_run, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    model = TrainedModel.load(f"{long_run[2]}/checkpoints/step-00000080.a1.g0")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").touch()
    with pytest.raises(ExportError, match="already exists; name a new folder"):
        save_exported(model, tmp_path / "there")
    with pytest.raises(ExportError, match=r"holds no exported model: it has no config\.json"):
        load_exported(tmp_path / "there")
    monkeypatch.setattr(Tokenizers, "save", fail)  # a disk full at that moment
    with pytest.raises(OSError, match="full"):
        save_exported(model, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_translator_refuses_what_is_not_whole(long_run, tmp_path, translator):
    folder = long_run[2] / "checkpoints"
    with pytest.raises(CheckpointError, match=r"no marker step-00000070\.a1\.g0\.commit\.json; .*: step-00000080"):
        load_trained(f"{folder}/step-00000070.a1.g0")
    for source in folder.iterdir():
        if source.is_file():
            (tmp_path / source.name).write_bytes(source.read_bytes())
    with pytest.raises(CheckpointError, match=r"must be a committed, intact checkpoint, but .* is missing"):
        load_trained(f"{tmp_path}/step-00000080.a1.g0")


def test_a_smaller_part_of_each_set_stands_for_it(long_run):
    spec, data, _, _ = long_run
    evaluation = spec.train.evaluation.model_copy(update={"max_pairs": 3, "num_examples": 0})
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"evaluation": evaluation})})
    report = evaluate(build_model(spec.model), Layout.single(), data, spec)
    assert [scores.num_pairs for scores in report.sets.values()] == [3, 3]
    assert report.examples == ()


def test_examples_come_from_as_many_scripts_as_there_are():
    rows = [
        Example("seen", "xx", script, "a source", f"a reference of some length {number}", "a translation")
        for script, count in {"Latin": 9, "Cyrillic": 5, "Thai": 1}.items()
        for number in range(count)
    ]
    assert [row.script for row in one_per_script(rows, 5)] == ["Latin", "Cyrillic", "Thai", "Latin", "Cyrillic"]
    for number in range(20):
        examples = one_per_script(rows, number)
        assert len(set(examples)) == len(examples) == min(number, 15)
