"""Decoder-only language model."""

from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from moe.spec import expansion
from moe.spec.adapter_names import A, B
from moe.spec.block import AttentionDims, Block, Blocks, FeedForwardDims
from moe.spec.errors import SpecError
from moe.spec.language.adapter_problems import adapter_problems
from moe.spec.language.attention import AttentionSpec, GroupedQueryAttentionSpec, LatentAttentionSpec
from moe.spec.language.fields import LanguageModelFields
from moe.spec.language.linear import LinearAttentionSpec
from moe.spec.language.linear_kinds import LinearAttention
from moe.spec.language.model_problems import model_problems
from moe.spec.parameter import Parameter, Size, bias, frozen, layer_norm, linear, norm, with_prefix
from moe.spec.upcycle import upcycling_problems


class LanguageModelSpec(LanguageModelFields):
    """Decoder-only Transformer with RMS norms or layer norms, and no biases unless a part has them.

    `{preset: mixtral-8x7b}` sets every dimension, and `{from: FOLDER}` those in the folder's `config.json`; other
    fields override them.
    """

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
        problems = list(model_problems(self)) or [
            *upcycling_problems(
                self.upcycle, self.from_folder, self.moe, self.moe_layers, num_layers=self.num_layers,
                ffn_dim=self.ffn_dim, ffn_activation=self.ffn_activation, has_adapter=self.adapter is not None,
            ),
            *adapter_problems(
                self.adapter, self.parameters, vocab_size=self.vocab_size, tie_embeddings=self.tie_embeddings,
                moe=self.moe, indexer=self.indexer, normalize_output=self.normalize_output,
            ),
        ]  # fmt: skip
        if problems:
            raise SpecError(problems)
        return self

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
