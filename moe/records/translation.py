"""Evaluation report of a translation model: both held-out sets, with baselines."""

from dataclasses import dataclass, field

from moe.records.json_record import JsonRecord


@dataclass(frozen=True)
class TranslationScores(JsonRecord):
    """sacrebleu's corpus chrF and BLEU, 0 to 100; None without pairs."""

    chrf: float | None
    bleu: float | None


@dataclass(frozen=True)
class SubsetReport(JsonRecord):
    """Scores of the model and two baselines on one subset of a held-out set."""

    num_pairs: int
    num_languages: int
    model: TranslationScores
    copy: TranslationScores
    """Baseline: the source as its own translation."""
    most_frequent: TranslationScores
    """Baseline: the most frequent training target for every source."""


@dataclass(frozen=True)
class SetReport(JsonRecord):
    """Losses and scores on one held-out set, or on a fixed sample of it (`max_pairs`)."""

    num_pairs: int
    num_target_tokens: int
    loss: float | None
    """Nats per target token, without capacity limits and label smoothing; None for an empty set."""
    unigram_loss: float | None
    """Loss of a unigram model of the training targets (add-one); None for an empty set."""
    subsets: dict[str, SubsetReport]
    """By name: `all`, `not_latin`, and thirds of the languages by training pairs: `high`, `mid`, `low`."""
    num_with_text_in_training: int | None = None
    """Full `seen` set only: pairs whose source and target are in training under a sibling locale (pt, pt_BR)."""


@dataclass(frozen=True)
class Example(JsonRecord):
    """Pair of a held-out set with its translation, for display."""

    set: str
    lang: str
    script: str
    source: str
    reference: str
    translation: str


@dataclass(frozen=True)
class TranslationReport(JsonRecord):
    """Evaluation of a finished translation model. Without `sets`: not a report of this task."""

    sets: dict[str, SetReport] = field(default_factory=dict)
    """By name: `unseen` and `seen` (see moe.data)."""
    languages: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Language tags of each subset except `all`."""
    most_frequent_target: str = ""
    examples: tuple[Example, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each part of the evaluation: `baselines`, `loss`, `translate`, `score`."""
