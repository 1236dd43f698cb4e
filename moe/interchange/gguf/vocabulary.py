"""Vocabulary of a GGUF file: byte-level or SentencePiece BPE from a `tokenizer.json`, special tokens and the chat
template."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from moe.data.special_tokens import json_object
from moe.interchange.gguf.sentencepiece_bpe import BYTES, SentencePieceBPE, is_sentencepiece
from moe.interchange.gguf.word_patterns import PATTERNS, WordPattern, patterns_of
from moe.interchange.hub_folder import CONFIG
from moe.interchange.tokenizer import JSON
from moe.spec import spec_error

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from tokenizers import Tokenizer

_REMEDY = "export it with --format huggingface"
_TEMPLATE = "chat_template.jinja"
_READ = ("tokenizer_config.json", "chat_template.json", JSON, CONFIG, _TEMPLATE)
_GENERATION = "generation_config.json"


def add_vocabulary(writer: "GGUFWriter", files: Mapping[str, bytes], vocab_size: int) -> None:
    """Add the tokenizer of a Hugging Face folder's small files, by path. Raises SpecError if llama.cpp would encode
    texts differently."""
    from tokenizers import Tokenizer

    if JSON not in files:
        raise spec_error("not_found", JSON, None, "is required to write GGUF", "add the model's tokenizer")
    content = files[JSON].decode()
    fields, tokenizer = json.loads(content), Tokenizer.from_str(content)
    if is_sentencepiece(fields):
        bpe = SentencePieceBPE.from_tokenizer(fields, JSON)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        tokens, types = _tokens(fields, tokenizer, vocab_size)
        writer.add_token_scores([bpe.scores.get(token, 0.0) for token in tokens])
        writer.add_add_space_prefix(bpe.adds_space_prefix)
    else:
        pattern = _word_pattern(fields)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pattern.name)
        tokens, types = _tokens(fields, tokenizer, vocab_size)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _add_special_tokens(writer, files, tokenizer, load_merges=not is_sentencepiece(fields))


def _word_pattern(fields: Mapping[str, Any]) -> WordPattern:
    """The pre-tokenizer of llama.cpp that splits texts like a `tokenizer.json`. Raises SpecError."""
    model, place = fields.get("model", {}), JSON
    if model.get("type") != "BPE" or model.get("unk_token") is not None:
        rule = "must be BPE: of SentencePiece with byte_fallback, or byte-level without unk_token"
        raise spec_error("unsupported", f"{place}:model", model.get("type"), rule, _REMEDY)
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise spec_error("unsupported", f"{place}:model.{key}", model[key], "is unknown to llama.cpp", _REMEDY)
    normalizer = fields.get("normalizer")
    if normalizer is not None and normalizer.get("type") not in ("NFC", None):
        rule = "is unknown to llama.cpp, which leaves texts unchanged"
        raise spec_error("unsupported", f"{place}:normalizer", normalizer.get("type"), rule, _REMEDY)
    patterns = patterns_of(fields.get("pre_tokenizer"))
    if patterns is None or not (choices := PATTERNS.get(patterns, ())):
        names = ", ".join(sorted(choice.name for named_patterns in PATTERNS.values() for choice in named_patterns))
        rule = f"splits texts in a way that has no name in llama.cpp; those that have: {names}"
        raise spec_error("unsupported", f"{place}:pre_tokenizer", list(patterns or ()), rule, _REMEDY)
    ignores_merges = bool(model.get("ignore_merges"))
    for choice in choices:
        if choice.ignores_merges == ignores_merges:
            return choice
    if not _merges_reach_all_tokens(fields):
        rule = (
            f"must be {choices[0].ignores_merges} with llama.cpp's {choices[0].name}: merges do not lead to all tokens"
        )
        raise spec_error("unsupported", f"{place}:model.ignore_merges", ignores_merges, rule, _REMEDY)
    return choices[0]


def _merges_reach_all_tokens(fields: Mapping[str, Any]) -> bool:
    """Whether merges alone make every token from its characters, so that `ignore_merges` has no effect."""
    from tokenizers import Tokenizer

    plain_fields = {**fields, "model": {**fields["model"], "ignore_merges": False}, "added_tokens": []}
    model = Tokenizer.from_str(json.dumps({**plain_fields, "post_processor": None})).model
    return all(len(model.tokenize(token)) == 1 for token in fields["model"]["vocab"])


def _tokens(fields: Mapping[str, Any], tokenizer: "Tokenizer", vocab_size: int) -> tuple[list[str], list[int]]:
    """(tokens, their types) by id. Raises SpecError."""
    from gguf import TokenType

    vocabulary = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=True).items()}
    if (largest := max(vocabulary)) >= vocab_size:
        rule = f"has the id {largest}, which must be below vocab_size (={vocab_size})"
        raise spec_error("out_of_range", JSON, vocabulary[largest], rule, "use the model's own tokenizer")
    added_tokens = {token["id"]: token for token in fields.get("added_tokens", ())}
    for token in added_tokens.values():
        for key in ("lstrip", "rstrip", "single_word"):
            if token.get(key):
                rule = "is unknown to llama.cpp"
                raise spec_error("unsupported", f"{JSON}:added_tokens.{key}", token["content"], rule, _REMEDY)
    tokens: list[str] = []
    types: list[int] = []
    has_byte_fallback = is_sentencepiece(fields)
    for id in range(vocab_size):
        if id not in vocabulary:
            tokens.append(f"[PAD{id}]")
            types.append(TokenType.UNUSED)
            continue
        tokens.append(vocabulary[id])
        added_token = added_tokens.get(id)
        if has_byte_fallback and tokens[id] == fields["model"].get("unk_token"):
            types.append(TokenType.UNKNOWN)
        elif has_byte_fallback and tokens[id] in BYTES:
            types.append(TokenType.BYTE)
        elif added_token is None:
            types.append(TokenType.NORMAL)
        else:
            types.append(TokenType.CONTROL if added_token.get("special") else TokenType.USER_DEFINED)
    return tokens, types


def _add_special_tokens(
    writer: "GGUFWriter", files: Mapping[str, bytes], tokenizer: "Tokenizer", *, load_merges: bool
) -> None:
    """Add merges, ids of special tokens, which of them begin and end a text, and the chat template."""
    from gguf import SpecialVocab

    with TemporaryDirectory() as folder:
        for name in _READ:
            if name in files:
                (Path(folder) / name).write_bytes(files[name])
        fields = json.loads(files[JSON])
        (Path(folder) / JSON).write_text(json.dumps({**fields, "post_processor": None}))  # it is tried instead, below
        if "tokenizer_config.json" not in files:
            (Path(folder) / "tokenizer_config.json").write_text("{}")
        special = SpecialVocab(folder, load_merges=load_merges)
    ids = special.special_token_ids
    added_ids = tokenizer.encode("a").ids
    plain_ids = tokenizer.encode("a", add_special_tokens=False).ids
    starts = range(len(added_ids) - len(plain_ids) + 1)
    first = next((start for start in starts if added_ids[start : start + len(plain_ids)] == plain_ids), None)
    if first is None:
        rule = "changes the tokens of a text; llama.cpp only adds some before and after it"
        raise spec_error("unsupported", f"{JSON}:post_processor", added_ids, rule, _REMEDY)
    prefix, suffix = added_ids[:first], added_ids[first + len(plain_ids) :]
    for name, token_ids in (("bos", prefix), ("eos", suffix)):
        if token_ids and token_ids != [ids.get(name)]:
            rule = f"adds the tokens {token_ids} to a text; llama.cpp adds none, or {name}_token"
            raise spec_error("unsupported", f"{JSON}:post_processor", token_ids, rule, _REMEDY)
    special.add_special_token = {"bos": bool(prefix), "eos": bool(suffix)}
    special.add_to_gguf(writer, quiet=True)
    ends = json_object(files, _GENERATION).get("eos_token_id")
    further_eos_ids = [id for id in ends if id != ids.get("eos")] if isinstance(ends, list) else []
    # llama.cpp has two further tokens that end a text: of a turn, and of a message.
    for add_token, id in zip((writer.add_eot_token_id, writer.add_eom_token_id), further_eos_ids, strict=False):
        add_token(id)
