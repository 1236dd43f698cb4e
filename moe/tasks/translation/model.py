"""GShard: an encoder-decoder Transformer with an MoE layer in every other block of both stacks."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.data.tokenizer import PAD
from moe.layers.attention_mask import AttentionMask
from moe.layers.block import FeedForwardBlock, NormPair, TransformerBlock
from moe.layers.feed_forward import FeedForward
from moe.layers.grouped_query import GroupedQueryAttention
from moe.layers.moe import MoELayer
from moe.layers.nll import smoothed_nll
from moe.layers.norm import LayerNorm
from moe.layers.rotary import sinusoids
from moe.layers.sequence import PassRows, SequencePass
from moe.parallel.stages import VirtualStage
from moe.random import Purpose
from moe.spec import TranslationModelSpec
from moe.spec.language import GroupedQueryAttentionSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.sequence_model import DecodingState, SequenceModel
from moe.tasks.sharded_model import build_sharded
from moe.tasks.task import Loss
from moe.tasks.translation.batches import PairsBatch


class TranslationModel(SequenceModel):
    """GShard's model (arXiv 2006.16668)."""

    spec: TranslationModelSpec
    source_embedding: nn.Parameter
    """`[V, M]`"""
    target_embedding: nn.Parameter | None
    """`[V, M]`; None if both sides share one table."""
    entry_points = ("hidden_states", "start", "extend")

    def __init__(self, spec: TranslationModelSpec, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(spec, dtype)
        self.dropout = spec.dropout
        for name in ("source_embedding", "target_embedding"):
            self.register_parameter(name, None)
        encoder, decoder = build_blocks(spec)
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.encoder_norm, self.decoder_norm = LayerNorm(), LayerNorm()

    @property
    def output_embedding(self) -> nn.Parameter:
        return self.target_embedding if self.target_embedding is not None else self.source_embedding

    def forward(self, source: Tensor, target: Tensor, context: BatchContext | None = None) -> Tensor:
        """Next-token logits `[B, N, V]` for `source` `[B, L]` and `target` `[B, N]`, int64, padded with 0 at the end.

        Without `context`: step 0 of seed 0, training mode as set by `train()` or `eval()`.
        """
        return self._logits(self.hidden_states(source, target, context), target)

    def hidden_states(self, source: Tensor, target: Tensor, context: BatchContext | None = None) -> Tensor:
        """Decoder output `[t, M]` of this rank's shard of the target tokens (see `share`); on a rank without the last
        pipeline stage, what it sends.

        The states of both sides pass through all stages, so that each decoder stage has the encoder's output, whose
        gradient is the sum of theirs."""
        context = context or BatchContext(training=self.training)
        rows_per_group = context.rows_per_group or self._rows_per_group(source.shape[1] + target.shape[1])
        source_run = self._source_pass(source, context, rows_per_group)
        memory_mask = source_run.rows.attention_mask
        rows = PassRows(self._sequence_shard(target), AttentionMask(), target.shape[1], memory_mask=memory_mask)
        run = self._pass(target, context, rows, context.counts, rows_per_group, target == PAD)
        x = None
        with self.stages.passing() as stages:
            for stage in stages:
                source_x = self._encode(stage, source, source_run)
                x = self._embed(target, run) if stage.is_first else self._receive(stage, rows.shard, target.device)
                memory = self._memory(source_x, source_run) if self._decodes(stage) else None
                for block in self._stage_blocks(stage):
                    x = block(x, run, None, memory)
                if not stage.is_last:
                    self.stages.send(stage, source_x)
                    self.stages.send(stage, x)
        assert x is not None
        return self._final_states(x) if self.stages.active[-1].is_last else x

    def start(self, source: Tensor, max_tokens: int) -> DecodingState:
        """Encode `source` `[B, L]`; return a state with empty caches for up to `max_tokens` positions."""
        state = self._new_state(len(source), max_tokens, source.device)
        run = self._source_pass(source, BatchContext(training=False), 1)
        with self.stages.passing() as stages:
            for stage in stages:
                x = self._encode(stage, source, run)
                if self._decodes(stage):
                    state.memory = self._memory(x, run)
                if not stage.is_last:
                    self.stages.send(stage, x)
        state.memory_mask = run.rows.attention_mask
        return state

    def smoothed_nll(self, hidden_states: Tensor, batch: PairsBatch, smoothing: float) -> tuple[Tensor, Tensor]:
        """(label-smoothed, plain) negative log-likelihood, summed over this rank's labels, of the `hidden_states` of a
        batch."""

        def compute() -> tuple[Tensor, Tensor]:
            labels_t = self.share(batch.target_out)
            table, positions = self.output_embedding, batch.label_positions
            return smoothed_nll(hidden_states, table, labels_t, smoothing, PAD, positions)

        loss, nll = self._on_last_stage(compute, [(), ()], hidden_states, is_wide=True)
        return loss, nll

    def _source_pass(self, source: Tensor, context: BatchContext, rows_per_group: int) -> SequencePass:
        """Pass inputs for `source` `[B, L]`."""
        padding = source == PAD
        is_first = torch.arange(source.shape[1], device=source.device) == 0
        # The first position is always seen: softmax over an empty row would be 0/0.
        mask = AttentionMask(causal=False, keys=~padding | is_first)
        rows = PassRows(self._sequence_shard(source), mask, source.shape[1])
        return self._pass(source, context, rows, context.source_counts, rows_per_group, padding)

    def _encode(self, stage: VirtualStage, source: Tensor, run: SequencePass) -> Tensor:
        """Source states `[t, M]` after a stage: normalized ones once all encoder layers have run."""
        if stage.is_first:
            x = self._embed_in(self.source_embedding, 0, source, run, 0)
        else:
            x = self._receive(stage, run.rows.shard, source.device)
        for layer in stage.layers:
            if layer < self.spec.num_encoder_layers:
                x = self.encoder[layer](x, run)
            if layer == self.spec.num_encoder_layers - 1:
                x = self.encoder_norm(x)
        return x

    def _memory(self, source_x: Tensor, run: SequencePass) -> Tensor:
        """Encoder output `[B, L, M]` of all tensor and context ranks, from this rank's shard."""
        (memory,) = run.rows.gather_positions(run.rows.shard.gather_rows(source_x))
        return memory

    def _decodes(self, stage: VirtualStage) -> bool:
        return stage.layers.stop > self.spec.num_encoder_layers

    @property
    def _vocab_size(self) -> int:
        return self.spec.target_vocab_size

    def stage_parts(self, stage: VirtualStage) -> Iterator[str]:
        num_encoder_layers = self.spec.num_encoder_layers
        if stage.is_first:
            yield from ("source_embedding", "target_embedding")
        for layer in stage.layers:
            yield f"encoder.{layer}" if layer < num_encoder_layers else f"decoder.{layer - num_encoder_layers}"
        if num_encoder_layers - 1 in stage.layers:
            yield "encoder_norm"
        if stage.is_last:
            yield "source_embedding" if self.spec.share_vocabulary else "target_embedding"
            yield "decoder_norm"

    def _stage_blocks(self, stage: VirtualStage) -> Iterator[TransformerBlock]:
        first = self.spec.num_encoder_layers
        return (self.decoder[layer - first] for layer in stage.layers if layer >= first)  # type: ignore[misc]

    def _embed(self, tokens: Tensor, run: SequencePass, begins: int = 0) -> Tensor:
        return self._embed_in(self.output_embedding, self.spec.num_encoder_layers, tokens, run, begins)

    def _embed_in(self, table: Tensor, layer: int, tokens: Tensor, run: SequencePass, begins: int) -> Tensor:
        """Embeddings `[t, M]` from `table` `[V, M]`, before block number `layer`."""
        (num_rows, length), width, shard = tokens.shape, self.spec.model_dim, run.rows.shard
        x = functional.embedding(shard.take(tokens.reshape(-1)), table) * math.sqrt(width)
        positions = sinusoids(length, width, start=begins, device=x.device).to(x.dtype)
        x = x + shard.take(positions.expand(num_rows, -1, -1).flatten(0, 1))
        return run.drop(x.to(self.compute_dtype), layer, Purpose.EMBEDDING_DROPOUT)

    def _final_states(self, x: Tensor) -> Tensor:
        return self.decoder_norm(x)


def build_blocks(spec: TranslationModelSpec) -> tuple[list[TransformerBlock], list[TransformerBlock]]:
    """(encoder blocks, decoder blocks), numbered through both stacks, without values."""
    attention = spec.attention  # one object: blocks that share it are recognised as repeated
    blocks = [_block(spec, attention, layer) for layer in range(spec.num_layers)]
    return blocks[: spec.num_encoder_layers], blocks[spec.num_encoder_layers :]


def _block(spec: TranslationModelSpec, attention: GroupedQueryAttentionSpec, layer: int) -> TransformerBlock:
    feed_forward: FeedForward | MoELayer
    if spec.moe is not None and layer in spec.moe_layers:
        feed_forward = MoELayer(spec.moe, layer)
    else:
        feed_forward = FeedForward()
    decodes = layer >= spec.num_encoder_layers
    return TransformerBlock(
        layer,
        NormPair(LayerNorm()),
        GroupedQueryAttention(attention, fused_key_value=True),
        FeedForwardBlock(NormPair(LayerNorm()), feed_forward),
        cross_norm=LayerNorm() if decodes else None,
        cross_attention=GroupedQueryAttention(attention, fused_key_value=True) if decodes else None,
    )


def batch_loss(model: TranslationModel, batch: PairsBatch, smoothing: float) -> Loss:
    """Label-smoothed and plain NLL, summed over this rank's shard of target tokens."""
    hidden_states = model.hidden_states(batch.source, batch.target_in, batch.context)
    return Loss(*model.smoothed_nll(hidden_states, batch, smoothing))


build_model = partial(build_sharded, TranslationModel)
"""`build_sharded` of this kind of model."""
