"""The dimensions of a decoder-only language model."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, model_validator

from moe.spec import expansion
from moe.spec.base import Count, CountOrZero, Spec
from moe.spec.block import AttentionDims, Block, Blocks, FeedForwardDims
from moe.spec.counted import Counted
from moe.spec.errors import Problem, SpecError
from moe.spec.moe import MoESpec
from moe.spec.parameter import Parameter, Size, linear, norm, within


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

    def parameters(self, model_dim: int) -> tuple[Parameter, ...]:
        """Those of a layer."""
        width: Size = ("model", model_dim)
        queries: Size = ("heads", self.num_heads * self.head_dim)
        keys: Size = ("heads", self.num_kv_heads * self.head_dim)
        with_gate: Size = ("heads", queries[1] * (2 if self.output_gate else 1))
        found = [linear("query", with_gate, width), linear("key", keys, width), linear("value", keys, width),
                 linear("output", width, queries)]  # fmt: skip
        if self.bias:
            biases = {"query": queries, "key": keys, "value": keys, "output": width}
            found += [Parameter(f"{name}.bias", (size,), (dim,), 0.0) for name, (dim, size) in biases.items()]
        if self.query_key_norm:
            found += [norm(f"{name}_norm", self.head_dim) for name in ("query", "key")]
        if self.sinks:
            found.append(Parameter("sinks", (self.num_heads,), ("heads",), 0.0))
        return tuple(found)

    def dims(self, projections: int, window: int | None) -> AttentionDims:
        """Those of a layer with so many weights of projections, which looks back `window` positions at most."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        kept = 2 * keys + (queries if self.output_gate else 0)
        return AttentionDims(
            queries, queries, queries, kept, projections, window=window, rotated=queries + keys
        )


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

    def parameters(self, model_dim: int) -> tuple[Parameter, ...]:
        """Those of a layer: down to the latents, their norms, up from them, and the output."""
        width: Size = ("model", model_dim)
        queries: Size = ("heads", self.num_heads * (self.head_dim + self.rope_dim))
        values: Size = ("heads", self.num_heads * self.value_dim)
        latent: Size = ("none", self.key_value_rank)
        down: Size = ("none", self.key_value_rank + self.rope_dim)
        up: Size = ("heads", self.num_heads * (self.head_dim + self.value_dim))
        if self.query_rank is None:
            found = [linear("query", queries, width)]
        else:
            rank: Size = ("none", self.query_rank)
            found = [
                linear("query_down", rank, width),
                norm("query_norm", rank[1]),
                linear("query_up", queries, rank),
            ]
        return (
            *found,
            linear("key_value_down", down, width),
            norm("key_value_norm", latent[1]),
            linear("key_value_up", up, latent),
            linear("output", width, values),
        )

    def dims(self, projections: int, window: int | None) -> AttentionDims:
        """Those of a layer with so many weights of projections; it looks back at all positions."""
        ranks = (self.query_rank or 0) + self.key_value_rank
        queries = self.num_heads * (self.head_dim + self.rope_dim)
        values = self.num_heads * self.value_dim
        kept_latent = 2 * ranks + self.rope_dim  # before and after their norms
        return AttentionDims(queries, queries, values, queries + values, projections, kept_latent)


class LinearAttentionSpec(Spec):
    """Gated DeltaNet (arXiv 2412.06464): a state of fixed size for each head in place of keys and values."""

    num_key_heads: Count
    num_value_heads: Count
    key_dim: Count
    """Of one head."""
    value_dim: Count
    conv_tokens: Count = 4
    """Width of the convolution over queries, keys and values."""

    def parameters(self, model_dim: int) -> tuple[Parameter, ...]:
        """Those of a layer: queries, keys, values, gates, decays, the convolution, a norm, and the output."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        width: Size = ("model", model_dim)
        decays: Size = ("heads", 2 * self.num_value_heads)
        conv: Size = ("none", self.conv_tokens)
        return (
            linear("projection", ("heads", 2 * keys + 2 * values), width),
            linear("decays", decays, width),
            linear("convolution", ("heads", 2 * keys + values), conv),
            Parameter("decay", (self.num_value_heads,), ("heads",), 0.0),
            Parameter("time_step", (self.num_value_heads,), ("heads",), 0.0),
            norm("value_norm", self.value_dim),
            linear("output", width, ("heads", values)),
        )

    def dims(self, projections: int, window: int | None) -> AttentionDims:
        """Those of a layer with so many weights of projections, the convolution's among them; it has no window."""
        keys, heads = self.num_key_heads * self.key_dim, self.num_value_heads
        values = heads * self.value_dim
        kept = 2 * (keys + values)  # before the convolution and after it, with the gate
        projections -= (2 * keys + values) * self.conv_tokens
        return AttentionDims(2 * keys, heads * self.key_dim, values, kept, projections, linear=self.value_dim)


