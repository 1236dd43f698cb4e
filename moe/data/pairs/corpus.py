"""Corpora of pairs, before cleaning."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from moe.data.corpus import Corpus
from moe.data.locations import Location
from moe.data.pairs.pair import Pair
from moe.spec import Problem, SpecError


class PairCorpus(Corpus):
    """Source of pairs."""

    @abstractmethod
    def pairs(self) -> Iterator[Pair]:
        """Every pair in the languages of the spec, raw."""

    def share_read(self) -> float | None:
        """Share of the corpus that `pairs` has read so far; None while its size is unknown."""
        return None


def require_languages(
    languages: Sequence[str] | None, available: set[str], rule: str = "has no pairs in this corpus"
) -> None:
    """Raise SpecError for each requested language that is not available, suggesting similar ones."""
    problems = []
    for index, lang in enumerate(languages or ()):
        if lang in available:
            continue
        base = lang.replace("-", "_").partition("_")[0]
        similar = [name for name in sorted(available) if name.partition("_")[0] == base]
        similar = similar or get_close_matches(lang, sorted(available), n=3, cutoff=0.5)
        choices = ", ".join(similar) if similar else _join_names(sorted(available))
        remedy = f"use one of {choices}" if choices else "omit data.languages"
        problems.append(Problem("not_a_choice", f"data.languages[{index}]", lang, rule, remedy))
    if problems:
        raise SpecError(problems)


def combined_fingerprint(locations: Iterable[Location]) -> str:
    """One fingerprint for several files, in order."""
    return hashlib.sha256("\n".join(location.fingerprint() for location in locations).encode()).hexdigest()


def _join_names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 20 else ", ".join(names[:20]) + f" ({len(names)} in all)"
