"""Rules for pairs that are fit to learn from. Each has a name, and counts the pairs that it leaves out."""

from collections import Counter
from collections.abc import Iterable

from moe.data.pairs.pair import Pair
from moe.data.pairs.placeholders import placeholders
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
"""In the order in which they are applied: a pair counts for the first that it breaks."""

_RATIO_COUNTS_FROM = 20
"""Characters that the sides must differ by before their ratio means anything: names are short."""
_BYTES_A_TOKEN = 32
"""A side with more bytes than this for each token allowed is too long, whatever the tokenizer makes of it."""


class Cleaner:
    """Normalises pairs and keeps the good ones; `drop_counts` counts the others by rule."""

    def __init__(self, data: PairsSpec) -> None:
        self._data = data
        self.read = 0
        self.num_normalised = 0
        self.drop_counts: Counter[str] = Counter(dict.fromkeys(RULES, 0))

    def clean(self, pairs: Iterable[Pair]) -> list[Pair]:
        """The pairs that break no rule, in order, normalised. Rules that need tokens come later."""
        unique_pairs: dict[Pair, None] = {}
        for pair in pairs:
            self.read += 1
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
        least = self._data.min_pairs_per_language
        num_pairs = Counter(pair.lang for pair in pairs)
        frequent_pairs = [pair for pair in pairs if num_pairs[pair.lang] >= least]
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
        max_bytes = _BYTES_A_TOKEN * self._data.max_tokens
        if longer * 4 > max_bytes and max(len(source.encode()), len(target.encode())) > max_bytes:
            return "too_long"
        return None
