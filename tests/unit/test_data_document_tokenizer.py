"""Tokenizers of documents: every text is reproduced, and a given tokenizer is tried before it is used."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from moe.data.limited_process import LimitedProcessError, run_limited
from moe.data.sequences import ModelTokenizer, check, encoding, model_tokenizer
from moe.data.sequences.corpus import SourceDocument
from moe.data.sequences.encoding import encode_documents
from moe.data.sequences.model_tokenizer import require_usable
from moe.data.sequences.prepared import sample
from moe.data.tokenizer import UNK, TextForm, Tokenizer
from moe.spec import PackagesSpec, SpecError
from tests.refusals import expect_problem
from tests.unit.documents import texts

OURS = Tokenizer.train(texts(50), 400, TextForm.DOCUMENTS)
CODE = st.text(alphabet=st.sampled_from(list("ab(): \t\n\r=#é中\u0301\u200d😀1")), max_size=60)


@given(st.text() | CODE | st.sampled_from(("<s>", "⟨eos⟩", "⟨pad⟩⟨bos⟩")))
def test_every_text_is_reproduced(text):
    """Also text that looks like a special token."""
    ids = OURS.encode(text)
    assert all(id > UNK for id in ids)
    assert OURS.decode(ids) == text


@pytest.mark.parametrize("indentation", ["        ", "            ", "\t\t"])
def test_indentation_is_one_token_with_the_end_of_the_line(indentation):
    code = f"if x:\n{indentation}return x\n" * 100
    assert len(Tokenizer.train([code], 400, TextForm.DOCUMENTS).encode(code)) <= 6 * 100


def test_merges_are_learned_from_the_same_texts_in_any_order_and_not_from_held_out_ones():
    documents = [SourceDocument("a", text, False) for text in texts(40)]
    held_out = [SourceDocument("a", "held out " * 10, True)]
    assert sorted(sample(documents)) == sorted(texts(40))
    excerpts = sample(documents + held_out, max_chars=500)
    assert excerpts == sample(held_out + documents[::-1], max_chars=500)
    assert 0 < sum(map(len, excerpts)) <= 500
    assert sample(documents[:1], max_chars=1) == texts(1)


def test_a_long_document_is_encoded_in_parts_to_the_same_text(monkeypatch):
    # Nothing is faked: the same code cuts at a thousand characters; a document of millions would take minutes.
    monkeypatch.setattr(encoding, "PART_CHARS", 1000)
    long = "x = 1\n" * 300 + "y" * 1010
    documents = [
        SourceDocument("a", "short", False),
        SourceDocument("a", long, False),
        SourceDocument("b", "last", True),
    ]
    encoded_documents = list(encode_documents(OURS, documents))
    assert [document.document for document in encoded_documents] == documents
    assert [OURS.decode(document.ids.tolist()) for document in encoded_documents] == ["short", long, "last"]


def given_tokenizer(pattern=r"\w+|\W", **fields):
    """A Hugging Face tokenizer.json with special tokens, formatted differently from the library's own."""
    library = Library(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library.train_from_iterator(
        texts(20),
        trainers.BpeTrainer(vocab_size=290, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False),
    )
    library.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|user|>", special=True)])
    content = json.dumps(json.loads(library.to_str()), indent=7).encode()
    return ModelTokenizer({"tokenizer.json": content}, **{"eos_id": library.token_to_id("<|end|>"), **fields})


def test_no_text_is_encoded_as_a_special_token_of_a_given_tokenizer():
    original = given_tokenizer()
    require_usable(original, original.eos_id + 2, sample=["hello é"])
    tokenizer = Tokenizer.of_model(original.files["tokenizer.json"].decode(), bos_id=None, eos_id=original.eos_id)
    text = "a <|end|> b <|user|><unk>\n"
    ids = tokenizer.encode(text)
    assert max(ids) < original.eos_id
    assert tokenizer.decode([original.eos_id, *ids, original.eos_id + 1]) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.num_ids) == (
        original.eos_id,
        original.eos_id,
        original.eos_id + 2,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(?:a|a)*$"])
def test_a_pattern_that_backtracks_without_end_is_refused(pattern):
    with expect_problem("unsupported", "model.tokenizer", "tokenizer.json"):
        check(PackagesSpec(corpus="packages"), [], given_tokenizer(pattern), 1000)


@pytest.mark.slow
def test_a_pattern_that_takes_hours_is_stopped(monkeypatch):
    """No single search reaches the library's own limit, but there are very many searches."""
    monkeypatch.setattr(model_tokenizer, "TIMEOUT_S", 4.0)  # instead of a minute
    with pytest.raises(SpecError, match=r"exceeds its time limit of 4 s, encoding text"):
        require_usable(given_tokenizer("ß*ß*ß*z"), 1000, ["ß" * 300 + "1z"] * 1000)


@pytest.mark.sample(1)
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1]", b"[" * 100_000])
def test_an_invalid_tokenizer_is_refused(content):
    with expect_problem("unsupported", "model.tokenizer", "tokenizer.json"):
        require_usable(ModelTokenizer({"tokenizer.json": content}, eos_id=0), 1000, [])


def test_ids_outside_the_vocabularies_are_refused():
    with expect_problem("out_of_range", "model.from.vocab_size", 100):
        require_usable(given_tokenizer(place="model.from"), 100, [])
    with expect_problem("unsupported", "model.tokenizer", "tokenizer.json"):
        require_usable(given_tokenizer(eos_id=5000), 1000, [])


def test_a_limited_process_has_little_memory_no_environment_and_says_how_it_ended(tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text(
        "import os, sys\nfrom moe.data.limited_process import apply_limits\napply_limits()\n"
        "print(os.environ.get('SECRET'), sys.stdin.read())\n"
        "x = bytearray(1 << 30) if len(sys.argv[1]) < 10 else None\n"
    )
    monkeypatch.setenv("SECRET", "token")
    monkeypatch.setattr("moe.data.limited_process._SOURCE_FOLDER", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    assert run_limited("greedy", b"given", timeout_s=60, memory_bytes=4 << 30) == b"None given\n"
    with pytest.raises(LimitedProcessError, match=r"crashes its reader \(exit status 1: MemoryError\)"):
        run_limited("greedy", b"", timeout_s=60, memory_bytes=512 << 20)


TRAIN = """
import sys
from tests.unit.documents import texts
from moe.data.tokenizer import TextForm, Tokenizer
sys.stdout.write(Tokenizer.train(texts(50), 400, TextForm.DOCUMENTS).to_json())
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("threads", ["4", "1"])
def test_learning_does_not_depend_on_threads(threads):
    environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
    command = [sys.executable, "-c", TRAIN]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert process.stdout == OURS.to_json()
