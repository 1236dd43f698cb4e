"""Tokenizers: any text goes in and comes out, and no text is a special token."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.pairs import Tokenizers
from moe.data.pairs.pair import Pair
from moe.data.text import normalise
from moe.data.tokenizer import BOS, EOS, PAD, UNK
from tests.unit.data_corpora import job, sentences

PAIRS = [Pair(row["lang"], row["source"], row["target"]) for row in sentences(60)]
MODEL = job({"corpus": "catalogs"}).model
SHARED = Tokenizers.train(PAIRS, MODEL)
LOOKALIKES = ["<pad>", "<bos>", "<eos>", "<unk>", "⟨pad⟩", "⟨bos⟩", "⟨eos⟩", "⟨unk⟩", "[PAD]", "</s>", "<s>"]


def test_the_special_ids_are_the_first_four():
    assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
    assert SHARED.source.decode([BOS, *SHARED.source.encode("fox"), EOS, PAD, PAD, UNK]) == "fox"


@given(st.text())
def test_every_text_comes_back_normalised(text):
    ids = SHARED.source.encode(text)
    assert all(id > UNK for id in ids)
    assert SHARED.source.decode(ids) == normalise(text)


@pytest.mark.parametrize("text", [*LOOKALIKES, "a<pad>b ⟨eos⟩", " ".join(LOOKALIKES)])
def test_text_that_looks_like_a_special_token_is_text(text):
    # Trained on them, too: a merge must not arrive at a special token's own entry.
    pairs = [Pair("de", " ".join(LOOKALIKES * 50), text)] * 50
    tokenizers = Tokenizers.train(pairs, MODEL)
    for tokenizer in (SHARED.source, tokenizers.source, tokenizers.target):
        ids = tokenizer.encode(text)
        assert min(ids) > UNK
        assert tokenizer.decode(ids) == text


def test_half_a_surrogate_pair_is_no_crash():
    assert SHARED.source.decode(SHARED.source.encode("a\ud800b")) == "a?b"


def test_ids_beyond_the_vocabulary_are_left_out():
    """A model may have more entries than a small corpus gave the tokenizer."""
    assert SHARED.target.decode([*SHARED.target.encode("fox"), SHARED.target.vocab_size, 399_999]) == "fox"


def test_a_batch_is_its_texts_one_by_one():
    texts = [pair.source for pair in PAIRS[:20]] + [""]
    assert SHARED.source.encode_batch(texts) == [SHARED.source.encode(text) for text in texts]


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_saved_is_loaded(tmp_path, shared):
    model = MODEL.model_copy(update={"share_vocabulary": shared, "target_vocab_size": 400 if shared else 350})
    tokenizers = Tokenizers.train(PAIRS, model)
    tokenizers.save(tmp_path / "new folder")
    loaded = Tokenizers.load(tmp_path / "new folder")
    assert loaded.is_shared is tokenizers.is_shared is shared
    for side in ("source", "target"):
        before, after = getattr(tokenizers, side), getattr(loaded, side)
        assert before.vocab_size == after.vocab_size <= 400
        for text in [PAIRS[3].source, PAIRS[3].target, *LOOKALIKES]:
            assert before.encode(text) == after.encode(text)
    if not shared:
        assert loaded.target.vocab_size <= 350
        assert loaded.source.encode("fox jumps") != loaded.target.encode("fox jumps")


def test_tokenizers_are_kept_on_any_storage():
    SHARED.save("memory://run/checkpoint")
    assert Tokenizers.load("memory://run/checkpoint").source.encode("fox") == SHARED.source.encode("fox")


def test_tokenizers_that_are_not_there_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Tokenizers.load(tmp_path)


def test_training_is_the_same_with_any_threads_hash_seed_and_order(tmp_path):
    program = """
import sys
from tests.unit.test_data_tokenizer import MODEL, PAIRS
from moe.data.pairs import Tokenizers
pairs = PAIRS[::-1] if sys.argv[1] == "reversed" else PAIRS
sys.stdout.write(Tokenizers.train(pairs, MODEL).source.to_json())
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program, order],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for order, threads, seed in (("forward", "1", "1"), ("reversed", "4", "2"))
    ]  # fmt: skip
    assert outputs[0] == outputs[1] == SHARED.source.to_json()
