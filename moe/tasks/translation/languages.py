"""Language subsets for evaluation reports."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe.data.pairs import PreparedPairs, TokenStore


@dataclass(frozen=True)
class Languages:
    """Languages by subset: non-Latin scripts, and thirds by number of training pairs."""

    scripts: dict[str, str]
    """Main script of each language's sources (see moe.data)."""
    not_latin: frozenset[str]
    high: frozenset[str]
    mid: frozenset[str]
    low: frozenset[str]

    @classmethod
    def from_corpus(cls, corpus: PreparedPairs) -> "Languages":
        """Subsets from the prepared corpus's statistics. Thirds are of languages, not of pairs."""
        facts = corpus.stats["languages"]
        by_size = sorted(facts, key=lambda lang: (-facts[lang]["train"], lang))
        third = -(-len(by_size) // 3)
        scripts = {lang: str(facts[lang]["script"]) for lang in by_size}
        return cls(
            scripts=scripts,
            not_latin=frozenset(lang for lang, script in scripts.items() if script not in ("Latin", "")),
            high=frozenset(by_size[:third]),
            mid=frozenset(by_size[third : 2 * third]),
            low=frozenset(by_size[2 * third :]),
        )

    def subsets(self) -> dict[str, frozenset[str]]:
        return {"not_latin": self.not_latin, "high": self.high, "mid": self.mid, "low": self.low}

    def to_plain(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(sorted(langs)) for name, langs in self.subsets().items()}

    def masks(self, store: TokenStore, rows: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
        """Masks of `rows` by subset; `all` includes every row."""
        lang_ids = np.asarray(store.lang_ids)[rows]
        masks = {"all": np.ones(len(rows), dtype=bool)}
        for name, langs in self.subsets().items():
            masks[name] = np.isin(lang_ids, [i for i, lang in enumerate(store.langs) if lang in langs])
        return masks
