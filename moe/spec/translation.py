"""Encoder-decoder translation model."""

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, StrictBool, model_validator

from moe.spec import expansion
from moe.spec.base import Count, Fraction
from moe.spec.block import AttentionDims, Block, Blocks, FeedForwardDims
from moe.spec.errors import RuleError, SpecError
from moe.spec.language.attention import GroupedQueryAttentionSpec
from moe.spec.moe import MoESpec
from moe.spec.parameter import Parameter, Size, linear, matrix, norm, with_prefix
from moe.spec.parameter_counts import ParameterCounts


class TranslationModelSpec(ParameterCounts):
    """The GShard paper's encoder-decoder Transformer, with experts in every other feed-forward layer.

    `{preset: gshard-tiny}` sets every dimension; other fields override the preset's.
    """

    kind: Literal["translation"] = "translation"
    preset: str | None = None
    model_dim: Count
    """M, the model dimension."""
    num_heads: Count
    head_dim: Count
    ffn_dim: Count
    """Hidden dimension of dense feed-forward layers."""
    num_encoder_layers: Count = Field(le=10_000)
    num_decoder_layers: Count = Field(le=10_000)
    source_vocab_size: Count = Field(ge=300)
    """Size of the sources' byte-level BPE: 256 bytes, 4 special tokens, and merges."""
    target_vocab_size: Count = Field(ge=300)
    share_vocabulary: StrictBool = True
    """Whether both sides share one tokenizer and one embedding table, which is also the output projection."""
    dropout: Fraction = 0.1
    """Dropout of embeddings and sub-layer outputs, but not of attention probabilities, since fused attention cannot key
    its draws by position."""
    moe: MoESpec | None = None
    """MoE layer in place of every `moe_every`-th feed-forward layer. None: a dense model."""
    moe_every: Count = 2
    dense_twin_ffn_dim: Count | None = None
    """Without `moe`: hidden dimension of the feed-forward layers in place of experts, for a dense twin of equal FLOPs
    per token."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, fields: Any) -> Any:
        """Fill in the preset, and the experts' model dimension."""
        return expansion.expand_preset(fields)

    @model_validator(mode="after")
    def _coherent(self) -> "TranslationModelSpec":
        if self.moe is not None and self.moe.model_dim != self.model_dim:
            raise RuleError("mismatch",
                            f"needs moe.model_dim (={self.moe.model_dim}) equal to model_dim (={self.model_dim})",
                            "omit moe.model_dim")  # fmt: skip
        if self.moe is not None and self.moe_every > max(self.num_encoder_layers, self.num_decoder_layers):
            raise RuleError("empty", f"has no layer with experts: moe_every (={self.moe_every}) exceeds both stacks",
                            "lower moe_every or omit moe")  # fmt: skip
        if self.moe is not None and self.moe.branch_norms:
            raise RuleError("unsupported", "cannot have moe.branch_norms", "omit it")
        if self.moe is not None and (problem := self.moe.routing.not_causal()) is not None:
            raise SpecError(replace(problem, path=f"moe.{problem.path}"))
        if self.share_vocabulary and self.source_vocab_size != self.target_vocab_size:
            raise RuleError("mismatch",
                            f"shares one vocabulary, so source_vocab_size (={self.source_vocab_size}) must equal "
                            f"target_vocab_size (={self.target_vocab_size})",
                            "make them equal or set share_vocabulary: false")  # fmt: skip
        if self.moe is not None and self.dense_twin_ffn_dim is not None:
            raise RuleError("conflict", "has both moe and dense_twin_ffn_dim", "omit one of them")
        return self

    @property
    def num_layers(self) -> int:
        return self.num_encoder_layers + self.num_decoder_layers

    @property
    def sides(self) -> int:
        return 2

    @property
    def attention(self) -> GroupedQueryAttentionSpec:
        """Multi-head attention of every layer, either self-attention or cross-attention."""
        return GroupedQueryAttentionSpec(num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.head_dim)

    @property
    def heads(self) -> dict[str, int]:
        return {"num_heads": self.num_heads}

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, numbered from 0 through both stacks, encoder first."""
        if self.moe is None:
            return ()
        encoder = range(self.moe_every - 1, self.num_encoder_layers, self.moe_every)
        decoder = range(self.moe_every - 1, self.num_decoder_layers, self.moe_every)
        return (*encoder, *(self.num_encoder_layers + layer for layer in decoder))

    def blocks(self) -> Blocks:
        """Yield the embeddings, encoder layers, decoder layers and the head."""
        width: Size = ("model", self.model_dim)
        source, target = (
            matrix(f"{side}_embedding", ("vocab", entries), width, self.model_dim)
            for side, entries in (("source", self.source_vocab_size), ("target", self.target_vocab_size))
        )
        output_parameters, tied_parameters = ((), (source,)) if self.share_vocabulary else ((target,), ())
        # The first stage embeds the target too.
        tied_embeddings = () if self.share_vocabulary else (target,)
        yield "", Block("embeddings", (source, norm("encoder_norm", self.model_dim)), tied_embeddings)
        with_experts, unique_blocks = set(self.moe_layers), {}
        for layer in range(self.num_layers):
            decodes = layer >= self.num_encoder_layers
            stack, number = ("decoder", layer - self.num_encoder_layers) if decodes else ("encoder", layer)
            ffn_dim = None if layer in with_experts else self.ffn_dim_of(layer)
            if (stack, ffn_dim) not in unique_blocks:
                unique_blocks[stack, ffn_dim] = self._layer(self._kind(stack, ffn_dim), decodes, ffn_dim)
            yield f"{stack}.{number}", unique_blocks[stack, ffn_dim]
        parameters = (norm("decoder_norm", self.model_dim), *output_parameters)
        yield "", Block("head", parameters, tied_parameters, vocabulary=self.target_vocab_size)

    def _kind(self, stack: str, ffn_dim: int | None) -> str:
        kind = f"{stack} layer"
        return kind + (" with experts" if ffn_dim is None else " without") if self.moe else kind

    def _layer(self, kind: str, decodes: bool, ffn_dim: int | None) -> Block:
        inner = self.num_heads * self.head_dim
        attentions = tuple(
            AttentionDims(
                inner,
                inner,
                inner,
                2 * inner,
                4 * self.model_dim * inner,
                causal=causal,
                heads=self.num_heads,
                key_heads=self.num_heads,
            )
            for causal in ((True, False) if decodes else (False,))
        )
        dense = None if ffn_dim is None else FeedForwardDims(ffn_dim, 2)
        moe = self.moe if ffn_dim is None else None
        return Block(kind, self._layer_parameters(decodes, ffn_dim), attentions=attentions, feed_forward=dense, moe=moe)

    def _layer_parameters(self, decodes: bool, ffn_dim: int | None) -> tuple[Parameter, ...]:
        """Parameters of a layer; experts if `ffn_dim` is None."""
        width: Size = ("model", self.model_dim)
        heads: Size = ("heads", self.num_heads * self.head_dim)
        parameters: list[Parameter] = []
        for prefix in ("", "cross_")[: 1 + decodes]:
            parameters.append(norm(f"{prefix}norm", self.model_dim))
            parameters += with_prefix(
                f"{prefix}attention",
                (
                    linear("query", heads, width),
                    matrix("key_value", heads, width, self.model_dim).times("none", 2),
                    linear("output", width, heads),
                ),
            )
        parameters.append(norm("feed_forward.norm", self.model_dim))
        if ffn_dim is None:
            assert self.moe is not None
            return (*parameters, *with_prefix("feed_forward.moe", self.moe.parameters()))
        hidden_size: Size = ("hidden", ffn_dim)
        dense = linear("w_in", hidden_size, width), linear("w_out", width, hidden_size)
        return (*parameters, *with_prefix("feed_forward.dense", dense))

    def ffn_dim_of(self, layer: int) -> int:
        """Hidden dimension of a dense feed-forward layer; `dense_twin_ffn_dim` in place of experts."""
        in_stack = layer if layer < self.num_encoder_layers else layer - self.num_encoder_layers
        replaces_experts = in_stack % self.moe_every == self.moe_every - 1
        if self.moe is None and replaces_experts and self.dense_twin_ffn_dim is not None:
            return self.dense_twin_ffn_dim
        return self.ffn_dim

    def ffn_dims(self) -> set[int]:
        return {self.ffn_dim_of(layer) for layer in set(range(self.num_layers)) - set(self.moe_layers)}
