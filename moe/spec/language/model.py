"""Decoder-only language model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, SerializerFunctionWrapHandler, StrictBool, model_serializer, model_validator

from moe.spec import expansion
from moe.spec.adapter import AdapterSpec
from moe.spec.adapter_names import A, B
from moe.spec.base import Count, CountOrZero, Positive, Text
from moe.spec.block import AttentionDims, Block, Blocks, FeedForwardDims
from moe.spec.errors import Problem, SpecError
from moe.spec.language.adapter_problems import adapter_problems
from moe.spec.language.attention import MAX_LAYERS, AttentionSpec, GroupedQueryAttentionSpec, LatentAttentionSpec
from moe.spec.language.indexer import IndexerSpec
from moe.spec.language.linear import LinearAttentionSpec
from moe.spec.language.linear_kinds import LinearAttention
from moe.spec.moe import MoESpec
from moe.spec.parameter import Parameter, Size, bias, frozen, layer_norm, linear, norm, with_prefix
from moe.spec.parameter_counts import ParameterCounts
from moe.spec.upcycle import UpcycleSpec, upcycling_problems


class LanguageModelSpec(ParameterCounts):
    """Decoder-only Transformer with RMS norms or layer norms, and no biases unless a part has them.

    `{preset: mixtral-8x7b}` sets every dimension, and `{from: FOLDER}` those in the folder's `config.json`; other
    fields override them.
    """

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

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, fields: Any) -> Any:
        """Fill in the preset, and the experts' model dimension."""
        return expansion.expand_preset(fields)

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write `from_folder` as `from`, a Python keyword."""
        return {("from" if name == "from_folder" else name): value for name, value in handler(self).items()}

    @model_validator(mode="after")
    def _coherent(self) -> "LanguageModelSpec":
        if problems := list(self._problems()):
            raise SpecError(problems)
        return self

    def _problems(self) -> list[Problem]:
        problems = []
        if self.moe is not None and self.moe.model_dim != self.model_dim:
            problems.append(Problem("mismatch", "moe.model_dim", self.moe.model_dim,
                                    f"must equal model_dim (={self.model_dim})", "omit it"))  # fmt: skip
        if self.moe is not None and not self.moe_layers:
            problems.append(Problem("empty", "moe_every", self.moe_every, "leaves no layer with experts",
                                    "lower it or first_dense_layers, or omit moe"))  # fmt: skip
        if self.moe is not None and (problem := self.moe.routing.not_causal()) is not None:
            problems.append(replace(problem, path=f"moe.{problem.path}"))
        if self.moe is not None and self.moe.branch_norms and (self.norm_placement != "sandwich" or self.norm_one_plus):
            problems.append(Problem("requires", "moe.branch_norms", True,
                                    "requires norm_placement: sandwich, without norm_one_plus",
                                    "change them, or omit it"))  # fmt: skip
        if self.norm_kind == "layer":
            problems += self._problems_of_layer_norms()
        if self.ffn_dim is None and self.dense_ffn_layers:
            problems.append(Problem("missing", "ffn_dim", None, "is required where layers have no experts", "add it"))
        if self.linear_attention is not None and self.full_attention_every == 1 and self.attention_layers is None:
            problems.append(
                Problem(
                    "empty",
                    "full_attention_every",
                    1,
                    "leaves no layer with linear_attention",
                    "set how many layers there are per full-attention layer; Qwen3-Next has 4",
                )
            )
        if self.local_attention is not None:
            problems += self._problems_of_local_attention(self.local_attention)
        layer_lists = [(name, getattr(self, name) or ())
                       for name in ("dense_layers", "attention_layers", "feed_forward_layers",
                                    "local_layers")]  # fmt: skip
        for name in ("attention", "local_attention"):
            layers_with_window = getattr(getattr(self, name), "windowed_layers", ())
            if isinstance(layers_with_window, tuple):
                layer_lists.append((f"{name}.windowed_layers", layers_with_window))
        for path, layers in layer_lists:
            if beyond := [layer for layer in layers if layer >= self.num_layers]:
                problems.append(Problem("out_of_range", path, beyond[0],
                                        f"must be below num_layers (={self.num_layers})",
                                        "count layers from 0"))  # fmt: skip
        if self.indexer is not None:
            indexed = [layer for layer in range(self.num_layers) if self.attention_of(layer) is self.attention]
            problems += self.indexer.layer_problems(indexed, self.num_layers)
        parts = {"moe": ("moe_every", "first_dense_layers", "dense_layers"),
                 "linear_attention": ("full_attention_every", "attention_layers"),
                 "local_attention": ("local_layers",)}  # fmt: skip
        for part, names in parts.items():
            for name in names if getattr(self, part) is None else ():
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    problems.append(Problem("not_applicable", name, value, f"has no effect without {part}", "omit it"))
        if self.attention_layers is not None and self.full_attention_every > 1:
            rule = "has no effect with attention_layers"
            problems.append(Problem("conflict", "full_attention_every", self.full_attention_every, rule, "omit one"))
        if both := set(self.attention_layers or ()) & set(self.feed_forward_layers or ()):
            rule = "must not be in feed_forward_layers, whose layers have no attention"
            problems.append(Problem("conflict", "attention_layers", min(both), rule, "omit it in one of them"))
        return problems or [
            *upcycling_problems(
                self.upcycle, self.from_folder, self.moe, self.moe_layers, num_layers=self.num_layers,
                ffn_dim=self.ffn_dim, ffn_activation=self.ffn_activation, has_adapter=self.adapter is not None,
            ),
            *adapter_problems(
                self.adapter, self.parameters, vocab_size=self.vocab_size, tie_embeddings=self.tie_embeddings,
                moe=self.moe, indexer=self.indexer,
            ),
        ]  # fmt: skip

    def _problems_of_layer_norms(self) -> Iterator[Problem]:
        rule = "applies to RMS norms only, not to norm_kind: layer"
        if self.norm_one_plus:
            yield Problem("conflict", "norm_one_plus", True, rule, "omit one of them")
        if self.moe is not None and self.moe.branch_norms:
            yield Problem("conflict", "moe.branch_norms", True, rule, "omit one of them")

    def _problems_of_local_attention(self, local: GroupedQueryAttentionSpec) -> Iterator[Problem]:
        if local.window is None and self.local_layers is None:
            yield Problem("missing", "local_attention.window", None, "is required", "add it, or omit local_attention")
        if (window := getattr(self.attention, "window", None)) is not None and self.local_layers is None:
            rule = "conflicts with local_attention, which all layers with a window have"
            yield Problem("conflict", "attention.window", window, rule, "omit one of them")
        if self.linear_attention is not None:
            rule = "cannot be used together with linear_attention"
            yield Problem("conflict", "local_attention", None, rule, "omit one of them")

    @property
    def sides(self) -> int:
        return 1

    @property
    def keeps_frozen(self) -> bool:
        return self.adapter is not None and self.from_folder is not None

    @property
    def heads(self) -> dict[str, int]:
        heads = {"attention.num_heads": self.attention.num_heads}
        if isinstance(self.attention, GroupedQueryAttentionSpec):
            heads["attention.num_kv_heads"] = self.attention.num_kv_heads
        if self.local_attention is not None:
            heads["local_attention.num_heads"] = self.local_attention.num_heads
            heads["local_attention.num_kv_heads"] = self.local_attention.num_kv_heads
        if self.linear_attention is not None:
            heads |= self.linear_attention.heads(self.model_dim)
        return heads

    def ffn_dims(self) -> set[int]:
        return set() if self.ffn_dim is None else {self.ffn_dim}

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

    def blocks(self) -> Blocks:
        """Yield the embedding, the layers and the head."""
        width: Size = ("model", self.model_dim)
        last = self._norm("norm")
        embedding, output = (linear(name, ("vocab", self.vocab_size), width) for name in ("embedding", "output"))
        embeddings: tuple[Parameter, ...] = (embedding,)
        outputs: tuple[Parameter, ...] = (output,)
        output_biases: tuple[Parameter, ...] = (bias("output", ("vocab", self.vocab_size)),) if self.output_bias else ()
        if self.adapter is not None:
            last = frozen(last)
            embeddings, outputs = (self.adapter.with_table_adapter(table) for table in (embedding, output))
            output_biases = output_biases if self.adapter.saves(output.name) else frozen(output_biases)
        yield "", Block("embeddings", embeddings)
        with_experts, tables, unique_blocks = set(self.moe_layers), {}, {}
        for layer in range(self.num_layers):
            path, targets = f"layers.{layer}", frozenset[tuple[str, int]]()
            layer_kind = (
                layer in with_experts,
                self.has_attention(layer),
                self.has_full_attention(layer),
                self.has_local_attention(layer),
                self.window_of(layer) is not None,
                self.has_indexer(layer),
            )
            if layer_kind not in tables:
                tables[layer_kind] = self._layer_parameters(layer, experts=layer_kind[0])
            if self.adapter is not None:
                targets = self.adapter.target_ranks(path, tables[layer_kind])
            if (block_key := (layer_kind, targets)) not in unique_blocks:
                table = tables[layer_kind]
                if self.adapter is not None:
                    table = self.adapter.with_adapters(table, targets)
                kind = self._kind(layer, experts=layer_kind[0])
                unique_blocks[block_key] = self._layer(layer, table, kind, experts=layer_kind[0])
            yield path, unique_blocks[block_key]
        output_parameters, tied_parameters = ((), embeddings) if self.tie_embeddings else (outputs, ())
        head_parameters = (*last, *output_parameters, *output_biases)
        yield "", Block("head", head_parameters, tied_parameters, vocabulary=self.vocab_size,
                        caps_logits=self.logits_cap is not None)  # fmt: skip

    def _kind(self, layer: int, *, experts: bool) -> str:
        kinds = []
        if self.has_attention(layer):
            is_full, has_parts = self.has_full_attention(layer), self.feed_forward_layers is None
            kinds += ([] if has_parts else ["attention"]) if is_full else ["linear attention"]
            kinds += ["local attention"] if self.local_layers is not None and self.has_local_attention(layer) else []
            kinds += [self._window_kind(layer)] if self.window_of(layer) is not None else []
            selects = self.indexer is not None and is_full
            kinds += ["shared token selection"] if selects and not self.has_indexer(layer) else []
        if self.has_feed_forward(layer):
            kinds += ["with experts" if experts else "without experts"] if self.moe else []
        return " ".join(["layer", ", ".join(kinds)]).rstrip()

    def _window_kind(self, layer: int) -> str:
        return (
            "sliding window" if getattr(self.attention_of(layer), "window_kind", "sliding") == "sliding" else "chunks"
        )

    def _layer(self, layer: int, parameters: tuple[Parameter, ...], kind: str, *, experts: bool) -> Block:
        has_dense = self.has_feed_forward(layer) and not experts
        assert self.ffn_dim is not None or not has_dense
        return Block(
            kind, parameters, attentions=self._attention_dims(layer, parameters), moe=self.moe if experts else None,
            feed_forward=FeedForwardDims(self.ffn_dim, self.num_ffn_matrices) if self.ffn_dim and has_dense else None,
            extra_norms=self._num_extra_norms(experts=experts),
        )  # fmt: skip

    def _num_extra_norms(self, *, experts: bool) -> int:
        branch_norms = 2 if experts and self.moe is not None and self.moe.branch_norms else 0
        return branch_norms + (2 if self.norm_placement == "sandwich" else 0)

    def _attention_dims(self, layer: int, parameters: tuple[Parameter, ...]) -> tuple[AttentionDims, ...]:
        attention = self.attention_of(layer)
        if attention is None:
            return ()
        if isinstance(attention, LinearAttentionSpec):
            return (attention.dims(self.model_dim),)
        matrices = (
            parameter
            for parameter in parameters
            if parameter.name.startswith("attention.")
            and not parameter.name.endswith((A, B))
            and len(parameter.shape) == 2
        )
        dims = attention.dims(sum(matrix.numel for matrix in matrices), self.window_of(layer))
        if not self.has_indexer(layer):
            dims = dims.sharing_selection()
        return (dims,)

    def _layer_parameters(self, layer: int, *, experts: bool) -> tuple[Parameter, ...]:
        parameters: list[Parameter] = []
        if (attention := self.attention_of(layer)) is not None:
            parameters += [*self._norms(), *with_prefix("attention", self._attention_parameters(layer, attention))]
        if self.has_feed_forward(layer):
            feed_forward_parameters = self._moe_parameters() if experts else self._dense_parameters()
            norms = self._norms()
            if experts and self.moe is not None and self.moe.branch_norms:
                norms = norms[1:]  # the branches have their own before them
            parameters += with_prefix("feed_forward", (*norms, *feed_forward_parameters))
        if self.layer_scalar:
            parameters.append(Parameter("scalar", (1,), ("none",), frozen=True))
        return tuple(parameters)

    def _attention_parameters(self, layer: int, attention: AttentionSpec | LinearAttention) -> tuple[Parameter, ...]:
        if isinstance(attention, LinearAttentionSpec):
            return attention.parameters(self.model_dim)
        parameters = attention.parameters(self.model_dim, one_plus=self.norm_one_plus)
        if self.has_indexer(layer) and isinstance(attention, LatentAttentionSpec):
            parameters += attention.indexer_parameters(self.model_dim)
        return parameters

    def _norms(self) -> tuple[Parameter, ...]:
        """Norms before and after an attention, feed-forward or MoE layer."""
        names = {"pre": ("norm",), "post": ("post_norm",), "sandwich": ("norm", "post_norm")}[self.norm_placement]
        return tuple(parameter for name in names for parameter in self._norm(name))

    def _norm(self, name: str) -> tuple[Parameter, ...]:
        """Parameters of a norm of hidden states."""
        if self.norm_kind == "layer":
            return layer_norm(name, self.model_dim)
        return (norm(name, self.model_dim, one_plus=self.norm_one_plus),)

    def _moe_parameters(self) -> tuple[Parameter, ...]:
        assert self.moe is not None
        return tuple(with_prefix("moe", self.moe.parameters()))

    def _dense_parameters(self) -> tuple[Parameter, ...]:
        assert self.ffn_dim is not None
        width: Size = ("model", self.model_dim)
        hidden_size: Size = ("hidden", self.ffn_dim)
        input_matrices = (linear(name, hidden_size, width) for name in ("w_in", "w_gate")[: self.num_ffn_matrices - 1])
        return tuple(with_prefix("dense", (*input_matrices, linear("w_out", width, hidden_size))))

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
