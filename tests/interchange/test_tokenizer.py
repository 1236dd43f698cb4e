"""Tokenizers read and exported; a tiktoken file compared with a plain implementation of tiktoken."""

import base64
import itertools
import json
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.interchange.tokenizer import NUM_SPECIAL, PATTERN, export_tokenizer, of_tiktoken, ranks_of, tokenizer_json
from tests.interchange import tiny
from tests.refusals import expect_problem

TEXT = "It's the year 2024, they'll say 你好世界! naïve Straße … don't\n\n  STOP  the aaaa aaab abab world worlds"


def trained_ranks(num_merges: int = 120) -> dict[bytes, int]:
    """Ranks of byte pair encoding trained on a short text."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in regex.findall(PATTERN, TEXT * 3, regex.V1)]
    for _ in range(num_merges):
        pairs: dict[bytes, int] = {}
        for word in words:
            for left, right in itertools.pairwise(word):
                pairs[left + right] = pairs.get(left + right, 0) + 1
        fresh = [pair for pair in pairs if pair not in ranks]
        if not fresh:
            break
        best = max(fresh, key=lambda pair: (pairs[pair], pair))
        ranks[best] = len(ranks)
        words = [plain_pieces(b"".join(word), ranks) for word in words]
    return ranks


def plain_pieces(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Join the first neighbours whose union has the lowest rank, until no union is a token."""
    if word in ranks:
        return [word]
    parts = [word[start : start + 1] for start in range(len(word))]
    while True:
        unions = [(ranks[parts[place] + parts[place + 1]], place) for place in range(len(parts) - 1)
                  if parts[place] + parts[place + 1] in ranks]  # fmt: skip
        if not unions:
            return parts
        _, index = min(unions)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


RANKS = trained_ranks()
FILE = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items())
TOKENIZER = Tokenizer.from_str(of_tiktoken(FILE, {len(RANKS): "[BOS]", len(RANKS) + 1: "[EOS]"}))


@given(st.text(max_size=40) | st.text(alphabet="abIt's the年好\n 12", max_size=60))
def test_a_tiktoken_file_encodes_as_tiktoken_does(text: str):
    words = regex.findall(PATTERN, text, regex.V1)
    assert "".join(words) == text
    expected = [RANKS[part] for word in words for part in plain_pieces(word.encode(), RANKS)]
    assert TOKENIZER.encode(text, add_special_tokens=False).ids == expected
    assert TOKENIZER.decode(expected) == text


def test_special_tokens_have_the_ids_behind_the_files():
    assert TOKENIZER.token_to_id("[BOS]") == len(RANKS)
    assert TOKENIZER.encode("a[EOS]").ids[-1] == len(RANKS) + 1
    assert TOKENIZER.get_vocab_size() == len(RANKS) + NUM_SPECIAL
    assert ranks_of(FILE) == RANKS


@pytest.mark.parametrize("content", [b"!!! 0\n", b"YQ==\n", b"YQ== 7\n", b"", base64.b64encode(b"a" * 600) + b" 0\n"])
def test_another_file_is_no_tiktoken_file(content: bytes):
    with expect_problem("invalid_syntax", "model.from/tiktoken.model", None):
        export_tokenizer({"tiktoken.model": content})


def test_a_folder_with_a_tiktoken_file_is_written_with_a_tokenizer_that_needs_no_code(tmp_path: Path):
    from transformers import AutoTokenizer

    folder, out = tiny.folder_of(tiny.their_model("deepseek_v3"), tmp_path / "kimi"), tmp_path / "out"
    config = {**tiny.config_of(folder), "model_type": "kimi_k2", "auto_map": {"AutoConfig": "code.DeepseekV3Config"}}
    special = {str(len(RANKS)): {"content": "[BOS]", "special": True}}
    tokenizer_config = {"auto_map": {"AutoTokenizer": ["code.T", None]}, "tokenizer_class": "TikTokenTokenizer",
            "added_tokens_decoder": special, "bos_token": "[BOS]", "chat_template": "{{ messages }}"}  # fmt: skip
    (folder / "additional_chat_templates").mkdir()
    for name, content in {
        "config.json": json.dumps(config), "code.py": "raise SystemExit('never run')",
        "tokenizer_config.json": json.dumps(tokenizer_config), "generation_config.json": '{"eos_token_id": [2, 3]}',
        "additional_chat_templates/tools.jinja": "{{ tools }}",
    }.items():  # fmt: skip
        (folder / name).write_text(content)
    (folder / "tiktoken.model").write_bytes(FILE)
    spec = tiny.spec_of(config)
    model = tiny.blank(spec)
    (note,) = load_weights(str(folder), model, spec).notes
    assert "auto_map" in note
    assert "never run" in note
    save_folder(spec, ModelSource(model), out, origin=Origin.of_folder(str(folder), spec))
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "additional_chat_templates", "config.json", "generation_config.json", "model.safetensors",
        "shardyard.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    for name in ("generation_config.json", "additional_chat_templates/tools.jinja"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert tiny.config_of(out)["model_type"] == "deepseek_v3"
    assert "auto_map" not in tiny.config_of(out)
    assert AutoTokenizer.from_pretrained(out)("the world")["input_ids"] == TOKENIZER.encode("the world").ids
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert tokenizer_json(str(folder)) == (out / "tokenizer.json").read_bytes()


def test_a_tokenizer_is_kept_byte_by_byte(tmp_path: Path):
    folder = tiny.folder_of(tiny.their_model("llama"), tmp_path / "llama")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text('{"bos_token": "[BOS]"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    spec = tiny.spec_of(tiny.config_of(folder))
    origin = Origin.of_folder(str(folder), spec)
    second_origin = Origin.of_files(origin.to_files().__getitem__)
    assert second_origin == origin
    model = tiny.blank(spec)
    load_weights(str(folder), model, spec)
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=second_origin)
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    (folder / "tokenizer.json").unlink()
    with expect_problem("not_found", "model.from"):
        tokenizer_json(str(folder))


@pytest.mark.parametrize(
    ("file", "tokenizer_class"),
    [("tokenizer.json", "PreTrainedTokenizerFast"), ("tokenizer.model", "Theirs")],  # the fast one reads the first only
)
def test_code_beside_a_tokenizer_is_no_longer_named(file: str, tokenizer_class: str) -> None:
    """Also where nothing is converted, since the code that `auto_map` names is not copied."""
    rest = {"eos_token": "x", "chat_template": "\ud800"}  # JSON has it, and UTF-8 has not
    config = {"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]}, "tokenizer_class": "Theirs", **rest}
    files = {file: b"{}", "tokenizer_config.json": json.dumps(config).encode()}
    export = json.loads(export_tokenizer(files)["tokenizer_config.json"])
    assert export == {**rest, "tokenizer_class": tokenizer_class}
    plain = {**files, "tokenizer_config.json": b'{"eos_token":  "x"}'}
    assert export_tokenizer(plain) == plain, "byte by byte, where there is none"
