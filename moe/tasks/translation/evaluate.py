"""Evaluation of a translation model on both held-out sets, with baselines."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe.activity import doing
from moe.clock import Clock
from moe.data.pairs import PreparedPairs, TokenStore, evaluation_batches
from moe.data.tokenizer import PAD
from moe.parallel import Layout, json_collectives
from moe.records import Example, HeldOutResult, SetReport, SubsetReport, TranslationReport
from moe.spec import EvaluationSpec, JobSpec
from moe.spec.generation import GenerationSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.label_loads import LabelLoadCounter
from moe.tasks.translation.batches import PairsBatch
from moe.tasks.translation.decoding import translate
from moe.tasks.translation.model import TranslationModel, batch_loss
from moe.tasks.translation.scores import RowStatistics


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
        facts, by_size = corpus.stats["languages"], languages_by_size(corpus)
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


def languages_by_size(corpus: PreparedPairs) -> list[str]:
    """Languages, those with the most training pairs first."""
    facts = corpus.stats["languages"]
    return sorted(facts, key=lambda lang: (-facts[lang]["train"], lang))


_POSITIONS_PER_RANK = 8192


def evaluate(model: TranslationModel, layout: Layout, corpus: PreparedPairs, spec: JobSpec) -> TranslationReport:
    """Report of a finished run, the same on every rank. Collective.

    `max_pairs` limits each held-out set to a fixed sample.
    """
    evaluation, clock, languages = spec.train.evaluation, Clock(), Languages.from_corpus(corpus)
    most_frequent, unigram = json_collectives.broadcast_from_rank0(
        lambda: (most_frequent_target(corpus.train), unigram_logp(corpus.train, model.spec.target_vocab_size).tolist())
    )
    unigram_logp_V = np.array(unigram, np.float64)
    clock.lap("baselines")
    sets: dict[str, SetReport] = {}
    examples: list[Example] = []
    for name, store in corpus.held_out.items():
        losses = _losses(model, layout, store, evaluation.max_pairs, unigram_logp_V)
        clock.lap("loss")
        rows, hypotheses = _translate(model, layout, corpus, store, evaluation.max_pairs, spec.data.max_tokens)
        clock.lap("translate")
        scored_by_rank = json_collectives.gather_json(
            _ScoreRows.from_texts(store, rows, hypotheses, most_frequent).to_plain()
        )
        clock.lap("score")
        if scored_by_rank is not None:
            score_rows = _ScoreRows.concatenate([_ScoreRows.from_plain(plain) for plain in scored_by_rank])
            sets[name] = SetReport(
                num_pairs=len(score_rows.rows),
                num_target_tokens=losses.num_target_tokens,
                loss=losses.model,
                unigram_loss=losses.unigram,
                subsets=score_rows.subsets(store, languages),
                num_with_text_in_training=(corpus.stats["seen_with_text_in_training"] if name == "seen" else None),
            )
            examples += score_rows.examples(name, store, languages)
    report = TranslationReport(
        sets=sets,
        languages=languages.to_plain(),
        most_frequent_target=most_frequent,
        examples=one_per_script(examples, evaluation.num_examples),
        seconds=clock.laps,
    )
    return TranslationReport.read(json_collectives.broadcast_from_rank0(report.to_plain))


def measure_held_out(
    model: TranslationModel, layout: Layout, corpus: PreparedPairs, spec: EvaluationSpec
) -> HeldOutResult:
    """Nats per target token on a fixed sample of each held-out set; None for an empty set. Expert loads by language.
    Collective."""
    languages = languages_by_size(corpus)
    counter = LabelLoadCounter(model, layout, "language", languages)
    losses = {
        name: _losses(
            model, layout, store, spec.max_pairs_along_the_way, counting=_counting_languages(counter, languages, store)
        ).model
        for name, store in corpus.held_out.items()
    }
    return HeldOutResult(losses, counter.sum_over_ranks())


_Counting = Callable[[NDArray[np.int64]], AbstractContextManager[None]]


def _counting_languages(counter: LabelLoadCounter, languages: Sequence[str], store: TokenStore) -> _Counting:
    """Context of the passes over rows of a store, by their numbers."""
    label_by_language = {language: index for index, language in enumerate(languages)}
    label_by_id = np.array([label_by_language[language] for language in store.langs], np.int64)
    return lambda rows: counter.counting(torch.from_numpy(label_by_id[store.lang_ids[rows]]))


def _rank_batches(
    store: TokenStore, layout: Layout, max_pairs: int | None
) -> Iterator[tuple[str, NDArray[np.int64], PairsBatch]]:
    """(progress in words, row numbers, batch) of this rank, by similar length; as many on every rank, some possibly
    empty."""
    context = BatchContext(training=False, rows_per_group=1)
    num_pairs, num_done = min(max_pairs or store.num_pairs, store.num_pairs), 0
    for batch in evaluation_batches(store, _POSITIONS_PER_RANK * layout.data_ranks, max_pairs):
        own_rows = layout.local_groups(batch.num_groups)  # each row is a token group in evaluation
        part = batch.part(own_rows.start, own_rows.stop)
        progress = f"{num_done:,} of {num_pairs:,} held-out pairs"
        yield progress, batch.rows[own_rows.start : own_rows.stop], PairsBatch.from_part(part, context, layout)
        num_done += len(batch.rows)


@dataclass(frozen=True)
class _HeldOutLosses:
    """Nats per target token on a held-out set; None if it is empty."""

    num_target_tokens: int
    model: float | None
    unigram: float | None


@torch.no_grad()
def _losses(
    model: TranslationModel,
    layout: Layout,
    store: TokenStore,
    max_pairs: int | None,
    unigram_logp_V: NDArray[np.float64] | None = None,
    counting: _Counting | None = None,
) -> _HeldOutLosses:
    """Losses of the model, and of the unigram model if given, over all ranks' rows. `counting`: context of the pass
    over the rows of a batch."""
    sums = torch.zeros(3, dtype=torch.float64)  # nats of the model, nats of the unigram model, tokens
    for progress, rows, batch in _rank_batches(store, layout, max_pairs):
        passes = nullcontext() if counting is None else counting(rows)
        with doing("evaluation", f"evaluated {progress}"), passes:
            nll = batch_loss(model, batch, smoothing=0.0).nll
        target_out = model.share(batch.target_out)
        labels = target_out[target_out != PAD].cpu().numpy()
        unigram_nll = -unigram_logp_V[labels].sum() if unigram_logp_V is not None else 0.0
        sums += torch.tensor([float(nll), unigram_nll, len(labels)], dtype=torch.float64)
    sums *= layout.index("pipeline") == 0  # all stages have the last one's losses
    model_nll, unigram_nll, num_tokens = json_collectives.all_reduce_sum(*sums.tolist())
    if not num_tokens:
        return _HeldOutLosses(0, None, None)
    unigram = unigram_nll / num_tokens if unigram_logp_V is not None else None
    return _HeldOutLosses(int(num_tokens), model_nll / num_tokens, unigram)


def _translate(
    model: TranslationModel,
    layout: Layout,
    data: PreparedPairs,
    store: TokenStore,
    max_pairs: int | None,
    max_tokens: int,
) -> tuple[NDArray[np.int64], list[str]]:
    """(row numbers, translations) of this rank, decoded greedily with all ranks in lockstep."""
    rows, hypotheses, spec = (
        [np.zeros(0, np.int64)],
        [],
        GenerationSpec().model_copy(update={"max_tokens": max_tokens}),
    )
    for progress, local_rows, batch in _rank_batches(store, layout, max_pairs):
        with doing("evaluation", f"translated {progress}"):
            token_rows = translate(model, batch.source, spec, process_group=layout.lockstep_group)
        if not layout.reports_rows:
            continue  # ranks with the same rows have the same tokens: only the first reports them
        rows.append(local_rows)
        hypotheses += [data.tokenizers.target.decode(ids) for ids in token_rows]
    return np.concatenate(rows), hypotheses


@dataclass(frozen=True)
class _ScoreRows:
    """Translated rows with the statistics for their scores."""

    rows: NDArray[np.int64]
    hypotheses: list[str]
    systems: dict[str, RowStatistics]
    """`model`, `copy` and `most_frequent`."""

    @classmethod
    def from_texts(
        cls, store: TokenStore, rows: NDArray[np.int64], hypotheses: list[str], most_frequent: str
    ) -> "_ScoreRows":
        texts = [store.text(int(row)) for row in rows]
        references = [target for _, target, _ in texts]
        systems = {
            "model": hypotheses,
            "copy": [source for source, _, _ in texts],
            "most_frequent": [most_frequent] * len(texts),
        }
        return cls(
            rows,
            hypotheses,
            {
                name: RowStatistics.from_texts(system_hypotheses, references)
                for name, system_hypotheses in systems.items()
            },
        )

    def to_plain(self) -> dict[str, Any]:
        systems = {name: statistics.to_plain() for name, statistics in self.systems.items()}
        return {"rows": self.rows.tolist(), "hypotheses": self.hypotheses, "systems": systems}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "_ScoreRows":
        """Inverse of `to_plain`."""
        systems = {
            name: RowStatistics.from_plain(*plain_statistics) for name, plain_statistics in plain["systems"].items()
        }
        return cls(np.array(plain["rows"], np.int64), plain["hypotheses"], systems)

    @classmethod
    def concatenate(cls, parts: list["_ScoreRows"]) -> "_ScoreRows":
        """Join all ranks' rows, in the order of the store."""
        rows = np.concatenate([part.rows for part in parts])
        order = np.argsort(rows, kind="stable")
        hypotheses = [text for part in parts for text in part.hypotheses]
        systems = {
            name: RowStatistics.concatenate([part.systems[name] for part in parts]).select(order)
            for name in parts[0].systems
        }
        return cls(rows[order], [hypotheses[index] for index in order], systems)

    def subsets(self, store: TokenStore, languages: Languages) -> dict[str, SubsetReport]:
        """Scores of every system on every subset."""
        lang_ids = np.asarray(store.lang_ids)[self.rows]
        return {
            subset: SubsetReport(
                num_pairs=int(mask.sum()),
                num_languages=len(np.unique(lang_ids[mask])),
                **{name: statistics.select(mask).scores() for name, statistics in self.systems.items()},
            )
            for subset, mask in languages.masks(store, self.rows).items()
        }

    def examples(self, set_name: str, store: TokenStore, languages: Languages) -> Iterator[Example]:
        """All rows as examples for display."""
        for row, hypothesis in zip(self.rows, self.hypotheses, strict=True):
            source, reference, lang = store.text(int(row))
            yield Example(set_name, lang, languages.scripts[lang], source, reference, hypothesis)


