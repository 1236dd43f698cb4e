"""Report of a finished language model: its held-out text by source, beside what needs no learning."""

from dataclasses import dataclass, field

from moe.records.json_record import JsonRecord

ALL = "all"
"""Name in the report of all sources together, which specs reserve (`moe.spec.sequences.ALL`)."""


@dataclass(frozen=True)
class SourceReport(JsonRecord):
    """Measurements on one source's held-out text, or on a fixed part of it where `max_sequences` asks for one; the
    baselines are of the same bytes. None where there is no text."""

    num_documents: int
    num_tokens: int
    """Predicted ones, the end of each document among them; of conversations, those that the assistant says."""
    num_bytes: int
    loss: float | None
    """Nats a token: dropless, without label smoothing."""
    perplexity: float | None
    """exp(loss)."""
    bits_per_byte: float | None
    unigram_bits_per_byte: float | None
    """Of the training tokens' frequencies (add-one)."""
    xz_bits_per_byte: float | None
    """Bits that xz takes, document by document; of some of them, where held-out text has more than 64 MiB."""
    base_loss: float | None = None
    """Loss of the model beneath an adapter, where there is one."""
    preferred: float | None = None
    """Of pairs, the share whose preferred answer has gained more than the other; `loss` is then that of preferences
    (arXiv 2305.18290, eq. 7), and `num_documents` counts pairs."""


@dataclass(frozen=True)
class Completion(JsonRecord):
    """The beginning of a held-out document, and how the model goes on, greedily."""

    source: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class LanguageReport(JsonRecord):
    """Measurements of a finished language model. Without `sources`: not a report of this task."""

    sources: dict[str, SourceReport] = field(default_factory=dict)
    """By name, and `all` of them together."""
    completions: tuple[Completion, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of each part of the evaluation: `baselines`, `loss`, `complete`."""
