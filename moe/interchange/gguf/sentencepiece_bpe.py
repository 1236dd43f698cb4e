"""SentencePiece's BPE as llama.cpp computes it: adjacent pieces are merged where the result is a token, that of the
highest score first.

A `tokenizer.json` has merges in order of rank instead. Both encode texts alike if the merges are all pairs of pieces
that join to a token, as converters of SentencePiece models write them, and if no token's merges rank between those of
another. Where one text allows two merges to the same token that overlap, SentencePiece and llama.cpp take the left one,
and `tokenizers` the one of the lower rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe.spec import spec_error

SPACE = "▁"
_REMEDY = "export it with --format huggingface"
_PREPEND = {"type": "Prepend", "prepend": SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_WORDS = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
"""Pre-tokenizer of Gemma's tokenizers, which finds no space, since the normalizer has replaced them."""
_METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False}
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True)
class SentencePieceBPE:
    """Vocabulary of llama.cpp's model `llama`."""

    scores: Mapping[str, float]
    """Score of each token that merges lead to."""
    adds_space_prefix: bool
    """Whether a space is added before a text, and after each special token."""

    @classmethod
    def from_tokenizer(cls, fields: Mapping[str, Any], place: str) -> "SentencePieceBPE":
        """The vocabulary of a `tokenizer.json` with byte fallback. Raises SpecError if llama.cpp would encode texts
        differently."""
        model = fields["model"]
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
            if model.get(key):
                raise spec_error("unsupported", f"{place}:model.{key}", model[key], "is unknown to llama.cpp", _REMEDY)
        if missing := sorted(BYTES - model["vocab"].keys()):
            rule = f"lacks the token {missing[0]} of a byte; llama.cpp falls back to bytes"
            raise spec_error("missing", f"{place}:model.vocab", len(missing), rule, _REMEDY)
        adds_space_prefix = _adds_space_prefix(fields)
        if adds_space_prefix is None:
            steps = [fields.get("normalizer"), fields.get("pre_tokenizer")]
            rule = (
                "must be the normalizers Prepend and Replace of spaces, Replace alone, or Metaspace that never prepends"
            )
            raise spec_error("unsupported", f"{place}:normalizer", [_type(step) for step in steps], rule, _REMEDY)
        special_tokens = {token["content"] for token in fields.get("added_tokens", ())}
        pieces = model["vocab"].keys() - special_tokens - BYTES
        return cls(_scores(pieces, list(_merges(model)), place), adds_space_prefix)


def is_sentencepiece(fields: Mapping[str, Any]) -> bool:
    """Whether a `tokenizer.json` is BPE over characters that falls back to bytes."""
    model = fields.get("model", {})
    return model.get("type") == "BPE" and bool(model.get("byte_fallback"))


def _adds_space_prefix(fields: Mapping[str, Any]) -> bool | None:
    """Whether a space is added before a text; None for a normalizer or pre-tokenizer that llama.cpp lacks."""
    normalizer, words = fields.get("normalizer"), fields.get("pre_tokenizer")
    if normalizer is None and words == _METASPACE:
        return False
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    if words in (None, _WORDS) and steps == [_REPLACE]:
        return False
    if words is None and steps == [_PREPEND, _REPLACE]:
        return True
    return None


def _type(step: Mapping[str, Any] | None) -> str | None:
    return None if step is None else step.get("type")


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of pieces by rank; older files join them by a space."""
    for merge in model.get("merges", ()):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _scores(pieces: set[str], merges: list[tuple[str, str]], place: str) -> dict[str, float]:
    """Scores by token, the highest for the merges of the lowest rank. Raises SpecError."""
    scores: dict[str, float] = {}
    last_token = None
    for rank, (left, right) in enumerate(merges):
        token = left + right
        if token == last_token:
            continue
        if token in scores:
            rule = "has merges to one token between those to another, which scores do not express"
            raise spec_error("unsupported", f"{place}:model.merges", [left, right], rule, _REMEDY)
        scores[token], last_token = -float(rank), token
    pairs = set(merges)
    for token in pieces:
        for length in range(1, len(token)):
            left, right = token[:length], token[length:]
            if all(len(piece) == 1 or piece in pieces for piece in (left, right)) and (left, right) not in pairs:
                rule = f"lacks a merge that llama.cpp would do: {token!r} is a token"
                raise spec_error("missing", f"{place}:model.merges", [left, right], rule, _REMEDY)
    return scores