def one_per_script(candidates: Sequence[Example], number: int) -> tuple[Example, ...]:
    """Choose up to `number` examples, round-robin over scripts, those with the most rows first.

    Rows of a script are evenly spaced, in reverse for every other script, so that both held-out sets appear.
    References of 12 to 60 characters are preferred.
    """
    by_script: dict[str, list[Example]] = {}
    for candidate in candidates:
        by_script.setdefault(candidate.script, []).append(candidate)
    for script, rows in by_script.items():
        by_script[script] = [row for row in rows if 12 <= len(row.reference) <= 60] or rows
    scripts = sorted(by_script, key=lambda script: (-len(by_script[script]), script))
    examples: list[Example] = []
    for turn in range(number):
        for place, script in enumerate(scripts):
            rows = by_script[script][:: -1 if place % 2 else 1]
            turns = min(len(rows), number)
            if turn < turns and len(examples) < number:
                examples.append(rows[(2 * turn + 1) * len(rows) // (2 * turns)])
    return tuple(examples)


def unigram_logp(store: TokenStore, vocab_size: int) -> NDArray[np.float64]:
    """`[V]`: log-probabilities of target tokens by training frequency (add-one)."""
    counts = np.ones(vocab_size)
    for rows, length in _by_length(store):
        counts += np.bincount(store.pad_rows("target", rows, length).reshape(-1), minlength=vocab_size)
    return np.asarray(np.log(counts / counts.sum()))


def most_frequent_target(store: TokenStore) -> str:
    """Text of the most frequent target; the first one on ties."""
    best_count, best_row = 0, 0
    for rows, length in _by_length(store):
        ids = store.pad_rows("target", rows, length)
        _, firsts, counts = np.unique(ids, axis=0, return_index=True, return_counts=True)
        count, row = int(counts.max()), int(rows[firsts[counts == counts.max()]].min())
        if count > best_count or (count == best_count and row < best_row):
            best_count, best_row = count, row
    return store.text(best_row)[1]


def _by_length(store: TokenStore) -> list[tuple[NDArray[np.int64], int]]:
    """(rows, length) for each target length, to batch rows without padding."""
    lengths = np.asarray(store.target_lengths)
    order = np.argsort(lengths, kind="stable")
    values, starts = np.unique(lengths[order], return_index=True)
    return [(rows, int(length)) for rows, length in zip(np.split(order, starts[1:]), values, strict=True)]
