"""Tokens that only files next to `tokenizer.json` name, as transformers has them."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from moe.data.tokenizer import Tokenizer
from moe.interchange.tokenizer import tokenizer_json
from moe.spec import SpecError

NAMES = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "[PAD]", "<tool call>", "Word", "the")
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token")
TEXTS = (
    "<|im_start|>user\nthe words<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think> Word  <|endoftext|>",
    "a <tool call> b<tool call>Words WORD word [PAD][pad] <THINK> the",
    "  ".join(NAMES),
    "".join(NAMES).upper(),
)
GLM = ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
       "<|observation|>")  # fmt: skip
"""As zai-org/GLM-4.5 has them, from id 151329 on."""
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>")
"""As Qwen/Qwen3-0.6B has them, from id 151643 on."""


def library() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the words of the user and the assistant, " * 9], trainer)
    return tokenizer


def write_folder(folder: Path, library_tokenizer: tokenizers.Tokenizer, **files: Any) -> Path:
    """Write a folder with a tokenizer, and JSON files by their names without `.json`."""
    folder.mkdir()
    library_tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def flags(random: Random) -> dict[str, bool]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: random.random() < 0.3 for name in names if random.random() < 0.7}


def by_chance(random: Random) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A random tokenizer, and the files next to it."""
    tokenizer, added_names = library(), random.sample(NAMES, random.randrange(4))
    for name in added_names:
        tokenizer.add_tokens([AddedToken(name, **flags(random))])
    ids, next_id = {name: tokenizer.token_to_id(name) for name in NAMES}, tokenizer.get_vocab_size()
    declared_names = random.sample(NAMES, random.randrange(7))
    decoder = {}
    for name in declared_names:
        id = ids[name]
        if id is None:
            id, next_id = next_id, next_id + 1
        decoder[str(id)] = {"content": name, **flags(random)}
    roles: dict[str, Any] = {role: random.choice(NAMES) for role in ROLES if random.random() < 0.3}
    for role in roles:
        if random.random() < 0.3:
            roles[role] = {"__type": "AddedToken", "content": roles[role], **flags(random)}
    extra = random.choice(["extra_special_tokens", "additional_special_tokens"])
    if random.random() < 0.4:
        roles[extra] = random.sample(NAMES, 2)
    elif random.random() < 0.2:
        roles["extra_special_tokens"] = {"audio_token": random.choice(NAMES)}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    if random.random() < 0.7:
        return tokenizer, {"tokenizer_config": {**config, "added_tokens_decoder": decoder}}
    legacy = {entry["content"]: int(id) for id, entry in decoder.items()}
    files: dict[str, Any] = {"tokenizer_config": config, "added_tokens": legacy}
    if random.random() < 0.5:
        files["special_tokens_map"] = {
            "eos_token": {"content": random.choice(NAMES), "lstrip": False, "normalized": True},
            "pad_token": random.choice(NAMES),
        }
    return tokenizer, files


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(150))
def test_tokens_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    library_tokenizer, files = by_chance(Random(seed))
    folder = write_folder(tmp_path / "hub", library_tokenizer, **files)
    reference = AutoTokenizer.from_pretrained(folder)
    decoder = files["tokenizer_config"].get("added_tokens_decoder", {})
    declared_ids = {entry["content"]: int(id) for id, entry in decoder.items()} or files.get("added_tokens", {})
    agrees = all(reference.convert_tokens_to_ids(text) == id for text, id in declared_ids.items())
    if not agrees:
        with pytest.raises(SpecError):
            tokenizer_json(str(folder))
        return
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json(str(folder)).decode())
    assert {id: repr(token) for id, token in tokenizer.get_added_tokens_decoder().items()} == {
        id: repr(token) for id, token in reference.added_tokens_decoder.items()
    }
    for text in TEXTS:
        assert tokenizer.encode(text).ids == reference(text).input_ids


@pytest.mark.parametrize("names", [QWEN, GLM])
def test_published_tokens_are_one_id_each(names: tuple[str, ...], tmp_path: Path) -> None:
    library_tokenizer = library()
    first = library_tokenizer.get_vocab_size()
    decoder = {
        str(first + index): {"content": name, "lstrip": False, "normalized": False, "rstrip": False,
                          "single_word": False, "special": True}
        for index, name in enumerate(names)
    }  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": decoder, "eos_token": names[0]}
    folder = write_folder(tmp_path / "hub", library_tokenizer, tokenizer_config=config)
    tokenizer = Tokenizer.of_model(tokenizer_json(str(folder)).decode(), bos_id=None, eos_id=first)
    (encoding,) = tokenizer.encode_verbatim(["".join(names)])
    assert encoding.ids == list(range(first, first + len(names)))
    assert max(tokenizer.encode("".join(names))) < first, "in a document they are text"


def test_a_tokenizer_with_all_tokens_is_kept_byte_by_byte(tmp_path: Path) -> None:
    library_tokenizer = library()
    library_tokenizer.add_special_tokens([AddedToken(name, special=True) for name in QWEN])
    decoder = {
        id: {"content": token.content, "special": True}
        for id, token in library_tokenizer.get_added_tokens_decoder().items()
    }
    config = {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>"}
    folder = write_folder(tmp_path / "hub", library_tokenizer, tokenizer_config=config)
    assert tokenizer_json(str(folder)) == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("shift", [1, 40, -10])
def test_ids_that_the_two_files_disagree_about_are_refused(shift: int, tmp_path: Path) -> None:
    tokenizer = library()
    decoder = {str(tokenizer.get_vocab_size() + shift): {"content": "<|im_end|>", "special": True}}
    folder = write_folder(tmp_path / "hub", tokenizer, tokenizer_config={"added_tokens_decoder": decoder})
    with pytest.raises(SpecError) as error:
        tokenizer_json(str(folder))
    assert [(problem.path, problem.value) for problem in error.value.problems] == [
        (f"{folder}/tokenizer_config.json", "<|im_end|>")
    ]


@pytest.mark.parametrize(
    "decoder", [[], {"x": {"content": "a"}}, {"7": "a"}, {"7": {"special": True}}, {"7": {"content": 3}}]
)
def test_malformed_declarations_of_tokens_are_refused(decoder: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hub", library(), tokenizer_config={"added_tokens_decoder": decoder})
    with pytest.raises(SpecError, match="added_tokens_decoder"):
        tokenizer_json(str(folder))
