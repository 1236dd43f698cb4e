"""The dimensions of an encoder-decoder that translates."""

from collections import Counter
from typing import Any, Literal

from pydantic import Field, StrictBool, model_validator

from moe.spec import presets
from moe.spec.base import Count, Fraction, Spec
from moe.spec.errors import Problem, SpecError
from moe.spec.moe import MoESpec


class TranslationModelSpec(Spec):
    """The paper's encoder-decoder Transformer, with experts in place of every other feed-forward layer.

    `{preset: gshard-tiny}` fills in every dimension; fields written beside it override the preset's.
    """

    kind: Literal["translation"] = "translation"
    preset: str | None = None
    model_dim: Count
    """M, the width of a token."""
    num_heads: Count
    head_dim: Count
    ffn_dim: Count
    """Hidden width of the feed-forward layers without experts."""
    num_encoder_layers: Count = Field(le=10_000)
    num_decoder_layers: Count = Field(le=10_000)
    source_vocab_size: Count = Field(ge=300)
    """Entries of the byte-level BPE of the sources: 256 bytes, 4 special tokens, the rest merges."""
    target_vocab_size: Count = Field(ge=300)
    share_vocabulary: StrictBool = True
    """One tokenizer and one embedding table for both sides, which is also the output projection."""
    dropout: Fraction = 0.1
    """On embeddings and on each sub-layer's output. Attention probabilities have none: fused attention cannot
    key its draws by position."""
    moe: MoESpec | None = None
    """The layer that replaces every `moe_every`-th feed-forward layer; none makes the model dense."""
    moe_every: Count = 2
    dense_twin_ffn_dim: Count | None = None
    """Without `moe`: the hidden width of the feed-forward layers that experts would replace, so that a twin
    spends the same arithmetic on a token."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        """Merge the preset's dimensions, and hand the model's width to the experts."""
        return presets.expanded(given)

    @model_validator(mode="after")
    def _coherent(self) -> "TranslationModelSpec":
        if self.moe is not None and self.moe.model_dim != self.model_dim:
            raise ValueError(
                f"needs moe.model_dim (={self.moe.model_dim}) equal to model_dim "
                f"(={self.model_dim}); leave moe.model_dim out"
            )
        if self.moe is not None and self.moe_every > max(self.num_encoder_layers, self.num_decoder_layers):
            raise ValueError(
                f"has no layer with experts: moe_every (={self.moe_every}) exceeds both stacks; "
                "lower moe_every or leave moe out"
            )
        if (
            self.moe is not None
            and self.moe.router == "expert_choice"
            and self.moe.later_tokens_choose_too == "no"
        ):
            raise SpecError(
                Problem(
                    "moe.router",
                    "expert_choice",
                    "lets later tokens decide which experts an earlier one gets, and this model's decoder is causal",
                    "use another router, or say moe.later_tokens_choose_too: accepted",
                )
            )
        if self.share_vocabulary and self.source_vocab_size != self.target_vocab_size:
            raise ValueError(
                f"shares one vocabulary, so source_vocab_size (={self.source_vocab_size}) must "
                f"equal target_vocab_size (={self.target_vocab_size}); "
                "make them equal or set share_vocabulary: false"
            )
        if self.moe is not None and self.dense_twin_ffn_dim is not None:
            raise ValueError("has both moe and dense_twin_ffn_dim; leave one of them out")
        return self

    @property
    def num_layers(self) -> int:
        return self.num_encoder_layers + self.num_decoder_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts, counted through both stacks: encoder layers first, from 0."""
        if self.moe is None:
            return ()
        encoder = range(self.moe_every - 1, self.num_encoder_layers, self.moe_every)
        decoder = range(self.moe_every - 1, self.num_decoder_layers, self.moe_every)
        return (*encoder, *(self.num_encoder_layers + layer for layer in decoder))

    def num_experts_total(self) -> int:
        return len(self.moe_layers) * self.moe.num_experts if self.moe else 0

    def num_expert_parameters(self) -> int:
        """Weights inside routed experts: two matrices of M x H each, three where they have a gate, and biases."""
        return self.num_experts_total() * self.moe.parameters_per_expert if self.moe else 0

    def num_parameters(self) -> int:
        """All weights: embeddings, attention, norms, feed-forward layers, routers, shared and routed experts."""
        m = self.model_dim
        attention = 4 * m * self.num_heads * self.head_dim
        embeddings = self.source_vocab_size * m
        if not self.share_vocabulary:
            embeddings += self.target_vocab_size * m
        blocks = attention * (self.num_encoder_layers + 2 * self.num_decoder_layers)
        norms = m * (2 * self.num_encoder_layers + 3 * self.num_decoder_layers + 2)
        feed_forward = sum(2 * m * ffn_dim * layers for ffn_dim, layers in self.ffn_layers())
        beside_experts = 0
        if self.moe is not None:
            beside_experts = len(self.moe_layers) * (m * self.moe.num_experts + self.moe.shared_parameters)
        return embeddings + blocks + norms + feed_forward + beside_experts + self.num_expert_parameters()

    def num_active_parameters(self) -> int:
        """All weights but those of the experts that a token does not choose; of both stacks, whole tables included."""
        chosen = 0
        if self.moe is not None:
            chosen = len(self.moe_layers) * self.moe.experts_per_token * self.moe.parameters_per_expert
        return self.num_parameters() - self.num_expert_parameters() + chosen

    def ffn_dim_of(self, layer: int) -> int:
        """The hidden width of a layer's feed-forward layer without experts: a dense twin's is wider where its model has
        experts."""
        in_stack = layer if layer < self.num_encoder_layers else layer - self.num_encoder_layers
        replaces_experts = in_stack % self.moe_every == self.moe_every - 1
        if self.moe is None and replaces_experts and self.dense_twin_ffn_dim is not None:
            return self.dense_twin_ffn_dim
        return self.ffn_dim

    def ffn_layers(self) -> tuple[tuple[int, int], ...]:
        """(hidden width, number of layers) of the feed-forward layers without experts."""
        with_experts = set(self.moe_layers)
        widths = Counter(
            self.ffn_dim_of(layer) for layer in range(self.num_layers) if layer not in with_experts
        )
        return tuple(widths.items())
