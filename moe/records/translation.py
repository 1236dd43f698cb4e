"""Report of a finished translation run: both held-out sets, beside what needs no learning."""

from dataclasses import dataclass, field

from moe.records.json_record import JsonRecord


@dataclass(frozen=True)
class TranslationScores(JsonRecord):
    """sacrebleu's corpus chrF and BLEU, 0 to 100; None where there is no pair."""

    chrf: float | None
    bleu: float | None


@dataclass(frozen=True)
class SubsetReport(JsonRecord):
    """Scores of the model and of two baselines on one subset of a held-out set."""

    num_pairs: int
    num_languages: int
    model: TranslationScores
    copy: TranslationScores
    """Scores of the source taken as its translation."""
    most_frequent: TranslationScores
    """Scores of the commonest training target, for every source."""


@dataclass(frozen=True)
class SetReport(JsonRecord):
    """Losses and scores on one held-out set, or on a fixed part of it where `max_pairs` asks for one."""

    num_pairs: int
    num_target_tokens: int
    loss: float | None
    """Nats a target token: dropless, without label smoothing; None where the set is empty."""
    unigram_loss: float | None
    """Loss of the training targets' token frequencies (add-one); None where the set is empty."""
    subsets: dict[str, SubsetReport]
    """By name: `all`, `not_latin`, and thirds of the languages by their pairs in training: `high`, `mid`, `low`."""
    num_with_text_in_training: int | None = None
    """Pairs of the whole set, of `seen` alone, whose source and target stand in training under a sibling locale
    (pt, pt_BR)."""


@dataclass(frozen=True)
class Example(JsonRecord):
    """One pair of a held-out set, for people to read."""

    set: str
    lang: str
    script: str
    source: str
    reference: str
    translation: str


@dataclass(frozen=True)
class TranslationReport(JsonRecord):
    """Measurements of a finished translation model. Without `sets`: not a report of this task."""

    sets: dict[str, SetReport] = field(default_factory=dict)
    """By name: `unseen` and `seen` (see moe.data)."""
    languages: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Tags of the languages of each subset but `all`."""
    most_frequent_target: str = ""
    examples: tuple[Example, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of each part of the evaluation: `baselines`, `loss`, `translate`, `score`."""
