"""SentencePiece tokenizers in GGUF files: trained by SentencePiece, converted as transformers does, and held against
llama.cpp's own encoding."""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import SentencePieceExtractor

from tests.interchange import llama_cpp
from tests.interchange.test_gguf import TEXTS, folder_of, write
from tests.refusals import expect_problem

VOCAB_SIZE = 600
REPLACE = normalizers.Replace(" ", "▁")
STEPS = {
    "Llama, Mixtral": (normalizers.Sequence([normalizers.Prepend("▁"), REPLACE]), None),
    "Gemma": (REPLACE, pre_tokenizers.Split(" ", "merged_with_previous")),
    "never prepended": (None, pre_tokenizers.Metaspace("▁", "never", split=False)),
}
"""Normalizers and pre-tokenizers of published files."""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece")
    (path / "text.txt").write_text("\n".join([Path(__file__).read_text(), *TEXTS, *Path(__file__).parts]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "text.txt"), model_prefix=str(path / "tokenizer"), model_type="bpe", vocab_size=VOCAB_SIZE,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.98, split_digits=True, minloglevel=2,
    )  # fmt: skip
    return path / "tokenizer.model"


def tokenizer_of(model_file: Path, steps: str) -> Tokenizer:
    extracted = SentencePieceExtractor(str(model_file)).extract(models.BPE)
    model = models.BPE(extracted["vocab"], extracted["merges"], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    normalizer, words = STEPS[steps]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if words is not None:
        tokenizer.pre_tokenizer = words
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("[INST]", normalized=False, special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def sentencepiece_folder(path: Path, tokenizer: Tokenizer, **fields: Any) -> Path:
    """A tiny Mixtral with the tokenizer, some of whose fields are replaced."""
    folder = folder_of("mixtral", path, tokenizer, vocab_size=VOCAB_SIZE + 8, bos_token_id=1, eos_token_id=2,
                       num_hidden_layers=1)  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, **fields}))
    return folder


@pytest.mark.parametrize(
    "steps", [next(iter(STEPS)), *(pytest.param(steps, marks=pytest.mark.slow) for steps in list(STEPS)[1:])]
)
def test_llama_cpp_encodes_texts_like_sentencepiece(tmp_path: Path, model_file: Path, steps: str) -> None:
    tokenizer = tokenizer_of(model_file, steps)
    file = write(sentencepiece_folder(tmp_path / "folder", tokenizer), tmp_path / "tiny.gguf")
    chance = random.Random(steps)
    words = [
        "test",
        "def ",
        " the",
        "  ",
        "\n",
        "é",
        "漢",
        "🚀",
        "12",
        "_of",
        "[INST]",
        "</s>",
        "a",
        "sentencepiece",
        "ß",
    ]
    texts = [*TEXTS, *("".join(chance.choices(words, k=12)) for _ in range(200))]
    expected = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    (ids,) = llama_cpp.ask([{"file": file, "texts": texts}])
    assert ids == expected
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    types = fields["tokenizer.ggml.token_type"].contents()
    assert types[:3] == [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    assert types.count(gguf.TokenType.BYTE) == 256
    if steps == "Llama, Mixtral":
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        plain_texts = [text for text in texts if not any(token in text for token in ("[INST]", "</s>", "<s>"))]
        encodings = tokenizer.encode_batch(plain_texts, add_special_tokens=False)
        assert [encoding.ids for encoding in encodings] == [processor.encode(text) for text in plain_texts]


def changed(tokenizer: Tokenizer, **fields: Any) -> dict[str, Any]:
    return {"model": {**json.loads(tokenizer.to_str())["model"], **fields}}


def test_tokenizers_that_llama_cpp_computes_differently_are_refused(tmp_path: Path, model_file: Path) -> None:
    tokenizer = tokenizer_of(model_file, "Llama, Mixtral")
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    first_token = "".join(merges[0])
    split = next(rank for rank in range(1, len(merges)) if "".join(merges[rank]) != first_token)
    metaspace = json.loads(pre_tokenizers.Metaspace("▁", "first", split=False).__getstate__())
    without_byte = {("<0x0B>" if token == "<0x0A>" else token): id for token, id in vocab.items()}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("missing", "tokenizer.json:model.merges", changed(tokenizer, merges=merges[1:])),
        ("missing", "tokenizer.json:model.vocab", changed(tokenizer, vocab=without_byte)),
        ("unsupported", "tokenizer.json:model.dropout", changed(tokenizer, dropout=0.1)),
        ("unsupported", "tokenizer.json:model.merges",
         changed(tokenizer, merges=[*merges[split:], *merges[:split], merges[split]])),
        ("unsupported", "tokenizer.json:normalizer", {"normalizer": None, "pre_tokenizer": metaspace}),
    ]  # fmt: skip
    for number, (code, path, fields) in enumerate(cases):
        folder = sentencepiece_folder(tmp_path / str(number), tokenizer, **fields)
        with expect_problem(code, path):
            write(folder, tmp_path / f"{number}.gguf")
        assert not (tmp_path / f"{number}.gguf").exists()
