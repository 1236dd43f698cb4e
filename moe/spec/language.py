"""The dimensions of a decoder-only language model."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, model_validator

from moe.spec import presets
from moe.spec.base import Count, CountOrZero, Spec
from moe.spec.errors import Problem, SpecError
from moe.spec.moe import MoESpec


class GroupedQueryAttentionSpec(Spec):
    """Softmax attention whose query heads share keys and values in groups (arXiv 2305.13245); as many `num_kv_heads`
    as `num_heads` is multi-head attention."""

    kind: Literal["grouped_query"] = "grouped_query"
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    bias: StrictBool = False
    """Whether the four projections have one."""
    query_key_norm: StrictBool = False
    """Norms of queries and keys, with a scale for each channel of a head."""
    output_gate: StrictBool = False
    """Whether a projection as wide as the queries weighs what the heads give (Qwen3-Next)."""
    sinks: StrictBool = False
    """Whether each head has a logit to attend to nothing (GPT-OSS)."""
    window: Count | None = None
    """Tokens that every other layer looks back at most; none looks at all of them when left out."""

    @model_validator(mode="after")
    def _grouped(self) -> "GroupedQueryAttentionSpec":
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                Problem("num_kv_heads", self.num_kv_heads, f"must divide num_heads (={self.num_heads})",
                        "use a divisor of it")
            )  # fmt: skip
        return self


class LatentAttentionSpec(Spec):
    """Multi-head latent attention: keys and values come from a narrow latent of each token (arXiv 2405.04434)."""

    kind: Literal["latent"]
    num_heads: Count
    query_rank: Count | None = None
    """Width of the queries' latent; none projects them straight."""
    key_value_rank: Count
    head_dim: Count
    """Of queries and keys, without the part that carries positions."""
    rope_dim: Count
    """The part that carries positions: of each query head, and one for all keys."""
    value_dim: Count


class LinearAttentionSpec(Spec):
    """Gated DeltaNet (arXiv 2412.06464): a state of fixed size for each head in place of keys and values."""

    num_key_heads: Count
    num_value_heads: Count
    key_dim: Count
    """Of one head."""
    value_dim: Count
    conv_tokens: Count = 4
    """Width of the convolution over queries, keys and values."""


AttentionSpec = Annotated[GroupedQueryAttentionSpec | LatentAttentionSpec, Field(discriminator="kind")]


