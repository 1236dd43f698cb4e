"""Evaluation of a language model on held-out text by source, beside what needs no learning."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe.clock import Clock
from moe.data.sequences import (
    PreparedSequences,
    SequenceStore,
    unigram_nats_per_source,
    xz_bits_per_byte,
)
from moe.parallel import Layout, together
from moe.records import Completion, HeldOutLosses, LanguageReport, SourceReport
from moe.spec import EvaluationSpec, JobSpec
from moe.spec.generation import GenerationSpec
from moe.spec.sequences import ALL
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.context import SequenceContext
from moe.tasks.language.generation import generate
from moe.tasks.language.loss import loss_of
from moe.tasks.language.model import LanguageModel

_POSITIONS_PER_RANK = 8192
"""Positions of a batch that one rank takes at a time."""
_MAX_COMPRESSED_BYTES = 1 << 26
"""Bytes of all sources together for xz, which takes a second for a megabyte while all ranks wait."""
_MAX_COMPLETIONS, _PROMPT_CHARS, _PROMPT_TOKENS, _NEW_TOKENS = 3, 2000, 64, 48


def evaluate(
    model: LanguageModel, layout: Layout, prepared: PreparedSequences, spec: JobSpec
) -> LanguageReport:
    """The report of a finished run, the same on every rank. All ranks call it together.

    With `max_sequences`, the loss is that of a fixed part of each source.
    """
    evaluation, clock = spec.train.evaluation, Clock()
    baselines = together.from_first(lambda: _baselines(prepared, model.spec.vocab_size))
    clock.lap("baselines")
    found = {
        name: _Source.of(store, _nats(model, layout, store, evaluation.max_sequences), *baselines[name])
        for name, store in prepared.held_out.items()
    }
    clock.lap("loss")
    if len(found) > 1:
        found[ALL] = _Source.joined(found.values())
    completions = _completions(model, layout, prepared, min(evaluation.num_examples, _MAX_COMPLETIONS))
    clock.lap("complete")
    report = LanguageReport({name: each.report() for name, each in found.items()}, completions, clock.laps)
    return LanguageReport.read(together.from_first(report.to_plain))


def held_out_losses(
    model: LanguageModel, layout: Layout, prepared: PreparedSequences, spec: EvaluationSpec
) -> HeldOutLosses:
    """Nats a token on a fixed part of each source, by source; None where it has none. All ranks call it together."""
    return {
        name: _nats(model, layout, store, spec.max_sequences_along_the_way)
        for name, store in prepared.held_out.items()
    }


@torch.no_grad()
def _nats(
    model: LanguageModel, layout: Layout, store: SequenceStore, max_sequences: int | None
) -> float | None:
    """Nats a token over all ranks' rows; None without any."""
    context = SequenceContext(training=False, rows_per_group=1)
    sums = torch.zeros(2, dtype=torch.float64)
    for rows in _rows(store, layout, max_sequences):
        batch = SequencesBatch.of(store.rows(rows), context, layout)
        labels = model.share(batch.labels)
        nll = loss_of(model, batch).nll
        sums += torch.tensor([float(nll), int((labels >= 0).sum())], dtype=torch.float64)
    nats, num_tokens = together.summed(*sums.tolist())
    return nats / num_tokens if num_tokens else None


