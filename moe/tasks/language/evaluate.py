"""Evaluation of a language model on held-out text by source, with unigram and xz baselines."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe.activity import doing
from moe.clock import Clock
from moe.data.sequences import (
    PreparedSequences,
    SequenceBatchPart,
    SequenceStore,
    unigram_nats_per_source,
    xz_bits_per_byte,
)
from moe.data.sequences.store import SequenceRows
from moe.data.sequences.unpaired import UnpairedPart
from moe.data.tokenizer import Tokenizer
from moe.parallel import Layout, json_collectives
from moe.records import Completion, HeldOutResult, LanguageReport, Sample, SourceReport
from moe.records.language import ALL
from moe.spec import JobSpec, PreferenceSpec, UnpairedPreferenceSpec
from moe.spec.generation import GenerationSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.label_loads import LabelLoadCounter
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.generation import generate
from moe.tasks.language.held_out_labels import HeldOutLabels
from moe.tasks.language.model import LanguageModel, batch_loss
from moe.tasks.language.preference import preferences_of
from moe.tasks.language.prompts import evaluation_prompts
from moe.tasks.language.unpaired_preference import kl_of, kl_sums, unpaired_preferences_of

_POSITIONS_PER_RANK = 8192
_MAX_COMPRESSED_BYTES = 1 << 26
"""Limit over all sources: xz takes about 1 s per MB while all ranks wait."""
_MAX_CONVERSATION_TOKENS = 1024
"""Prompt limit for conversations, keeping their last tokens."""
_Counting = Callable[[NDArray[np.int64]], AbstractContextManager[None]]
"""Context of the passes over a batch of these rows."""
_MAX_COMPLETIONS, _PROMPT_CHARS, _PROMPT_TOKENS, _NEW_TOKENS = 3, 2000, 64, 48


def evaluate(
    model: LanguageModel,
    layout: Layout,
    corpus: PreparedSequences,
    spec: JobSpec,
    reference: LanguageModel | None = None,
) -> LanguageReport:
    """Report of a finished run, the same on every rank. Collective.

    `max_sequences` limits the loss to a fixed sample per source. `reference`: a frozen reference model for preferences.
    """
    evaluation, clock = spec.train.evaluation, Clock()
    baselines = json_collectives.broadcast_from_rank0(lambda: _baselines(corpus, model.spec.vocab_size))
    clock.lap("baselines")
    measure = _HeldOutEvaluator(model, layout, spec, reference)
    sources = {
        name: _SourceTotals.from_loss(store, measure(store, evaluation.max_sequences, with_base=True), *baselines[name])
        for name, store in corpus.held_out.items()
    }
    clock.lap("loss")
    if len(sources) > 1:
        sources[ALL] = _SourceTotals.combine(sources.values())
    completions = _completions(model, layout, corpus, min(evaluation.num_examples, _MAX_COMPLETIONS))
    clock.lap("complete")
    report = LanguageReport({name: source.report() for name, source in sources.items()}, completions, clock.laps)
    return LanguageReport.read(json_collectives.broadcast_from_rank0(report.to_plain))


def measure_held_out(
    model: LanguageModel,
    layout: Layout,
    corpus: PreparedSequences,
    spec: JobSpec,
    reference: LanguageModel | None = None,
) -> HeldOutResult:
    """Loss on a fixed sample of each source: nats per token, or preference loss per pair or answer; None without
    tokens. Expert loads by source, of conversations also by role. Collective."""
    measure = _HeldOutEvaluator(model, layout, spec, reference)
    labels = HeldOutLabels(corpus.held_out)
    counter = LabelLoadCounter(model, layout, labels.kind, labels.names)
    max_sequences, losses = spec.train.evaluation.max_sequences_along_the_way, dict[str, float | None]()
    for name, store in corpus.held_out.items():

        def counting(rows: NDArray[np.int64], source: str = name) -> AbstractContextManager[None]:
            return counter.counting(labels.indices(source, rows))

        losses[name] = measure(store, max_sequences, counting=counting).loss
    return HeldOutResult(losses, counter.sum_over_ranks())


@dataclass(frozen=True)
class _HeldOutLoss:
    """Mean losses on held-out text; None without any."""

    loss: float | None
    """Nats per token, or preference loss per pair."""
    base: float | None = None
    """Loss of the base model without its adapter."""
    preferred_share: float | None = None
    """Share of pairs whose preferred answer has the higher reward."""
    labelled: "_LabelledAnswers | None" = None


@dataclass(frozen=True)
class _LabelledAnswers:
    """Mean rewards of held-out answers with labels, and the KL estimate of their loss; None without any."""

    desirable_reward: float | None
    undesirable_reward: float | None
    kl: float | None


@dataclass(frozen=True)
class _HeldOutEvaluator:
    """Held-out losses on rows of a store. Collective."""

    model: LanguageModel
    layout: Layout
    spec: JobSpec
    reference: LanguageModel | None

    @torch.no_grad()
    def __call__(
        self,
        store: SequenceStore,
        max_sequences: int | None,
        *,
        with_base: bool = False,
        counting: _Counting | None = None,
    ) -> _HeldOutLoss:
        """Mean over all ranks' rows; `with_base`: also of the base without its adapter, if all of the
        base is still there. `counting`: context of the passes of each batch."""
        if isinstance(self.spec.data, UnpairedPreferenceSpec):
            return self._unpaired_loss(store, max_sequences, counting)
        if isinstance(self.spec.data, PreferenceSpec):
            sums = self._sums(store, max_sequences, self._preference_loss, counting)
            return _HeldOutLoss(_mean(sums[0], sums[1]), preferred_share=_mean(sums[2], sums[1]))
        loss = _mean(*self._sums(store, max_sequences, self._token_loss, counting))
        adapter = self.model.spec.adapter
        if not with_base or adapter is None or adapter.modules_to_save:
            return _HeldOutLoss(loss)
        with self.model.without_adapters():
            return _HeldOutLoss(loss, _mean(*self._sums(store, max_sequences, self._token_loss)))

    def _unpaired_loss(
        self, store: SequenceStore, max_sequences: int | None, counting: _Counting | None
    ) -> _HeldOutLoss:
        kl = None
        if self.spec.estimates_kl:
            log_ratio, num_answers, *_ = self._sums(store, max_sequences, self._kl_sums)
            kl = kl_of(*torch.tensor([log_ratio, num_answers], dtype=torch.float64, device=self.layout.device))

        def measure(batch: SequencesBatch) -> Iterable[Tensor]:
            batch = replace(batch, kl=kl)
            preferences = unpaired_preferences_of(self.model, batch, self.spec, self.reference)
            return (preferences.loss, preferences.num_answers, *preferences.rewards, *preferences.num_by_label)

        loss, number, *rewards_and_numbers = self._sums(store, max_sequences, measure, counting)
        desirable, undesirable, num_desirable, num_undesirable, *_ = rewards_and_numbers
        labelled = _LabelledAnswers(
            _mean(desirable, num_desirable), _mean(undesirable, num_undesirable), None if kl is None else float(kl)
        )
        return _HeldOutLoss(_mean(loss, number), labelled=labelled)

    def _kl_sums(self, batch: SequencesBatch) -> Tensor:
        return kl_sums(self.model, batch, self.spec, self.reference)

    def _sums(
        self,
        store: SequenceStore,
        max_sequences: int | None,
        measure: Callable[[SequencesBatch], Iterable[Tensor]],
        counting: _Counting | None = None,
    ) -> list[float]:
        context = BatchContext(training=False, rows_per_group=1)
        sums = [0.0] * _MAX_SUMS
        for progress, rows, previous in _rows(store, self.layout, max_sequences):
            with doing("evaluation", f"evaluated {progress}"):
                batch = SequencesBatch.from_part(self._part(store, rows, previous), context, self.layout)
                with nullcontext() if counting is None else counting(rows):
                    values = measure(batch)
                sums = [total + float(value) for total, value in zip_longest(sums, values, fillvalue=0.0)]
        counts = self.layout.index("pipeline") == 0  # all stages have the last one's losses
        return list(json_collectives.all_reduce_sum(*(total * counts for total in sums)))

    def _part(self, store: SequenceStore, rows: np.ndarray, previous: np.ndarray) -> SequenceRows | SequenceBatchPart:
        if not store.has_labels:
            return store.rows(rows)
        unpaired = UnpairedPart.from_rows(store, rows, previous, estimates_kl=self.spec.estimates_kl)
        return SequenceBatchPart(0, *store.rows(rows), unpaired)

    def _token_loss(self, batch: SequencesBatch) -> tuple[Tensor, Tensor]:
        return batch_loss(self.model, batch).nll, (self.model.share(batch.labels) >= 0).sum()

    def _preference_loss(self, batch: SequencesBatch) -> tuple[Tensor, Tensor, Tensor]:
        preferences = preferences_of(self.model, batch, self.spec, self.reference)
        return preferences.loss, preferences.num_pairs, preferences.num_right


def _mean(total: float, number: float, *_: float) -> float | None:
    return total / number if number else None


_MAX_SUMS = 6
"""Most sums that a loss is measured by."""


def _rows(
    store: SequenceStore, layout: Layout, max_sequences: int | None
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(progress in words, row numbers, numbers of the rows before them) of this rank's batches, evenly spaced; as many
    on every rank, some possibly empty."""
    number = store.num_rows if max_sequences is None else min(max_sequences, store.num_rows)
    row_numbers = np.arange(number) * store.num_rows // max(1, number)
    at_once = max(1, _POSITIONS_PER_RANK // store.max_tokens) * layout.data_ranks
    previous_rows = np.roll(row_numbers, 1)
    for first in range(0, number, at_once):
        local_groups = layout.local_groups(min(at_once, number - first))
        own_rows = slice(first + local_groups.start, first + local_groups.stop)
        yield f"{first:,} of {number:,} held-out sequences", row_numbers[own_rows], previous_rows[own_rows]


def _baselines(data: PreparedSequences, vocab_size: int) -> dict[str, tuple[float | None, float | None]]:
    """Baselines by source: (nats per token of a unigram model of the training tokens, bits per byte of xz)."""
    unigram = unigram_nats_per_source(data.train, data.held_out, vocab_size)
    max_bytes = _MAX_COMPRESSED_BYTES // max(1, len(data.held_out))
    return {name: (unigram[name], xz_bits_per_byte(store.texts(max_bytes))) for name, store in data.held_out.items()}


@dataclass(frozen=True)
class _SourceTotals:
    """Sums over held-out text; None without tokens."""

    num_documents: int
    num_tokens: int
    num_bytes: int
    nats: float | None
    """Over all tokens."""
    unigram_nats: float | None
    xz_bits: float | None
    """Over all bytes."""
    base_nats: float | None = None
    preference: _HeldOutLoss | None = None
    """For preferences, which have no other losses."""

    @classmethod
    def from_loss(
        cls, store: SequenceStore, held_out_loss: _HeldOutLoss, unigram: float | None, xz: float | None
    ) -> "_SourceTotals":
        """Totals from losses per token and xz bits per byte."""
        num_tokens, num_bytes = store.num_targets, store.num_bytes
        if store.num_linked > 1 or store.has_labels:
            return cls(store.num_documents, num_tokens, num_bytes, None, None, None, preference=held_out_loss)
        return cls(
            store.num_documents,
            num_tokens,
            num_bytes,
            None if held_out_loss.loss is None else held_out_loss.loss * num_tokens,
            None if unigram is None else unigram * num_tokens,
            None if xz is None else xz * num_bytes,
            None if held_out_loss.base is None else held_out_loss.base * num_tokens,
        )

    @classmethod
    def combine(cls, sources: Iterable["_SourceTotals"]) -> "_SourceTotals":
        nonempty_sources = [source for source in sources if source.num_tokens]
        counts = (
            sum(getattr(source, name) for source in nonempty_sources)
            for name in ("num_documents", "num_tokens", "num_bytes")
        )
        names = ("nats", "unigram_nats", "xz_bits", "base_nats")
        return cls(*counts, *(_sum(getattr(source, name) for source in nonempty_sources) for name in names))

    def report(self) -> SourceReport:
        loss = None if self.nats is None else self.nats / self.num_tokens
        base_loss = None if self.base_nats is None else self.base_nats / self.num_tokens
        if self.preference is not None:
            loss, preferred_share = self.preference.loss, self.preference.preferred_share
            counts = (self.num_documents, self.num_tokens, self.num_bytes)
            labelled = self.preference.labelled or _LabelledAnswers(None, None, None)
            return SourceReport(
                *counts, loss, None, None, None, None, preferred=preferred_share,
                desirable_reward=labelled.desirable_reward, undesirable_reward=labelled.undesirable_reward,
                kl=labelled.kl,
            )  # fmt: skip
        return SourceReport(
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            loss=loss,
            perplexity=None if loss is None else math.exp(min(loss, 700)),
            bits_per_byte=self._by_byte(self.nats, math.log(2)),
            unigram_bits_per_byte=self._by_byte(self.unigram_nats, math.log(2)),
            xz_bits_per_byte=self._by_byte(self.xz_bits, 1),
            base_loss=base_loss,
        )

    def _by_byte(self, total: float | None, unit: float) -> float | None:
        return None if total is None or not self.num_bytes else total / unit / self.num_bytes


def _sum(values: Iterable[float | None]) -> float | None:
    present_values = [value for value in values if value is not None]
    return sum(present_values) if present_values else None


def _completions(model: LanguageModel, layout: Layout, data: PreparedSequences, number: int) -> tuple[Completion, ...]:
    """The model's completions of prompts from the middle of each source."""
    sources = [(name, store) for name, store in data.held_out.items() if store.num_documents]
    documents = [
        (name, store, store.num_documents * (turn + 1) // (turn + 2))
        for turn in range(number)
        for name, store in sources
    ][: number if sources else 0]
    tokenizer = data.tokenizer
    prompts = [_prompt(tokenizer, store, index) for _, store, index in documents]
    completions = _complete(model, layout, data, prompts, _NEW_TOKENS)
    return tuple(
        Completion(name, tokenizer.decode(prompt), completion)
        for (name, *_), prompt, completion in zip(documents, prompts, completions, strict=True)
    )


def samples(model: LanguageModel, layout: Layout, data: PreparedSequences, spec: JobSpec) -> tuple[Sample, ...]:
    """Completions of `train.evaluation.prompts`. Collective."""
    texts, max_tokens = spec.train.evaluation.prompts, spec.train.evaluation.prompt_max_tokens
    if not texts:
        return ()
    prompts = json_collectives.broadcast_from_rank0(lambda: evaluation_prompts(spec, data))
    completions = _complete(model, layout, data, prompts, max_tokens)
    return tuple(map(Sample, texts, completions))


def _complete(
    model: LanguageModel, layout: Layout, data: PreparedSequences, prompts: list[list[int]], max_tokens: int
) -> list[str]:
    """Greedy completions, the same on every rank. Collective."""
    own_prompts = layout.local_groups(len(prompts))
    new = generate(
        model,
        prompts[own_prompts.start : own_prompts.stop],
        GenerationSpec(max_tokens=max_tokens),
        set(data.ends),
        text_numbers=range(own_prompts.start, own_prompts.stop),
        process_group=layout.lockstep_group,
    )
    tokens_by_rank: list[dict[str, Any]] = json_collectives.all_gather_json(
        {str(row): tokens for row, tokens in zip(range(own_prompts.start, own_prompts.stop), new, strict=True)}
    )
    tokens_by_row = {int(row): tokens for rank_tokens in tokens_by_rank for row, tokens in rank_tokens.items()}
    return [data.tokenizer.decode(tokens_by_row[row]) for row in range(len(prompts))]


def _prompt(tokenizer: Tokenizer, store: SequenceStore, index: int) -> list[int]:
    """Prompt from within a document, or a conversation up to an answer; truncated."""
    if store.has_spans:
        return [int(id) for id in store.beginning(index)[-_MAX_CONVERSATION_TOKENS:]]
    text = store.text(index).decode("utf-8", "replace")
    return tokenizer.prompt(_beginning(text))[:_PROMPT_TOKENS]


def _beginning(text: str) -> str:
    """Whole lines after the first third of a text, about `_PROMPT_CHARS` / 10 characters."""
    lines, beginning = text.splitlines(keepends=True), ""
    for line in lines[len(lines) // 3 :]:
        if beginning and len(beginning) + len(line) > _PROMPT_CHARS // 10:
            break
        beginning += line
    return beginning[:_PROMPT_CHARS] or text[:_PROMPT_CHARS]
