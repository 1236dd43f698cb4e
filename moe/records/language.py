"""Evaluation reports of language models and of user modules, and how a generated text ended."""

from dataclasses import dataclass, field
from typing import Literal

from moe.records.json_record import JsonRecord

Reason = Literal["end", "max_tokens", "stop"]


@dataclass(frozen=True)
class ScoredToken(JsonRecord):
    """Generated token with its log-probability under the model."""

    text: str
    """Text of the token alone; replacement characters stand for incomplete ones."""
    id: int
    log_prob: float
    """Natural logarithm, before temperature, penalty and filters."""


@dataclass(frozen=True)
class Ending(JsonRecord):
    """Why a generated text ended, and facts about it."""

    reason: Reason
    """`end`: an end-of-text token; `max_tokens`: the token limit; `stop`: a stop string."""
    num_tokens: int
    """Generated tokens, without the end-of-text token."""
    notes: tuple[str, ...] | None = None
    """Settings of the model's `generation_config.json` that were not applied, in words."""
    tokens: tuple[ScoredToken, ...] | None = None
    """The generated tokens, if their log-probabilities were requested."""


@dataclass(frozen=True)
class ModuleReport(JsonRecord):
    """Evaluation of a trained user module. Without `loss`: not a report of this task."""

    num_steps: int = 0
    loss: float | None = None
    """Loss on the batch after the last of `train.num_steps`, not used in training."""
    numbers: dict[str, float | None] | None = None
    """Other scalars that the module returned with that loss, by name; None if not finite."""


ALL = "all"
"""Name of all sources combined; specs reserve it (`moe.spec.sequences.ALL`)."""


@dataclass(frozen=True)
class SourceReport(JsonRecord):
    """Metrics on one source's held-out text, or a fixed sample (`max_sequences`); None without text.

    The baselines cover the same bytes.
    """

    num_documents: int
    num_tokens: int
    """Target tokens, including document ends; in conversations, those of the assistant."""
    num_bytes: int
    loss: float | None
    """Nats per token, without capacity limits and label smoothing."""
    perplexity: float | None
    """exp(loss)."""
    bits_per_byte: float | None
    unigram_bits_per_byte: float | None
    """Unigram model of the training tokens, with add-one smoothing."""
    xz_bits_per_byte: float | None
    """Each document compressed by xz; only some of them beyond 64 MiB of held-out text."""
    base_loss: float | None = None
    """Loss of the base model without its adapter, if it has one."""
    preferred: float | None = None
    """DPO accuracy: share of pairs whose preferred answer has the higher implicit reward.

    `loss` is then the preference loss, and `num_documents` counts pairs.
    """
    desirable_reward: float | None = None
    """KTO and APO-zero: mean of β · log(π / π_ref) over desirable answers.

    `loss` is then the preference loss, and `num_documents` counts answers.
    """
    undesirable_reward: float | None = None
    """The same over undesirable answers."""
    kl: float | None = None
    """KTO: estimate of the KL divergence from the reference model that the loss uses, in nats per answer."""

    @property
    def reward_margin(self) -> float | None:
        """Reward of desirable answers minus that of undesirable ones; None without one of them."""
        if self.desirable_reward is None or self.undesirable_reward is None:
            return None
        return self.desirable_reward - self.undesirable_reward


@dataclass(frozen=True)
class Completion(JsonRecord):
    """Prompt from a held-out document, and the model's greedy completion."""

    source: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class LanguageReport(JsonRecord):
    """Evaluation of a finished language model. Without `sources`: not a report of this task."""

    sources: dict[str, SourceReport] = field(default_factory=dict)
    """By name, plus `all` for the combination."""
    completions: tuple[Completion, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each part of the evaluation: `baselines`, `loss`, `complete`."""
