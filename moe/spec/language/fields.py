"""Fields of a decoder-only language model, and which layers are of which kind."""

from typing import Annotated, Literal

from pydantic import AliasChoices, Field, StrictBool

from moe.spec.adapter import AdapterSpec
from moe.spec.base import Count, CountOrZero, Positive, Text
from moe.spec.language.attention import MAX_LAYERS, AttentionSpec, GroupedQueryAttentionSpec, LatentAttentionSpec
from moe.spec.language.indexer import IndexerSpec
from moe.spec.language.linear import LinearAttentionSpec
from moe.spec.language.linear_kinds import LinearAttention
from moe.spec.moe import MoESpec
from moe.spec.parameter_counts import ParameterCounts
from moe.spec.upcycle import UpcycleSpec


class LanguageModelFields(ParameterCounts):
    """Fields of a language model, and questions about its layers."""

    kind: Literal["language"]
    preset: str | None = None
    from_folder: Text | None = Field(
        default=None, max_length=4096, validation_alias=AliasChoices("from", "from_folder")
    )
    """Written `from`: folder in the Hugging Face format with the initial weights and the tokenizer, a path or fsspec
    URL under the service's data roots."""
    from_config: str | None = Field(default=None, pattern="^[0-9a-f]{16}$")
    """Digest of that folder's `config.json`, stored when it sets other fields. Those fields are refused if the config
    has changed."""
    ignored_keys: tuple[Annotated[Text, Field(max_length=400)], ...] = Field(default=(), max_length=200)
    """Keys of that `config.json` without effect on the computation, each with the reason; stored when it sets other
    fields."""
    model_dim: Count
    """M, the model dimension."""
    num_layers: Count = Field(le=MAX_LAYERS)
    attention: AttentionSpec
    local_attention: GroupedQueryAttentionSpec | None = None
    """Replaces `attention` in the layers that its sliding window names (Gemma, MiMo-V2), or in `local_layers`."""
    local_layers: tuple[CountOrZero, ...] | None = Field(default=None, max_length=MAX_LAYERS)
    """Layers with `local_attention`, counted from 0, where its window does not name them. Each attention then has its
    own window, or none."""
    linear_attention: LinearAttention | None = None
    """Replaces `attention` in all layers but `attention_layers` or, without those, every `full_attention_every`-th."""
    full_attention_every: Count = 1
    attention_layers: tuple[CountOrZero, ...] | None = Field(default=None, max_length=MAX_LAYERS)
    """Layers with `attention`, counted from 0, where `full_attention_every` does not express them."""
    feed_forward_layers: tuple[CountOrZero, ...] | None = Field(default=None, max_length=MAX_LAYERS)
    """Layers, counted from 0, that are only a feed-forward or MoE layer, where all others are only attention or linear
    attention (Nemotron-H). None: each layer is both."""
    ffn_dim: Count | None = None
    """Hidden dimension of dense feed-forward layers, if there are any."""
    ffn_activation: Literal["relu", "relu2", "gelu", "swiglu", "geglu", "geglu_tanh"] = "swiglu"
    """Activation of dense feed-forward layers; `swiglu`, `geglu` and `geglu_tanh` have three matrices."""
    vocab_size: Count
    tie_embeddings: StrictBool = False
    """Whether embedding and output projection share one table."""
    moe: MoESpec | None = None
    """MoE layer. None: a dense model."""
    moe_every: Count = 1
    """Every n-th layer from `first_dense_layers` on has experts."""
    first_dense_layers: CountOrZero = 0
    dense_layers: tuple[CountOrZero, ...] = Field(default=(), max_length=MAX_LAYERS)
    """Further layers without experts, counted from 0."""
    output_bias: StrictBool = False
    """Whether logits have a trained bias per token of the vocabulary (Phi-3.5-MoE)."""
    normalize_output: StrictBool = False
    """Whether each column of the output projection, of one dimension of the hidden states, is divided by its Euclidean
    norm over the vocabulary, a constant to gradients (Ling 1)."""
    norm_kind: Literal["rms", "layer"] = "rms"
    """Norms of hidden states: RMS norms, or layer norms with a bias (Phi-3.5-MoE). Norms within attention are RMS norms
    in either case."""
    norm_eps: Positive = 1e-6
    """Epsilon of norms, added to the mean square or the variance; 1e-6 in norms of MLA latents."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before each attention, feed-forward and MoE layer; after it, before the residual addition (OLMo 2); or both
    (Gemma)."""
    norm_one_plus: StrictBool = False
    """Whether norms scale by 1 + weight (Qwen3-Next); linear attention's output norm never does."""
    embedding_multiplier: Positive | Literal["sqrt_model_dim"] = 1.0
    """Factor of the embeddings (Granite, like `residual_multiplier` and `logits_divisor`). `sqrt_model_dim` is √M,
    rounded to the compute dtype (Gemma)."""
    residual_multiplier: Positive = 1.0
    """Factor of each attention, feed-forward and MoE layer's output before it is added to the residual stream."""
    logits_divisor: Positive = 1.0
    logits_cap: Positive | None = None
    """Bound c of the logits, which become c · tanh(logits / c) (Gemma). None: no bound."""
    layer_scalar: StrictBool = False
    """Whether each layer's output is multiplied by a number that is loaded with the weights and not trained, 1 in new
    models (Gemma 4)."""
    upcycle: UpcycleSpec | None = None
    """Upcycling of the folder's dense model to this mixture; together with `from`, it sets the other fields. None: the
    folder's own model."""
    adapter: AdapterSpec | None = None
    """LoRA adapter to train instead of the weights; may also be written next to `model`."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, from 0."""
        if self.moe is None:
            return ()
        candidates = range(self.first_dense_layers + self.moe_every - 1, self.num_layers, self.moe_every)
        return tuple(layer for layer in candidates if layer not in self.dense_layers and self.has_feed_forward(layer))

    @property
    def dense_ffn_layers(self) -> tuple[int, ...]:
        """Layers with a dense feed-forward layer, from 0."""
        without_experts = set(range(self.num_layers)) - set(self.moe_layers)
        return tuple(layer for layer in sorted(without_experts) if self.has_feed_forward(layer))

    def has_feed_forward(self, layer: int) -> bool:
        """Whether a layer has a feed-forward or MoE layer."""
        return self.feed_forward_layers is None or layer in self.feed_forward_layers

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention or linear attention."""
        return self.feed_forward_layers is None or layer not in self.feed_forward_layers

    def has_full_attention(self, layer: int) -> bool:
        """Whether a layer has attention that is not linear."""
        if not self.has_attention(layer):
            return False
        if self.attention_layers is not None:
            return layer in self.attention_layers
        return self.linear_attention is None or layer % self.full_attention_every == self.full_attention_every - 1

    @property
    def num_ffn_matrices(self) -> int:
        """Matrices of a dense feed-forward layer."""
        return 2 if self.ffn_activation in ("relu", "relu2", "gelu") else 3

    def attention_of(self, layer: int) -> AttentionSpec | LinearAttention | None:
        """Attention of a layer, if it has any."""
        if not self.has_attention(layer):
            return None
        if self.linear_attention is not None and not self.has_full_attention(layer):
            return self.linear_attention
        if self.local_attention is not None and self.has_local_attention(layer):
            return self.local_attention
        return self.attention

    def has_local_attention(self, layer: int) -> bool:
        """Whether a layer has `local_attention`."""
        if self.local_attention is None or self.local_layers is not None:
            return layer in (self.local_layers or ())
        return self.local_attention.window_of(layer) is not None

    @property
    def indexer(self) -> IndexerSpec | None:
        """Indexer of the attention, if it has one."""
        return self.attention.indexer if isinstance(self.attention, LatentAttentionSpec) else None

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer has an indexer of its own."""
        return self.indexer is not None and self.attention_of(layer) is self.attention and self.indexer.is_in(layer)

    def selecting_layer(self, layer: int) -> int | None:
        """Layer whose indexer chooses the tokens that this layer attends to, if any."""
        return next((earlier for earlier in range(layer, -1, -1) if self.has_indexer(earlier)), None)

    def window_of(self, layer: int) -> int | None:
        """Sliding window or chunk of a layer, in tokens; None if it has none."""
        attention = self.attention_of(layer)
        return None if attention is None or isinstance(attention, LinearAttentionSpec) else attention.window_of(layer)
