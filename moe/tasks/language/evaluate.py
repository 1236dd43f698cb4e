"""Evaluation of a language model on held-out text by source, beside what needs no learning."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moe.clock import Clock
from moe.data.sequences import PreparedSequences, SequenceStore, unigram_nats, xz_bytes
from moe.parallel import Layout, together
from moe.records import Completion, HeldOutLosses, LanguageReport, SourceReport
from moe.spec import EvaluationSpec, JobSpec
from moe.spec.generation import GenerationSpec
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.context import SequenceContext
from moe.tasks.language.generation import generate
from moe.tasks.language.loss import loss_of
from moe.tasks.language.model import LanguageModel

_POSITIONS_PER_RANK = 8192
"""Positions of a batch that one rank takes at a time."""
_NUM_COMPLETIONS, _PROMPT_TOKENS, _NEW_TOKENS = 3, 48, 48
ALL = "all"


def evaluate(
    model: LanguageModel, layout: Layout, prepared: PreparedSequences, spec: JobSpec
) -> LanguageReport:
    """The report of a finished run, the same on every rank. All ranks call it together.

    With `max_sequences`, the first so many sequences of each source stand for it, and baselines are of the same.
    """
    clock, max_sequences = Clock(), spec.train.evaluation.max_sequences
    baselines = together.from_first(lambda: _baselines(prepared, max_sequences))
    clock.lap("baselines")
    found = {
        name: _Measured(nats, **baselines[name])
        for name, nats in _nats(model, layout, prepared, max_sequences).items()
    }
    clock.lap("loss")
    if len(found) > 1:
        found[ALL] = _Measured.together(found.values())
    completions = _completions(model, layout, prepared, spec.train.evaluation.num_examples)
    clock.lap("complete")
    report = LanguageReport({name: each.report() for name, each in found.items()}, completions, clock.laps)
    return LanguageReport.read(together.from_first(report.to_plain))
