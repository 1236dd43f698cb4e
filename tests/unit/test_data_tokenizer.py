"""Tokenizers of pairs: any text is reproduced, and no text is encoded as a special token."""

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


def test_special_tokens_and_ids_beyond_the_vocabulary_are_not_decoded():
    """A model may have more vocabulary entries than a tokenizer of a small corpus."""
    assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
    tokenizer, ids = SHARED.source, SHARED.source.encode("fox")
    assert tokenizer.decode([BOS, *ids, EOS, PAD, PAD, UNK, tokenizer.vocab_size, 399_999]) == "fox"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    texts = [*(pair.source for pair in PAIRS[:20]), ""]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@given(st.text())
def test_every_text_is_reproduced_normalised(text):
    ids = SHARED.source.encode(text)
    assert all(id > UNK for id in ids)
    assert SHARED.source.decode(ids) == normalise(text)


@pytest.mark.parametrize("text", [*LOOKALIKES, "a<pad>b ⟨eos⟩", " ".join(LOOKALIKES)])
def test_text_that_looks_like_a_special_token_is_text(text):
    # Also trained on them: no merge may produce a special token's entry.
    pairs = [Pair("de", " ".join(LOOKALIKES * 50), text)] * 50
    tokenizers = Tokenizers.train(pairs, MODEL)
    for tokenizer in (SHARED.source, tokenizers.source, tokenizers.target):
        ids = tokenizer.encode(text)
        assert min(ids) > UNK
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("is_shared", [True, False])
def test_saved_tokenizers_are_loaded(tmp_path, is_shared):
    model = MODEL.model_copy(update={"share_vocabulary": is_shared, "target_vocab_size": 400 if is_shared else 350})
    tokenizers = Tokenizers.train(PAIRS, model)
    for folder in (tmp_path / "new folder", f"memory://run/{is_shared}"):
        tokenizers.save(folder)
        copy = Tokenizers.load(folder)
        assert copy.is_shared is tokenizers.is_shared is is_shared
        for side in ("source", "target"):
            before, after = getattr(tokenizers, side), getattr(copy, side)
            assert before.vocab_size == after.vocab_size <= 400
            for text in [PAIRS[3].source, PAIRS[3].target, *LOOKALIKES]:
                assert before.encode(text) == after.encode(text)
        assert is_shared or copy.target.vocab_size <= 350
        assert is_shared or copy.source.encode("fox jumps") != copy.target.encode("fox jumps")
    with pytest.raises(FileNotFoundError):
        Tokenizers.load(tmp_path)


TRAIN = """
import sys
from tests.unit.test_data_tokenizer import MODEL, PAIRS
from moe.data.pairs import Tokenizers
pairs = PAIRS[::-1] if sys.argv[1] == "reversed" else PAIRS
sys.stdout.write(Tokenizers.train(pairs, MODEL).source.to_json())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("order", "threads", "seed"), [("forward", "1", "1"), ("reversed", "4", "2")])
def test_training_does_not_depend_on_threads_hash_seed_and_order(order, threads, seed):
    environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", TRAIN, order]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert process.stdout == SHARED.source.to_json()