class LanguageModelSpec(Spec):
    """A decoder-only Transformer: root-mean-square norms, no biases but where a part says so.

    `{preset: mixtral-8x7b}` fills in every dimension; fields written beside it override the preset's.
    """

    kind: Literal["language"]
    preset: str | None = None
    model_dim: Count
    """M, the width of a token."""
    num_layers: Count = Field(le=10_000)
    attention: AttentionSpec
    linear_attention: LinearAttentionSpec | None = None
    """What stands in place of `attention` in all layers but every `full_attention_every`-th."""
    full_attention_every: Count = 1
    ffn_dim: Count | None = None
    """Hidden width of the feed-forward layers without experts, where the model has any."""
    ffn_activation: Literal["relu", "gelu", "swiglu", "geglu"] = "swiglu"
    """Of the feed-forward layers without experts; `swiglu` and `geglu` have three matrices."""
    vocab_size: Count
    tie_embeddings: StrictBool = False
    """One table for the embedding and the output projection."""
    moe: MoESpec | None = None
    """The layer of experts; none makes the model dense."""
    moe_every: Count = 1
    """Every so-manieth layer has experts, from `first_dense_layers` on."""
    first_dense_layers: CountOrZero = 0

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        """Merge the preset's dimensions, and hand the model's width to the experts."""
        return presets.expanded(given)

    @model_validator(mode="after")
    def _coherent(self) -> "LanguageModelSpec":
        if problems := list(self._problems()):
            raise SpecError(problems)
        return self

    def _problems(self) -> list[Problem]:
        problems = []
        if self.moe is not None and self.moe.model_dim != self.model_dim:
            problems.append(Problem("moe.model_dim", self.moe.model_dim,
                                    f"must equal model_dim (={self.model_dim})", "leave it out"))  # fmt: skip
        if self.moe is not None and not self.moe_layers:
            problems.append(Problem("moe_every", self.moe_every, "leaves no layer with experts",
                                    "lower it or first_dense_layers, or leave moe out"))  # fmt: skip
        if self.ffn_dim is None and len(self.moe_layers) < self.num_layers:
            problems.append(Problem("ffn_dim", None, "is required where layers have no experts", "add it"))
        if self.linear_attention is None and self.full_attention_every > 1:
            problems.append(Problem("full_attention_every", self.full_attention_every,
                                    "says nothing without linear_attention", "leave it out"))  # fmt: skip
        return problems

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts, counted from 0."""
        if self.moe is None:
            return ()
        return tuple(range(self.first_dense_layers + self.moe_every - 1, self.num_layers, self.moe_every))

    def has_full_attention(self, layer: int) -> bool:
        return (
            self.linear_attention is None
            or layer % self.full_attention_every == self.full_attention_every - 1
        )

    @property
    def num_ffn_matrices(self) -> int:
        """Of a feed-forward layer without experts."""
        return 3 if self.ffn_activation in ("swiglu", "geglu") else 2

    def num_experts_total(self) -> int:
        return len(self.moe_layers) * self.moe.num_experts if self.moe else 0

    def num_expert_parameters(self) -> int:
        """Weights inside routed experts."""
        return self.num_experts_total() * self.moe.parameters_per_expert if self.moe else 0

    def num_parameters(self) -> int:
        """All weights: embeddings, attention, norms, feed-forward layers, routers, shared and routed experts."""
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * self.model_dim
        attention = sum(self._attention_parameters(layer) for layer in range(self.num_layers))
        norms = (2 * self.num_layers + 1) * self.model_dim
        plain = self.num_layers - len(self.moe_layers)
        feed_forward = plain * self.num_ffn_matrices * self.model_dim * (self.ffn_dim or 0)
        beside_experts = 0
        if self.moe is not None:
            router = self.model_dim * self.moe.num_experts
            beside_experts = len(self.moe_layers) * (router + self.moe.shared_parameters)
        return tables + attention + norms + feed_forward + beside_experts + self.num_expert_parameters()

    def num_active_parameters(self) -> int:
        """All weights but those of the experts that a token does not choose. Embedding tables count whole, as in most
        published figures (GPT-OSS leaves the first out)."""
        chosen = 0
        if self.moe is not None:
            chosen = len(self.moe_layers) * self.moe.experts_per_token * self.moe.parameters_per_expert
        return self.num_parameters() - self.num_expert_parameters() + chosen

    def _attention_parameters(self, layer: int) -> int:
        if not self.has_full_attention(layer):
            assert self.linear_attention is not None
            return linear_attention_parameters(self.linear_attention, self.model_dim)
        if isinstance(self.attention, LatentAttentionSpec):
            return latent_attention_parameters(self.attention, self.model_dim)
        return grouped_query_parameters(self.attention, self.model_dim)


def grouped_query_parameters(attention: GroupedQueryAttentionSpec, model_dim: int) -> int:
    """Of one layer."""
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    matrices = model_dim * (queries * (3 if attention.output_gate else 2) + 2 * keys)
    biases = queries + 2 * keys + model_dim if attention.bias else 0
    norms = 2 * attention.head_dim if attention.query_key_norm else 0
    return matrices + biases + norms + (attention.num_heads if attention.sinks else 0)


def latent_attention_parameters(attention: LatentAttentionSpec, model_dim: int) -> int:
    """Of one layer: down to the latents, their norms, up from them, and the output."""
    heads, latent = attention.num_heads, attention.key_value_rank
    queries = heads * (attention.head_dim + attention.rope_dim)
    rank = attention.query_rank
    to_queries = model_dim * queries if rank is None else model_dim * rank + rank + rank * queries
    to_latent = model_dim * (latent + attention.rope_dim) + latent
    from_latent = latent * heads * (attention.head_dim + attention.value_dim)
    return to_queries + to_latent + from_latent + heads * attention.value_dim * model_dim


def linear_attention_parameters(attention: LinearAttentionSpec, model_dim: int) -> int:
    """Of one layer: queries, keys, values, gates, the convolution, decays, a norm, and the output."""
    keys = attention.num_key_heads * attention.key_dim
    values = attention.num_value_heads * attention.value_dim
    projections = model_dim * (2 * keys + 2 * values + 2 * attention.num_value_heads)
    convolution = (2 * keys + values) * attention.conv_tokens
    return (
        projections + convolution + 2 * attention.num_value_heads + attention.value_dim + values * model_dim
    )
