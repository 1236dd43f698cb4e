"""Cleaning rules for pairs. Each has a name, under which the pairs that it drops are counted."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable

from moe.data.pairs.pair import Pair
from moe.data.text import has_unprintable, normalise
from moe.spec import PairsSpec

RULES = {
    "empty": "a side is empty",
    "unprintable": "control characters, or signs of broken decoding",
    "untranslated": "the text equals its translation",
    "placeholders": "format fields or mark-up differ between the sides",
    "length_ratio": "one side is many times longer than the other",
    "duplicate": "duplicate of an earlier pair",
    "too_long": "more tokens than data.max_tokens on one side",
    "rare_language": "its language has fewer pairs than data.min_pairs_per_language",
}
"""Rules in the order in which they are applied: a pair counts for the first rule that it breaks."""

_RATIO_COUNTS_FROM = 20
"""Difference in characters above which the ratio is checked: for short names, it means nothing."""
_BYTES_PER_TOKEN = 32
"""A side with more bytes than this per allowed token is too long with any tokenizer."""


class Cleaner:
    """Normalises pairs and keeps the good ones; `drop_counts` counts the others by rule."""

    def __init__(self, data: PairsSpec) -> None:
        self._data = data
        self.num_read = 0
        self.num_normalised = 0
        self.drop_counts: Counter[str] = Counter(dict.fromkeys(RULES, 0))

    def clean(self, pairs: Iterable[Pair]) -> list[Pair]:
        """The pairs that break no rule, in order, normalised. Rules that need tokens are applied later."""
        unique_pairs: dict[Pair, None] = {}
        for pair in pairs:
            self.num_read += 1
            clean = Pair(pair.lang, normalise(pair.source), normalise(pair.target))
            if clean != pair:
                self.num_normalised += 1
            rule = self._broken_rule(clean)
            if rule is None and clean in unique_pairs:
                rule = "duplicate"
            if rule is not None:
                self.drop_counts[rule] += 1
            else:
                unique_pairs[clean] = None
        return self.drop_rare_languages(list(unique_pairs))

    def drop_rare_languages(self, pairs: list[Pair]) -> list[Pair]:
        """The pairs of languages that have enough of them."""
        min_pairs = self._data.min_pairs_per_language
        num_pairs = Counter(pair.lang for pair in pairs)
        frequent_pairs = [pair for pair in pairs if num_pairs[pair.lang] >= min_pairs]
        self.drop_counts["rare_language"] += len(pairs) - len(frequent_pairs)
        return frequent_pairs

    def _broken_rule(self, pair: Pair) -> str | None:
        _, source, target = pair
        if not source or not target:
            return "empty"
        if has_unprintable(source) or has_unprintable(target):
            return "unprintable"
        if source == target:
            return "untranslated"
        if placeholders(source) != placeholders(target):
            return "placeholders"
        shorter, longer = sorted((len(source), len(target)))
        if longer - shorter > _RATIO_COUNTS_FROM and longer > shorter * self._data.max_length_ratio:
            return "length_ratio"
        max_bytes = _BYTES_PER_TOKEN * self._data.max_tokens
        if longer * 4 > max_bytes and max(len(source.encode()), len(target.encode())) > max_bytes:
            return "too_long"
        return None


# One alternative each: `%%`, Python's and C's printf fields, brace fields, shell-like variables, HTML tags.
# printf's flag ' ' is left out on purpose: "100 % des" is French, not a field. Tags are a closed list,
# because "<file>" in a usage text is a word to translate.
_FIELD = re.compile(
    r"%%"
    r"|%\((?P<named>\w+)\)[-+#0]*\d*(?:\.\d+)?(?P<named_type>[a-zA-Z])"
    r"|%(?:\d+\$)?[-+#0']*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh|h|ll|l|L|q|j|z|t)?(?P<printf>[diouxXeEfFgGaAcspn])"
    r"|%(?P<numbered>\d)(?!\d)"
    r"|\{(?P<brace>\w*(?:[.\[][\w.\[\]]*)?)(?:![rsa])?(?::[^{}]*)?\}"
    r"|\$\{?(?P<shell>[A-Za-z_]\w+)\}?"
    r"|<(?P<tag>/?(?:a|abbr|b|big|br|code|div|em|h[1-6]|hr|i|img|kbd|li|ol|p|pre|q|s|small|span|strong|sub|sup"
    r"|table|td|th|tr|tt|u|ul|var))(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)

_SIGN = re.compile(r"[%{$<]")


def placeholders(text: str) -> tuple[Hashable, ...]:
    """The fields and tags in a text, sorted; equal for a text and a translation that keeps them all.

    The order, the width and the attributes may change in translation; names, types and counts may not.
    """
    if _SIGN.search(text) is None:
        return ()
    fields = []
    for match in _FIELD.finditer(text):
        kind = match.lastgroup
        if kind is None:  # %% is a percent sign
            continue
        if kind == "named_type":
            fields.append(("named", f"{match['named']}:{match['named_type']}"))
        elif kind == "tag":
            fields.append((kind, match["tag"].lower()))
        else:
            fields.append((kind, match[kind]))
    return tuple(sorted(fields))