AttentionSpec = Annotated[GroupedQueryAttentionSpec | LatentAttentionSpec, Field(discriminator="kind")]


class LanguageModelSpec(Counted):
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
    """Attention in place of `attention` in all layers but every `full_attention_every`-th."""
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
        return expansion.expanded(given)

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
    def sides(self) -> int:
        return 1

    @property
    def heads(self) -> dict[str, int]:
        found = {"attention.num_heads": self.attention.num_heads}
        if isinstance(self.attention, GroupedQueryAttentionSpec):
            found["attention.num_kv_heads"] = self.attention.num_kv_heads
        if self.linear_attention is not None:
            found["linear_attention.num_key_heads"] = self.linear_attention.num_key_heads
        return found

    def ffn_dims(self) -> set[int]:
        return set() if self.ffn_dim is None else {self.ffn_dim}

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

    def blocks(self) -> Blocks:
        """The embedding, the layers, and what makes logits of what they give."""
        width: Size = ("model", self.model_dim)
        embedding, output = (
            linear(name, ("vocab", self.vocab_size), width) for name in ("embedding", "output")
        )
        yield "", Block("embeddings", (embedding,))
        with_experts, made = set(self.moe_layers), {}
        for layer in range(self.num_layers):
            of = layer in with_experts, self.has_full_attention(layer), self.window_of(layer) is not None
            if of not in made:
                made[of] = self._layer(*of[:2], self.window_of(layer), self._kind(*of))
            yield f"layers.{layer}", made[of]
        own, tied = ((), (embedding,)) if self.tie_embeddings else ((output,), ())
        yield "", Block("head", (norm("norm", self.model_dim), *own), tied, vocabulary=self.vocab_size)

    def _kind(self, experts: bool, full: bool, windowed: bool) -> str:
        kinds = [] if full else ["linear attention"]
        kinds += ["sliding window"] if windowed else []
        kinds += ["with experts" if experts else "without experts"] if self.moe else []
        return " ".join(["layer", ", ".join(kinds)]).rstrip()

    def _layer(self, experts: bool, full: bool, window: int | None, kind: str) -> Block:
        parameters = self._of_layer(experts, full)
        matrices = (
            each for each in parameters if each.name.startswith("attention.") and len(each.shape) == 2
        )
        attention = self.attention if full else self.linear_attention
        assert attention is not None
        dims = attention.dims(sum(each.numel for each in matrices), window)
        if experts:
            return Block(kind, parameters, attentions=(dims,), moe=self.moe)
        assert self.ffn_dim is not None
        dense = FeedForwardDims(self.ffn_dim, self.num_ffn_matrices)
        return Block(kind, parameters, attentions=(dims,), feed_forward=dense)

    def _of_layer(self, experts: bool, full: bool) -> tuple[Parameter, ...]:
        attention = self.attention if full else self.linear_attention
        assert attention is not None
        found = (
            norm("norm", self.model_dim),
            *within("attention", attention.parameters(self.model_dim)),
            norm("feed_forward.norm", self.model_dim),
        )
        if experts:
            assert self.moe is not None
            return (*found, *within("feed_forward.moe", self.moe.parameters()))
        assert self.ffn_dim is not None
        width: Size = ("model", self.model_dim)
        hidden: Size = ("hidden", self.ffn_dim)
        into = (linear(name, hidden, width) for name in ("w_in", "w_gate")[: self.num_ffn_matrices - 1])
        return (*found, *within("feed_forward.dense", (*into, linear("w_out", width, hidden))))

    def window_of(self, layer: int) -> int | None:
        """Tokens that a layer looks back at most, where there is a bound."""
        window: int | None = getattr(self.attention, "window", None)
        return window if layer % 2 == 0 else None
