"""Names that llama.cpp has for the ways in which byte-level BPE splits a text into words, by the patterns of a
`tokenizer.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe.interchange.tokenizer import PATTERN as KIMI

GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGNS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SIGNS_AND_SPACE}"
QWEN3_5 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}" for upper, lower in (("*", "+"), ("+", "*")))
_SIGNS_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS_WITH_SLASH}"
TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS_WITH_SLASH}"
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
DIGIT = r"\p{N}"


@dataclass(frozen=True)
class WordPattern:
    """A pre-tokenizer of llama.cpp."""

    name: str
    ignores_merges: bool = False
    """Whether a word that is a token is used whole, even if no merges lead to it."""


PATTERNS: Mapping[tuple[str, ...], tuple[WordPattern, ...]] = {
    (GPT2,): (WordPattern("gpt-2"),),
    (DIGIT, GPT2): (WordPattern("smollm"),),
    (QWEN2,): (WordPattern("qwen2"),),
    (QWEN3_5,): (WordPattern("qwen35"),),
    (LLAMA3,): (WordPattern("dbrx"), WordPattern("llama-bpe", ignores_merges=True)),
    (GPT4O,): (WordPattern("gpt-4o"),),
    (TEKKEN,): (WordPattern("tekken", ignores_merges=True),),
    DEEPSEEK_V3: (WordPattern("deepseek-v3"),),
    (KIMI,): (WordPattern("kimi-k2"),),
}
"""By the patterns that split a text, one after the other."""


def patterns_of(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Patterns of a byte-level `pre_tokenizer` in a `tokenizer.json`; None if it does something else."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer.get("pretokenizers", ()) if pre_tokenizer.get("type") == "Sequence" else (pre_tokenizer,)
    patterns: list[str] = []
    for index, step in enumerate(steps):
        if step.get("type") == "ByteLevel" and not step.get("add_prefix_space") and index == len(steps) - 1:
            return (*patterns, *((GPT2,) if step.get("use_regex", True) else ()))
        if step.get("type") == "Digits" and step.get("individual_digits"):
            patterns.append(DIGIT)
        elif step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            patterns.append(str(step.get("pattern", {}).get("Regex")))
        else:
            return None
    return None
