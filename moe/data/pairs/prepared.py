"""Preparation of a corpus of pairs: cleaned, split, tokenized and stored, once for its content."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np

from moe.clock import Clock
from moe.data import preparation
from moe.data.pairs.cleaning import Cleaner
from moe.data.pairs.corpora import build
from moe.data.pairs.corpus import PairCorpus, require_languages
from moe.data.pairs.held_out import CorpusPart, HeldOut
from moe.data.pairs.pair import Pair
from moe.data.pairs.scripts import main_script
from moe.data.pairs.store import Ids, TokenStore
from moe.data.pairs.tokenizers import Tokenizers, Vocabularies
from moe.data.progress import ProgressCallback, Stages, scaled_progress
from moe.data.tokenizer import Tokenizer
from moe.spec import PairsSpec, SpecError, spec_error

FORMAT_VERSION = 1
"""Version of the store: increased when the same corpus and spec would give another one, by its files, cleaning or
tokenizer."""

_STAGES = {"reading": 4.0, "learning the tokenizer": 3.0, "encoding": 3.0, "writing": 1.0}
"""Stages, with the approximate seconds of each for `catalogs` on two quiet cores."""
_TOKENIZER_FIELDS = ("source_vocab_size", "target_vocab_size", "share_vocabulary")


@dataclass(frozen=True)
class PreparedPairs:
    """Everything a run reads."""

    folder: Path
    tokenizers: Tokenizers
    train: TokenStore
    held_out: dict[str, TokenStore]
    """`unseen`: messages in training in no language. `seen`: pairs whose message is there in another one."""
    stats: dict[str, Any]
    """Counts of what was read, dropped by each rule, and kept: see `describe`."""

    @property
    def key(self) -> str:
        """Hash of everything that determines its content; the folder's name."""
        return self.folder.name

    def tokenizer_files(self) -> dict[str, bytes]:
        """Files that checkpoints carry, by name."""
        return self.tokenizers.files()

    def carried_files(self) -> dict[str, bytes]:
        return {}


def prepare(
    data: PairsSpec,
    model: Vocabularies,
    cache_dir: str | Path,
    seed: int = 0,
    report: Callable[[str], None] | None = None,
    roots: Sequence[str] | None = None,
    progress: ProgressCallback | None = None,
    shared_dir: str | Path | None = None,
) -> PreparedPairs:
    """Return the prepared corpus, from `cache_dir` by content hash, or built there.

    The hash covers the corpus's content, the spec's fields with an effect, and the vocabulary's size: a change of any
    of them builds a new one. Several processes may call this at once; one of them builds. `seed` chooses the held-out
    sets. `roots`: folders that the user's files must be in, as in `check`. `report` receives decisions, `progress` the
    share done. `shared_dir` as in `preparation.find_or_build`. Raises SpecError for a corpus that cannot be read, and
    for a language without pairs.
    """
    report = report or (lambda message: None)
    corpus = build(data, roots)
    folder = preparation.find_or_build(
        lambda: content_key(data, model, corpus, seed),
        lambda empty: _build(empty, corpus, data, model, seed, report, Stages(_STAGES, progress)),
        report,
        cache_dir,
        shared_dir,
    )
    return PreparedPairs(
        folder=folder,
        tokenizers=Tokenizers.read(partial(preparation.read_tokenizer, folder)),
        train=TokenStore(folder / "train"),
        held_out={name: TokenStore(folder / name) for name in ("unseen", "seen")},
        stats=preparation.read_stats(folder),
    )


def content_key(data: PairsSpec, model: Vocabularies, corpus: PairCorpus, seed: int = 0) -> str:
    """Hash of everything that determines the prepared content."""
    facts = {
        "format": FORMAT_VERSION,
        "model": {field: getattr(model, field) for field in _TOKENIZER_FIELDS},
        "seed": seed,
        "unicode": unicodedata.unidata_version,
    }
    return preparation.content_key(corpus, data, facts, exclude={"sampling_exponent": True})


