"""Decoder-only language model; the spec selects its family."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from moe.experts import Experts
from moe.layers.adapter_dropout import AdapterDropout, DropoutKey
from moe.layers.attention_mask import AttentionMask
from moe.layers.block import TransformerBlock
from moe.layers.context_chunks import ChunkDocuments
from moe.layers.embedding_table import EmbeddingTable
from moe.layers.indexer import Indexer
from moe.layers.linear import Linear
from moe.layers.moe import MoELayer
from moe.layers.nll import cap_logits, smoothed_nll, token_nll
from moe.layers.projected_nll import projected_nll, projected_token_nll
from moe.layers.query_scaling import query_scales
from moe.layers.rotary import rotary_table
from moe.layers.sequence import PassRows, RotaryTable, SequencePass
from moe.layers.shared_experts import SharedExperts
from moe.parallel.stages import VirtualStage
from moe.spec import AdapterSpec, LanguageModelSpec
from moe.spec.language import AttentionSpec, LatentAttentionSpec
from moe.spec.rope import LongRopeScaling
from moe.tasks.batch_context import BatchContext, lengths_of, positions_of
from moe.tasks.language.batches import IGNORE_INDEX, SequencesBatch
from moe.tasks.language.blocks import build_block, build_norm
from moe.tasks.sequence_model import DecodingState, SequenceModel
from moe.tasks.sharded_model import build_sharded
from moe.tasks.task import IndexerLoss, Loss

_ADAPTED_MODULES = (Linear, EmbeddingTable, SharedExperts, MoELayer, Experts)
_ADAPTED_MATRICES: dict[type[nn.Module], tuple[str, ...]] = {
    Linear: ("weight",), EmbeddingTable: ("weight",), SharedExperts: ("w_in", "w_gate", "w_out"), MoELayer: ("router",),
    Experts: ("w_in", "w_out"),
}  # fmt: skip
"""Matrices with adapters of their own scale; experts have one scale for `w_in` and `w_gate`."""

_SMALLEST_NORM = 1e-7
"""Added to norms of columns, as in the code published with Ling 1."""


class LanguageModel(SequenceModel):
    """Decoder-only transformer."""

    spec: LanguageModelSpec
    entry_points = ("hidden_states", "extend")

    def __init__(self, spec: LanguageModelSpec, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(spec, dtype)
        self.embedding = EmbeddingTable()
        multiplier = spec.embedding_multiplier
        self.embedding_multiplier = (
            float(torch.tensor(spec.model_dim**0.5, dtype=dtype, device="cpu"))
            if multiplier == "sqrt_model_dim"
            else multiplier
        )
        self.layers = nn.ModuleList(build_block(spec, layer) for layer in range(spec.num_layers))
        self.norm = build_norm(spec)
        self.output = Linear() if spec.output_bias or not spec.tie_embeddings else None
        if spec.adapter is not None:
            self._scale_adapters(spec.adapter)
            if (rows := spec.adapter.trainable_token_indices) is not None:
                self.embedding.token_ids = rows.embedding
                if self.output is not None and not spec.tie_embeddings:
                    self.output.token_ids = rows.output
            if spec.adapter.dropout:
                self._set_dropout(spec.adapter.dropout)

    def _set_dropout(self, probability: float) -> None:
        """Set dropout on LoRA inputs, except in routed experts, whose rows arrive without token ids."""
        for path, module in self.named_modules():
            if isinstance(module, Linear):
                module.dropout = AdapterDropout(probability, f"{path}.weight")
            elif isinstance(module, SharedExperts):
                names = ("w_in", "w_gate", "w_out")
                module.dropout = {name: AdapterDropout(probability, f"{path}.{name}") for name in names}
            elif isinstance(module, MoELayer):
                module.router_dropout = AdapterDropout(probability, f"{path}.router")

    @property
    def output_embedding(self) -> nn.Parameter:
        return self.embedding.weight if self.output is None or self.spec.tie_embeddings else self.output.weight

    @property
    def _adapts_output(self) -> bool:
        """Whether logits are more than products with `output_embedding`."""
        if self.output is None:
            return self.embedding.token_rows is not None
        token_rows = self.embedding.token_rows if self.spec.tie_embeddings else self.output.token_rows
        return any(part is not None for part in (self.output.weight_lora_a, self.output.bias, token_rows))

    def _project(
        self, hidden_states: Tensor, dropout_key: DropoutKey | None = None, row_norms: Tensor | None = None
    ) -> Tensor:
        if self.output is None or self.spec.tie_embeddings:
            logits = self.embedding.project(hidden_states)
            logits = logits if self.output is None else self.output.add_bias(logits)
        else:
            logits = self.output(hidden_states, dropout_key, row_norms)
        return cap_logits(logits, self.spec.logits_cap)

    def project(self, hidden_states: Tensor) -> Tensor:
        """Logits `[T, V]` of final hidden states `[T, M]`, in evaluation."""
        return self._on_last_stage(
            lambda: (self._project(hidden_states),), [(len(hidden_states), self.spec.vocab_size)], hidden_states
        )[0]

    def smoothed_nll(self, hidden_states: Tensor, batch: SequencesBatch, smoothing: float) -> tuple[Tensor, Tensor]:
        """(label-smoothed, plain) negative log-likelihood, summed over this rank's labels, of the `hidden_states` of a
        batch."""
        loss, nll = self._on_last_stage(
            lambda: self._smoothed_nll(hidden_states, batch, smoothing), [(), ()], hidden_states, is_wide=True
        )
        return loss, nll

    def _smoothed_nll(self, hidden_states: Tensor, batch: SequencesBatch, smoothing: float) -> tuple[Tensor, Tensor]:
        labels_t = self.share(batch.labels)
        if not self._adapts_output:
            return smoothed_nll(
                hidden_states, self.output_embedding, labels_t, smoothing, IGNORE_INDEX, batch.label_positions,
                projects_all=batch.projects_all, cap=self.spec.logits_cap,
            )  # fmt: skip
        return projected_nll(
            hidden_states, self._projection(batch), labels_t, smoothing, IGNORE_INDEX, self.spec.vocab_size,
            batch.label_positions, projects_all=batch.projects_all,
        )  # fmt: skip

    def token_nll(self, hidden_states: Tensor, batch: SequencesBatch) -> Tensor:
        """Negative log-likelihood `[t]` of this rank's labels, of the `hidden_states` of a batch."""
        return self._on_last_stage(
            lambda: (self._token_nll(hidden_states, batch),), [hidden_states.shape[:1]], hidden_states, is_wide=True
        )[0]

    def _token_nll(self, hidden_states: Tensor, batch: SequencesBatch) -> Tensor:
        labels_t, positions = self.share(batch.labels), batch.label_positions
        if not self._adapts_output:
            cap = self.spec.logits_cap
            return token_nll(hidden_states, self.output_embedding, labels_t, IGNORE_INDEX, positions, cap=cap)
        projection, size = self._projection(batch), self.spec.vocab_size
        return projected_token_nll(hidden_states, projection, labels_t, IGNORE_INDEX, size, positions)

    def _projection(self, batch: SequencesBatch) -> Callable[[Tensor, Tensor], Tensor]:
        """Logits of hidden states at positions among this rank's tokens of a batch."""
        key = self._output_key(batch.tokens, batch.context)
        row_norms = self.output.row_norms() if self.output is not None and self.output.has_magnitudes else None

        def project(hidden_states: Tensor, positions: Tensor) -> Tensor:
            chunk_key = None if key is None else replace(key, ids=key.ids[positions])
            return self._project(hidden_states, chunk_key, row_norms)

        return project

    def _output_key(self, tokens: Tensor, context: BatchContext) -> DropoutKey | None:
        """Key of the dropout before the output's adapter, for this rank's tokens."""
        if self.output is None or self.output.weight_lora_a is None or self.output.dropout is None:
            return None
        return self._document_pass(tokens, context).rows.shard_dropout_key

    def forward(self, tokens: Tensor, context: BatchContext | None = None) -> Tensor:
        """Next-token logits `[B, L, V]` of `tokens` int64 `[B, L]`.

        Without `context` each row is one document, at step 0 of seed 0, in training mode as set by `train()` or
        `eval()`.
        """
        context = context or BatchContext(training=self.training)
        hidden_states = self.hidden_states(tokens, context)
        logits = self._project(hidden_states, self._output_key(tokens, context))
        return self._sequence_shard(tokens).gather_results(logits).view(*tokens.shape, logits.shape[-1])

    def hidden_states(self, tokens: Tensor, context: BatchContext | None = None) -> Tensor:
        """Final normalized hidden states `[t, M]` of this rank's shard of the tokens (see `share`); on a rank without
        the last pipeline stage, those that it sends."""
        context = context or BatchContext(training=self.training)
        run = self._document_pass(tokens, context)
        x = self._through_stages(
            run.rows, tokens.device, lambda: self._embed(tokens, run), lambda block, x: block(x, run)
        )
        return self._final_states(x) if self.stages.active[-1].is_last else x

    def indexer_loss(self, context: BatchContext) -> IndexerLoss | None:
        """Losses of the indexers in the last pass of `hidden_states`, which had this context; None without any."""
        spec = self.spec.indexer
        if spec is None or not spec.loss_coefficient or not context.training or not torch.is_grad_enabled():
            return None
        num_indexers = sum(self.spec.has_indexer(layer) for layer in range(self.spec.num_layers))
        if not num_indexers:  # all layers have local attention
            return None
        divergences = [module.last_divergence for module in self._active_modules() if isinstance(module, Indexer)]
        own_divergences = [value for value in divergences if value is not None]
        divergence = torch.stack(own_divergences).sum() if own_divergences else torch.zeros((), device=self.device)
        return IndexerLoss(divergence, num_indexers, spec.loss_coefficient)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Disable the LoRA adapters within the block."""
        modules = [module for module in self.modules() if isinstance(module, _ADAPTED_MODULES)]
        scales = [module.lora_scales for module in modules]
        for module in modules:
            module.lora_scales = {}
        try:
            yield
        finally:
            for module, lora_scales in zip(modules, scales, strict=True):
                module.lora_scales = lora_scales

    def _active_modules(self) -> Iterator[nn.Module]:
        """Modules of the blocks that a pass runs."""
        for stage in self.stages.active:
            for block in self._stage_blocks(stage):
                yield from block.modules()

    def _scale_adapters(self, adapter: AdapterSpec) -> None:
        for path, module in self.named_modules():
            if isinstance(module, _ADAPTED_MODULES):
                names = _ADAPTED_MATRICES[type(module)]
                module.lora_scales = {name: adapter.scale_of(f"{path}.{name}") for name in names}

    def start(self, num_rows: int, num_positions: int) -> DecodingState:
        """State with empty caches for `num_positions` positions, prompts included."""
        return self._new_state(num_rows, num_positions, self.device)

    def stage_parts(self, stage: VirtualStage) -> Iterator[str]:
        if stage.is_first or (stage.is_last and self.spec.tie_embeddings):
            yield "embedding"
        yield from (f"layers.{layer}" for layer in stage.layers)
        if stage.is_last:
            yield from ("norm", "output")

    @property
    def _vocab_size(self) -> int:
        return self.spec.vocab_size

    def _stage_blocks(self, stage: VirtualStage) -> Iterator[TransformerBlock]:
        return (self.layers[layer] for layer in stage.layers)  # type: ignore[misc]

    def _receive_shared(self, stage: VirtualStage, rows: PassRows, device: torch.device) -> None:
        if (layer := self._shared_selection(stage.layers.start, rows)) is not None:
            assert self.spec.indexer is not None
            shape = *rows.shard.local_shape, self.spec.indexer.top_k
            rows.selections[layer] = self.stages.receive(stage, shape, torch.int32, device)

    def _send_shared(self, stage: VirtualStage, rows: PassRows) -> None:
        if (layer := self._shared_selection(stage.layers.stop, rows)) is not None:
            selection = rows.selections[layer]
            assert selection is not None
            self.stages.send(stage, selection)

    def _shared_selection(self, layer: int, rows: PassRows) -> int | None:
        """Layer before `layer` whose selection of tokens is shared with it or a later one, if this pass has one; None
        before the first layer."""
        indexer, selecting_layer = self.spec.indexer, self.spec.selecting_layer(layer)
        if indexer is None or not indexer.shared_layers or selecting_layer in (layer, None):
            return None
        return selecting_layer if rows.num_positions > indexer.top_k and indexer.stage == "sparse" else None

    def _embed(self, tokens: Tensor, run: SequencePass, first_position: int = 0) -> Tensor:
        x = self.embedding(run.rows.shard.take(tokens.reshape(-1)), self.compute_dtype)
        return x if self.embedding_multiplier == 1 else x * self.embedding_multiplier

    def _final_states(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.spec.normalize_output:
            x = x / self._output_column_norms().to(x.dtype)
        return x if self.spec.logits_divisor == 1 else x / self.spec.logits_divisor

    def _output_column_norms(self) -> Tensor:
        """Norms `[M]` of the output projection's columns, float32 or wider. Dividing hidden states by them is dividing
        the columns."""
        weight = self.output_embedding.detach()
        wide = torch.promote_types(weight.dtype, torch.float32)
        return torch.linalg.vector_norm(weight, dim=0, dtype=wide) + _SMALLEST_NORM

    def _document_pass(self, tokens: Tensor, context: BatchContext) -> SequencePass:
        """Pass inputs for `tokens` `[B, L]`, whose rows hold one or several documents."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens {tuple(tokens.shape)} must be [B, L]; pass a row per sequence")
        num_rows, length = tokens.shape
        documents = context.documents
        if documents is not None and documents.shape != tokens.shape:
            raise ValueError(
                f"documents {tuple(documents.shape)} must have the shape of tokens {tuple(tokens.shape)}; number "
                "each position"
            )
        lengths = None
        if documents is None:
            positions = torch.arange(length, device=tokens.device).expand(num_rows, -1)
        else:
            positions = positions_of(documents)
            lengths = lengths_of(positions)
        rows = PassRows(
            self._sequence_shard(tokens),
            AttentionMask(documents=documents),
            length,
            documents=documents,
            batch_tokens=_batch_tokens(tokens, context),
        )
        if (shard := rows.context) is not None:
            positions, lengths = shard.take(positions), None if lengths is None else shard.take(lengths)
            if documents is not None:
                rows = replace(rows, chunk_documents=ChunkDocuments(documents, shard.chunks))
        rows = self._with_rotary(rows, positions, lengths)
        per_group = context.rows_per_group or self._rows_per_group(length)
        run = self._pass(tokens, context, rows, context.counts, per_group, context.padding)
        assert run.tokens.ids is not None
        ids = run.tokens.ids.reshape(-1)[: tokens.numel()].view(tokens.shape)
        return replace(run, rows=rows.with_dropout_key(DropoutKey.from_tokens(run.tokens, ids)))

    def _with_rotary(
        self, rows: PassRows, positions: Tensor, lengths: Tensor | None = None, max_lengths: Tensor | None = None
    ) -> PassRows:
        local = self.spec.local_attention
        all_lengths = lengths, max_lengths
        scalings = {getattr(attention, "query_scaling", None) for attention in (self.spec.attention, local)}
        return replace(
            rows,
            rotary=self._rotary(self.spec.attention, positions, *all_lengths),
            query_scales={scaling: query_scales(positions, scaling) for scaling in scalings if scaling is not None},
            local_rotary=None if local is None else self._rotary(local, positions, *all_lengths),
        )

    def _rotary(
        self, attention: AttentionSpec, positions: Tensor, lengths: Tensor | None, max_lengths: Tensor | None
    ) -> RotaryTable | None:
        if not attention.rope.fraction:
            return None
        if isinstance(attention.rope.scaling, LongRopeScaling) and max_lengths is not None:
            lengths = max_lengths  # cached keys keep their angles, so those of the longest length apply from the start
        width = attention.rope_dim if isinstance(attention, LatentAttentionSpec) else attention.head_dim
        return rotary_table(positions, width, attention.rope, dtype=self.compute_dtype, num_positions=lengths)


def _batch_tokens(tokens: Tensor, context: BatchContext) -> int | Tensor | None:
    """Real tokens of the global batch in training, of which `tokens` are all if `context` does not count it."""
    if not context.training:
        return None
    if context.counts is not None:
        return context.counts.num_tokens
    return tokens.numel() if context.padding is None else (~context.padding).sum().clamp(min=1)


def batch_loss(model: LanguageModel, batch: SequencesBatch, smoothing: float = 0.0) -> Loss:
    """Label-smoothed and plain NLL, summed over this rank's target tokens."""
    hidden_states = model.hidden_states(batch.tokens, batch.context)
    objective, nll = model.smoothed_nll(hidden_states, batch, smoothing)
    return Loss(objective, nll, indexer=model.indexer_loss(batch.context))


build_model = partial(build_sharded, LanguageModel)
"""`build_sharded` of this kind of model."""
