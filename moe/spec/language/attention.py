"""Softmax attention of a decoder: grouped-query (GQA), or multi-head latent attention (MLA)."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from moe.spec.base import Count, CountOrZero, Positive, Spec
from moe.spec.block import AttentionDims, SavedWidths
from moe.spec.errors import Problem, RuleError, SpecError
from moe.spec.language.indexer import IndexerSpec
from moe.spec.parameter import Parameter, Size, bias, linear, norm, with_prefix
from moe.spec.rope import RopeSpec

MAX_LAYERS = 10_000


def _problems_of_rope(rope: RopeSpec, head_dim: int) -> Iterator[Problem]:
    try:
        rope.rotated_dim(head_dim)
    except RuleError as error:
        yield Problem(error.code, "rope.fraction", rope.fraction, f"cannot be: {error.rule}", error.remedy)


class QueryScaling(Spec):
    """Factor of queries that grows with their position (arXiv 2501.19399): 1 + coefficient · ln(1 + ⌊position /
    tokens⌋)."""

    coefficient: Positive
    tokens: Count
    first_position: Literal[0, 1] = 0
    """Number of a sequence's first position: 0 (Mistral 4) or 1 (Llama 4)."""


class GroupedQueryAttentionSpec(Spec):
    """Grouped-query attention (GQA, arXiv 2305.13245); multi-head attention if `num_kv_heads` equals `num_heads`."""

    kind: Literal["grouped_query"] = "grouped_query"
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    value_dim: Count | None = None
    """Head dimension of values, if it is not head_dim (MiMo-V2)."""
    value_multiplier: Positive = 1.0
    """Factor of values (MiMo-V2)."""
    bias: StrictBool = False
    """Whether the projections of queries, keys and values have a bias."""
    output_bias: StrictBool = False
    """Whether the output projection has a bias."""
    query_key_norm: Literal["head", "width", "unscaled"] | None = None
    """QK norm before the rotary embedding: per head, with one weight vector for all (Qwen3), over all heads together
    (OLMoE), or per head without a weight (Llama 4)."""
    norm_after_rope: StrictBool = False
    """Whether QK norm, per head, follows the rotary embedding (Hunyuan, Llama 4)."""
    keys_as_values: StrictBool = False
    """Whether values are the projected keys, before QK norm and the rotary embedding (Gemma 4)."""
    value_norm: StrictBool = False
    """Whether values have an RMS norm per head, without weights (Gemma 4)."""
    clip: Positive | None = None
    """Bound to which queries, keys and values are clamped, after QK norm (OLMo's `clip_qkv`)."""
    scale: Positive | None = None
    """Factor of attention scores. Default: head_dim^-½."""
    rope: RopeSpec = RopeSpec()
    output_gate: StrictBool = False
    """Whether the heads' outputs are multiplied by a sigmoid gate, which has a projection of the queries' shape
    (Qwen3-Next)."""
    sinks: StrictBool = False
    """Whether each head has an attention sink: a logit for attending to nothing (GPT-OSS)."""
    window: Count | None = None
    """Sliding window of `windowed_layers`: number of tokens attended to, including the token itself. Default: no
    window."""
    windowed_layers: Literal["even", "all"] | tuple[CountOrZero, ...] = Field(default="even", max_length=MAX_LAYERS)
    """Layers with the sliding window, counted from 0."""
    window_kind: Literal["sliding", "chunk"] = "sliding"
    """`chunk`: sequences are cut into chunks of `window` tokens, and a token attends to the earlier ones of its chunk
    (Llama 4)."""
    query_scaling: QueryScaling | None = None
    """Factor of the queries by their position (Llama 4). None: 1."""

    @model_validator(mode="after")
    def _coherent(self) -> "GroupedQueryAttentionSpec":
        problems: list[Problem] = []
        if self.num_heads % self.num_kv_heads:
            problems.append(Problem("not_divisible", "num_kv_heads", self.num_kv_heads,
                                    f"must divide num_heads (={self.num_heads})",
                                    "use one of its divisors"))  # fmt: skip
        if self.window is None and self.windowed_layers != "even":
            problems.append(Problem("not_applicable", "windowed_layers", self.windowed_layers,
                                    "has no effect without window",
                                    "set the window of these layers, or omit it"))  # fmt: skip
        if self.window is None and self.window_kind != "sliding":
            problems.append(Problem("not_applicable", "window_kind", self.window_kind, "has no effect without window",
                                    "set the number of tokens in a chunk, or omit it"))  # fmt: skip
        if self.norm_after_rope and not self.has_norm_per_head:
            problems.append(Problem("requires", "norm_after_rope", True, "requires query_key_norm: head or unscaled",
                                    "set query_key_norm, or omit it"))  # fmt: skip
        if self.keys_as_values and self.value_head_dim != self.head_dim:
            problems.append(Problem("unsupported", "value_dim", self.value_dim,
                                    f"must be head_dim (={self.head_dim}) with keys_as_values",
                                    "omit one of them"))  # fmt: skip
        if self.output_gate and self.value_head_dim != self.head_dim:
            problems.append(Problem("unsupported", "value_dim", self.value_dim,
                                    f"must be head_dim (={self.head_dim}) with output_gate",
                                    "omit one of them"))  # fmt: skip
        problems += _problems_of_rope(self.rope, self.head_dim)
        if problems:
            raise SpecError(problems)
        return self

    @property
    def has_norm_per_head(self) -> bool:
        """Whether QK norm is per head."""
        return self.query_key_norm in ("head", "unscaled")

    @property
    def value_head_dim(self) -> int:
        """Head dimension of values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def score_scale(self) -> float:
        """Factor of the scores before softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def window_of(self, layer: int) -> int | None:
        """Sliding window or chunk of a layer, if any, in tokens."""
        layers = self.windowed_layers
        has_window = layers == "all" or (layer % 2 == 0 if layers == "even" else layer in layers)
        return self.window if has_window else None

    def parameters(self, model_dim: int, *, one_plus: bool = False) -> tuple[Parameter, ...]:
        """Parameters of a layer. `one_plus`: whether norms scale by 1 + weight."""
        width: Size = ("model", model_dim)
        queries: Size = ("heads", self.num_heads * self.head_dim)
        keys: Size = ("heads", self.num_kv_heads * self.head_dim)
        values: Size = ("heads", self.num_kv_heads * self.value_head_dim)
        outputs: Size = ("heads", self.num_heads * self.value_head_dim)
        with_gate: Size = ("heads", queries[1] * (2 if self.output_gate else 1))
        projections = {"query": with_gate, "key": keys, **({} if self.keys_as_values else {"value": values})}
        table = [*(linear(name, size, width) for name, size in projections.items()), linear("output", width, outputs)]
        if self.bias:
            table += [bias(name, size) for name, size in projections.items()]
        if self.output_bias:
            table.append(bias("output", width))
        if self.query_key_norm == "head":
            table += [norm(f"{name}_norm", self.head_dim, one_plus=one_plus) for name in ("query", "key")]
        elif self.query_key_norm == "width":
            table += [norm("query_norm", queries[1], "heads", one_plus=one_plus),
                      norm("key_norm", keys[1], "heads", one_plus=one_plus)]  # fmt: skip
        if self.sinks:
            table.append(Parameter("sinks", (self.num_heads,), ("heads",), 0.0))
        return tuple(table)

    def dims(self, projections: int, window: int | None) -> AttentionDims:
        """Dimensions of a layer with `projections` projection weights."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        outputs, values = self.num_heads * self.value_head_dim, self.num_kv_heads * self.value_head_dim
        kept_elements = keys + values + (queries if self.output_gate else 0)
        return AttentionDims(
            queries, queries, outputs, kept_elements, projections, window=window,
            rotated_copies=queries + keys if self.rope.fraction else 0,
            saved_widths=self._saved_widths(queries, keys, window), heads=self.num_heads, key_heads=self.num_kv_heads,
            has_qk_norms=self.query_key_norm is not None, in_chunks=self.window_kind == "chunk" and window is not None,
        )  # fmt: skip

    def _saved_widths(self, queries: int, keys: int, window: int | None) -> SavedWidths:
        """Fused attention saves queries and keys after RoPE; they are saved before RoPE only for their norms and the
        clip. On CPUs, it saves keys and values padded to one width."""
        outputs, values = self.num_heads * self.value_head_dim, self.num_kv_heads * self.value_head_dim
        unfused = 2 * queries if self.output_gate else 0  # both factors of the gate's product
        if window is not None or self.sinks:  # outputs of block-wise attention, or before scaling for sinks
            unfused += outputs
        if outputs != queries:  # outputs without padding
            unfused += outputs
        if self.has_norm_per_head:
            unfused += queries + keys
        if self.query_scaling is not None:
            unfused += queries
        if self.value_norm and not (
            self.keys_as_values and self.has_norm_per_head and not self.norm_after_rope  # one input of both norms
        ):
            unfused += values
        if self.clip is not None:
            unfused += queries + keys + values
        normed_together = queries + keys if self.query_key_norm == "width" else 0
        rows = self.num_heads + self.num_kv_heads if self.has_norm_per_head else 0
        rows += self.num_kv_heads if self.value_norm else 0
        fused_elements = queries + keys + values + outputs
        on_cpu = 2 * max(queries, outputs) + 2 * max(keys, values)
        return SavedWidths(fused_elements, on_cpu, outputs, unfused, self.num_heads + rows, normed_together)


class LatentAttentionSpec(Spec):
    """Multi-head latent attention (MLA, arXiv 2405.04434): keys and values come from a low-rank latent per token."""

    kind: Literal["latent"]
    num_heads: Count
    query_rank: Count | None = None
    """Rank of the queries' latent. None: queries are projected directly."""
    key_value_rank: Count
    head_dim: Count
    """Dimension of queries and keys per head, without the rotary part."""
    rope_dim: Count
    """Dimension of the rotary part: one per query head, one shared by all key heads."""
    value_dim: Count
    bias: StrictBool = False
    """Whether the down-projections to latents and the output projection have a bias."""
    rope: RopeSpec = RopeSpec(pairing="interleaved")
    indexer: IndexerSpec | None = None
    """Indexer that chooses the tokens each query attends to (DeepSeek sparse attention). None: all earlier tokens."""
    query_scaling: QueryScaling | None = None
    """Factor of the queries by their position (Mistral 4). None: 1."""

    @model_validator(mode="after")
    def _coherent(self) -> "LatentAttentionSpec":
        problems = [] if self.indexer is None else list(self.indexer.problems(self.query_rank, self.rope_dim))
        if self.rope.fraction != 1:
            problems.append(Problem("unsupported", "rope.fraction", self.rope.fraction, "must be 1 in latent attention",
                                    "set the rotated dimensions of a head by rope_dim"))  # fmt: skip
        problems += _problems_of_rope(self.rope, self.rope_dim)
        if problems:
            raise SpecError(problems)
        return self

    @property
    def score_scale(self) -> float:
        """Factor of the scores: (head_dim + rope_dim)^-½ times YaRN's sharpening squared, as in DeepSeek."""
        return float((self.head_dim + self.rope_dim) ** -0.5) * self.rope.sharpening**2

    def window_of(self, layer: int) -> int | None:
        return None

    def parameters(self, model_dim: int, *, one_plus: bool = False) -> tuple[Parameter, ...]:
        """Parameters of a layer without its indexer: down-projections to the latents, norms, up-projections, output."""
        width: Size = ("model", model_dim)
        queries: Size = ("heads", self.num_heads * (self.head_dim + self.rope_dim))
        values: Size = ("heads", self.num_heads * self.value_dim)
        latent: Size = ("none", self.key_value_rank)
        down: Size = ("none", self.key_value_rank + self.rope_dim)
        up: Size = ("heads", self.num_heads * (self.head_dim + self.value_dim))
        if self.query_rank is None:
            table = [linear("query", queries, width)]
        else:
            rank: Size = ("none", self.query_rank)
            table = [
                linear("query_down", rank, width),
                norm("query_norm", rank[1], one_plus=one_plus),
                linear("query_up", queries, rank),
            ]
            table += [bias("query_down", rank)] if self.bias else []
        table += [
            linear("key_value_down", down, width),
            norm("key_value_norm", latent[1], one_plus=one_plus),
            linear("key_value_up", up, latent),
            linear("output", width, values),
        ]
        table += [bias("key_value_down", down), bias("output", width)] if self.bias else []
        return tuple(table)

    def indexer_parameters(self, model_dim: int) -> tuple[Parameter, ...]:
        """Parameters of a layer's indexer."""
        if self.indexer is None or self.query_rank is None:
            return ()
        return with_prefix("indexer", self.indexer.parameters(model_dim, self.query_rank))

    def dims(self, projections: int, window: int | None) -> AttentionDims:
        """Dimensions of a layer with `projections` projection weights, without a window."""
        ranks = (self.query_rank or 0) + self.key_value_rank
        queries = self.num_heads * (self.head_dim + self.rope_dim)
        values = self.num_heads * self.value_dim
        kept_latent = 2 * ranks + self.rope_dim  # before and after the norms
        return AttentionDims(
            queries, queries, values, queries + values, projections, kept_latent,
            gathered=None if self.query_rank is None else ranks + self.rope_dim, projects_local_tokens=True,
            saved_widths=self._saved_widths(queries, values, ranks), heads=self.num_heads, key_heads=self.num_heads,
            selection=None if self.indexer is None else self.indexer.dims(self.key_value_rank, self.rope_dim),
            key_value_latent=self.key_value_rank + self.rope_dim,
        )  # fmt: skip

    def _saved_widths(self, queries: int, values: int, ranks: int) -> SavedWidths:
        """Keys and values of all heads are one tensor, which the values keep alive; outputs are copied to make them
        contiguous."""
        up = self.num_heads * (self.head_dim + self.value_dim)
        fused_elements = 2 * queries + up + values
        wider = max(queries, values)
        on_cpu = 4 * queries if queries > values else 2 * wider + up + values
        return SavedWidths(
            fused_elements, on_cpu, unfused=values, wide=self.num_heads, of_tokens=ranks + self.rope_dim,
            of_tokens_wide=3 if self.query_rank is None else 4, gathered=ranks,
        )  # fmt: skip


AttentionSpec = Annotated[GroupedQueryAttentionSpec | LatentAttentionSpec, Field(discriminator="kind")]