def _build(
    folder: Path,
    corpus: PairCorpus,
    data: PairsSpec,
    model: Vocabularies,
    seed: int,
    report: Callable[[str], None],
    stages: Stages,
) -> None:
    """Fill an empty folder: read, clean, hold out, train tokenizers, encode, store."""
    clock = Clock()
    cleaner = Cleaner(data)
    pairs = cleaner.clean(stages.through("reading", corpus.pairs(), lambda _: corpus.share_read()))
    require_languages(data.languages, {pair.lang for pair in pairs}, "has no pairs left after cleaning")
    clock.lap("clean")

    held_out = HeldOut(data, seed)
    candidates = held_out.candidates(pairs)
    for_tokenizers = [pair for pair, part in zip(pairs, candidates, strict=True) if part is CorpusPart.TRAIN]
    if not for_tokenizers:
        raise _empty_corpus_error(cleaner)
    stages.report("learning the tokenizer")
    tokenizers = Tokenizers.train(for_tokenizers, model)
    preparation.write_tokenizers(folder, tokenizers.files())
    clock.lap("train_tokenizers")

    texts = {side: list(dict.fromkeys(getattr(pair, side) for pair in pairs)) for side in ("source", "target")}
    num_before = {"source": 0, "target": len(texts["source"])}
    num_texts = sum(map(len, texts.values()))
    ids = {
        side: _encode_distinct(
            tokenizer, stages.through("encoding", texts[side], scaled_progress(num_texts, before=num_before[side]))
        )
        for side, tokenizer in (("source", tokenizers.source), ("target", tokenizers.target))
    }
    part_by_pair = dict(zip(pairs, candidates, strict=True))
    pairs = _within_max_tokens(pairs, ids, data.max_tokens, cleaner)
    pairs = cleaner.drop_rare_languages(pairs)
    require_languages(data.languages, {pair.lang for pair in pairs}, "has no pairs left after cleaning")
    parts = held_out.assign(pairs, [part_by_pair[pair] for pair in pairs])
    clock.lap("encode")

    stages.report("writing")
    langs = sorted({pair.lang for pair in pairs})
    members = {
        part: [pair for pair, pair_part in zip(pairs, parts, strict=True) if pair_part is part] for part in CorpusPart
    }
    if not members[CorpusPart.TRAIN]:
        raise _empty_corpus_error(cleaner)
    for part, own_pairs in members.items():
        sources = [ids["source"][pair.source] for pair in own_pairs]
        targets = [ids["target"][pair.target] for pair in own_pairs]
        TokenStore.write(folder / part.name.lower(), own_pairs, sources, targets, langs)
    clock.lap("store")

    stats = {
        **corpus.facts(),
        "read": cleaner.num_read,
        "normalised": cleaner.num_normalised,
        "dropped": dict(cleaner.drop_counts),
        **_statistics(members, ids, tokenizers),
        "seconds": clock.laps,
    }
    preparation.write_stats(folder, stats)
    report(
        f"prepared {len(pairs):,} pairs in {len(langs)} languages in {sum(clock.laps.values()):.1f} s: "
        + ", ".join(f"{part.name.lower()} {len(part_pairs):,}" for part, part_pairs in members.items())
    )


def _encode_distinct(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, Ids]:
    """Ids by text; the texts are distinct."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    first, keys = tee(texts)
    return {text: np.array(ids, dtype) for text, ids in zip(keys, tokenizer.encode_each(first), strict=True)}


def _within_max_tokens(
    pairs: list[Pair], ids: dict[str, dict[str, Ids]], max_tokens: int, cleaner: Cleaner
) -> list[Pair]:
    """The pairs whose sides, EOS included, fit `max_tokens`."""
    short_pairs = [
        pair
        for pair in pairs
        if len(ids["source"][pair.source]) < max_tokens and len(ids["target"][pair.target]) < max_tokens
    ]
    cleaner.drop_counts["too_long"] += len(pairs) - len(short_pairs)
    return short_pairs


def _statistics(
    members: dict[CorpusPart, list[Pair]], ids: dict[str, dict[str, Ids]], tokenizers: Tokenizers
) -> dict[str, Any]:
    train = members[CorpusPart.TRAIN]
    all_pairs = [pair for part_pairs in members.values() for pair in part_pairs]
    texts_by_lang: dict[str, list[str]] = defaultdict(list)
    for pair in all_pairs:
        texts_by_lang[pair.lang].append(pair.source)
    counts = {part: Counter(pair.lang for pair in part_pairs) for part, part_pairs in members.items()}
    langs = {
        lang: {"script": main_script(texts), **{part.name.lower(): counts[part][lang] for part in CorpusPart}}
        for lang, texts in sorted(texts_by_lang.items(), key=lambda item: (-len(item[1]), item[0]))
    }
    in_training = {(pair.source, pair.target) for pair in train}
    return {
        "pairs": {part.name.lower(): len(part_pairs) for part, part_pairs in members.items()},
        "distinct_targets": len({pair.target for pair in all_pairs}),
        # A locale and its sibling (pt, pt_BR) often say the same: such a pair is easier than it looks.
        "seen_with_text_in_training": sum(
            (pair.source, pair.target) in in_training for pair in members[CorpusPart.SEEN]
        ),
        "train_tokens": {
            "source": sum(len(ids["source"][pair.source]) + 1 for pair in train),
            "target": sum(len(ids["target"][pair.target]) + 1 for pair in train),
        },
        "vocabulary": {"source": tokenizers.source.vocab_size, "target": tokenizers.target.vocab_size},
        "languages": langs,
    }


def _empty_corpus_error(cleaner: Cleaner) -> SpecError:
    counts = ", ".join(f"{rule} {count}" for rule, count in cleaner.drop_counts.items() if count)
    rule = "has no pairs left for training" + (f" (left out: {counts})" if counts else "")
    return spec_error("empty", "data", f"{cleaner.num_read} pairs read", rule, "add text, or relax its rules")
