"""Build the corpus of a spec, and check it before a job is launched."""

from collections.abc import Sequence

from moe.data.pairs.corpus import PairCorpus
from moe.data.scan import check_corpus
from moe.spec import CatalogsSpec, JsonlSpec, PairsSpec


def build(data: PairsSpec, roots: Sequence[str] | None = None) -> PairCorpus:
    """The corpus that a spec names; the user's files must lie under `roots` (None: anywhere)."""
    if isinstance(data, CatalogsSpec):
        from moe.data.pairs.catalogs import Catalogs

        return Catalogs(data)
    if isinstance(data, JsonlSpec):
        from moe.data.pairs.jsonl import JsonlPairs

        return JsonlPairs(data, roots)
    from moe.data.pairs.parallel_text import ParallelText

    return ParallelText(data, roots)


def check(data: PairsSpec, roots: Sequence[str]) -> tuple[str, ...]:
    """Check a corpus quickly before launch; return warnings. Raises SpecError for its faults. Files must lie under
    `roots` (folders or fsspec URLs). Loads neither torch nor the tokenizer."""
    return check_corpus(build(data, roots), data, roots)