def _rows(store: SequenceStore, layout: Layout, max_sequences: int | None) -> Iterator[np.ndarray]:
    """This rank's rows, some at a time; every rank comes as often, with none perhaps. A part of the rows is taken at
    even distances."""
    number = store.num_rows if max_sequences is None else min(max_sequences, store.num_rows)
    chosen = np.arange(number) * store.num_rows // max(1, number)
    at_once = max(1, _POSITIONS_PER_RANK // store.max_tokens) * layout.data_ranks
    for first in range(0, number, at_once):
        some = chosen[first : first + at_once]
        here = layout.groups_here(len(some))
        yield some[here.start : here.stop]


def _baselines(prepared: PreparedSequences, vocab_size: int) -> dict[str, tuple[float | None, float | None]]:
    """By source: (nats a token of the training tokens' frequencies, bits a byte of xz)."""
    unigram = unigram_nats_per_source(prepared.train, prepared.held_out, vocab_size)
    max_bytes = _MAX_COMPRESSED_BYTES // max(1, len(prepared.held_out))
    return {
        name: (unigram[name], xz_bits_per_byte(store.texts(max_bytes)))
        for name, store in prepared.held_out.items()
    }


@dataclass(frozen=True)
class _Source:
    """Totals of held-out text; None where it has no token."""

    num_documents: int
    num_tokens: int
    num_bytes: int
    nats: float | None
    """Of all its tokens."""
    unigram_nats: float | None
    xz_bits: float | None
    """Of all its bytes."""

    @classmethod
    def of(
        cls, store: SequenceStore, loss: float | None, unigram: float | None, xz: float | None
    ) -> "_Source":
        """From nats a token, and bits a byte of xz."""
        num_tokens, num_bytes = store.num_tokens, store.num_bytes
        return cls(
            store.num_documents,
            num_tokens,
            num_bytes,
            None if loss is None else loss * num_tokens,
            None if unigram is None else unigram * num_tokens,
            None if xz is None else xz * num_bytes,
        )

    @classmethod
    def joined(cls, sources: Iterable["_Source"]) -> "_Source":
        every = [each for each in sources if each.num_tokens]
        counts = (
            sum(getattr(each, name) for each in every)
            for name in ("num_documents", "num_tokens", "num_bytes")
        )
        sums = (_sum(getattr(each, name) for each in every) for name in ("nats", "unigram_nats", "xz_bits"))
        return cls(*counts, *sums)

    def report(self) -> SourceReport:
        loss = None if self.nats is None else self.nats / self.num_tokens
        return SourceReport(
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            loss=loss,
            perplexity=None if loss is None else math.exp(min(loss, 700)),
            bits_per_byte=self._by_byte(self.nats, math.log(2)),
            unigram_bits_per_byte=self._by_byte(self.unigram_nats, math.log(2)),
            xz_bits_per_byte=self._by_byte(self.xz_bits, 1),
        )

    def _by_byte(self, total: float | None, unit: float) -> float | None:
        return None if total is None or not self.num_bytes else total / unit / self.num_bytes


def _sum(values: Iterable[float | None]) -> float | None:
    there = [each for each in values if each is not None]
    return sum(there) if there else None


def _completions(
    model: LanguageModel, layout: Layout, prepared: PreparedSequences, number: int
) -> tuple[Completion, ...]:
    """Beginnings of documents from the middle of as many sources as there are, and how the model goes on."""
    sources = [(name, store) for name, store in prepared.held_out.items() if store.num_documents]
    chosen = [
        (name, store.text(store.num_documents * (turn + 1) // (turn + 2)))
        for turn in range(number)
        for name, store in sources
    ][: number if sources else 0]
    tokenizer, prompts = prepared.tokenizer, []
    for _, text in chosen:
        prompts.append(tokenizer.encode(_beginning(text.decode("utf-8", "replace")))[:_PROMPT_TOKENS])
    here = layout.groups_here(len(prompts))
    new = generate(
        model,
        [[tokenizer.bos_id, *prompt] for prompt in prompts[here.start : here.stop]],
        GenerationSpec(max_tokens=_NEW_TOKENS),
        {tokenizer.eos_id},
        texts=range(here.start, here.stop),
        together=layout.in_step,
    )
    told: list[dict[str, Any]] = together.all_gathered(
        {str(row): tokens for row, tokens in zip(range(here.start, here.stop), new, strict=True)}
    )
    found = {int(row): tokens for each in told for row, tokens in each.items()}
    return tuple(
        Completion(name, tokenizer.decode(prompts[row]), tokenizer.decode(found[row]))
        for row, (name, _) in enumerate(chosen)
    )


def _beginning(text: str) -> str:
    """Some lines of a text, whole ones: those after its head, where it is long enough."""
    lines, taken = text.splitlines(keepends=True), ""
    for line in lines[len(lines) // 3 :]:
        if taken and len(taken) + len(line) > _PROMPT_CHARS // 10:
            break
        taken += line
    return taken[:_PROMPT_CHARS] or text[:_PROMPT_CHARS]
