"""GShard: an encoder-decoder Transformer with an MoE layer in every other block of both stacks."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moe.layers.attention_mask import AttentionMask
from moe.layers.block import Block
from moe.layers.cache import LayerCache
from moe.layers.norm import LayerNorm
from moe.layers.position import sinusoids
from moe.layers.sequence import PassRows, SequencePass
from moe.parallel import SequenceShard
from moe.random import Purpose
from moe.routing import BatchCounts, TokenContext
from moe.spec import TranslationModelSpec
from moe.tasks.translation.blocks import build_block
from moe.tasks.translation.context import BatchContext

PAD = 0
"""Padding token id."""


class TranslationModel(nn.Module):
    """GShard's model (arXiv 2006.16668); parameters have no values until `moe.parallel.apply`."""

    source_embedding: nn.Parameter
    """`[V, M]`"""
    target_embedding: nn.Parameter | None
    """`[V, M]`; None if both sides share one table."""
    entry_points = ("hidden_states", "start_decoding", "decode_step")
    tensor_group: dist.ProcessGroup | None = None

    def __init__(self, spec: TranslationModelSpec, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec, self.compute_dtype = spec, dtype
        for name in ("source_embedding", "target_embedding"):
            self.register_parameter(name, None)
        self.encoder = nn.ModuleList(build_block(spec, layer) for layer in range(spec.num_encoder_layers))
        later = range(spec.num_encoder_layers, spec.num_layers)
        self.decoder = nn.ModuleList(build_block(spec, layer) for layer in later)
        self.encoder_norm, self.decoder_norm = LayerNorm(), LayerNorm()

    @property
    def output_embedding(self) -> nn.Parameter:
        """`[V, M]`: target embedding, tied to the output projection."""
        return self.target_embedding if self.target_embedding is not None else self.source_embedding

    def forward(self, source: Tensor, target: Tensor, context: BatchContext | None = None) -> Tensor:
        """Next-token logits `[B, N, V]` for `source` `[B, L]` and `target` `[B, N]`, int64, padded with 0 at the end.

        Without `context`: step 0 of seed 0, training mode as set by `train()` or `eval()`. Tensor ranks get the same
        logits and must compute the same loss; training uses `hidden_states`, which needs no logits of other ranks'
        tokens.
        """
        logits = self._project(self.hidden_states(source, target, context))
        return self._shares(target).gather_results(logits).view(*target.shape, logits.shape[-1])

    def hidden_states(self, source: Tensor, target: Tensor, context: BatchContext | None = None) -> Tensor:
        """Decoder output `[t, M]` of this rank's shard of the target tokens (see `share`)."""
        context = context or BatchContext(training=self.training)
        rows_per_group = context.rows_per_group or self._rows_per_group(source.shape[1] + target.shape[1])
        memory, memory_mask = self._encode(source, context, rows_per_group)
        run = self._pass(target, AttentionMask(), context, rows_per_group, context.target_counts, memory_mask)
        x = self._embed(target, self.output_embedding, self.spec.num_encoder_layers, run)
        for block in self.decoder:
            x = block(x, run, None, memory)
        return self.decoder_norm(x)

    def share(self, tokens: Tensor) -> Tensor:
        """This rank's sequence-parallel shard `[t]` of `tokens` `[B, N]`."""
        return self._shares(tokens).take(tokens.reshape(-1))

    def _project(self, hidden_states: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., M]`."""
        return functional.linear(hidden_states, self.output_embedding.to(hidden_states.dtype))

    def _encode(
        self, source: Tensor, context: BatchContext, rows_per_group: int
    ) -> tuple[Tensor, AttentionMask]:
        """(encoder output `[B, L, M]`, attention mask of its positions)."""
        mask = AttentionMask(causal=False, keys=_real_positions(source))
        run = self._pass(source, mask, context, rows_per_group, context.source_counts)
        x = self._embed(source, self.source_embedding, 0, run)
        for block in self.encoder:
            x = block(x, run)
        return run.rows.shares.gather_rows(self.encoder_norm(x)), mask

    def start_decoding(self, source: Tensor, max_tokens: int) -> "DecodingState":
        """Encode `source` `[B, L]` and allocate caches for up to `max_tokens` decoding steps."""
        memory, memory_mask = self._encode(source, BatchContext(training=False), 1)
        caches = [block.new_cache(len(source), max_tokens, memory) for block in self._decoder_blocks()]
        return DecodingState(memory, memory_mask, caches)

    def decode_step(self, token: Tensor, state: "DecodingState") -> Tensor:
        """Next-token logits `[B, V]` after `token` `[B]`; advances `state` by one position."""
        context = BatchContext(training=False)
        run = self._pass(token[:, None], AttentionMask(), context, 1, None, state.memory_mask, state.position)
        x = self._embed(
            token[:, None], self.output_embedding, self.spec.num_encoder_layers, run, state.position
        )
        for block, cache in zip(self._decoder_blocks(), state.caches, strict=True):
            x = block(x, run, cache, state.memory)
        state.position, state.memory = state.position + 1, None
        return self._project(run.rows.shares.gather(self.decoder_norm(x)))

    def _decoder_blocks(self) -> Iterator[Block]:
        return iter(self.decoder)  # type: ignore[arg-type]

    def _rows_per_group(self, positions_per_row: int) -> int:
        group_tokens = self.spec.moe.group_tokens if self.spec.moe is not None else positions_per_row
        return max(1, group_tokens // max(1, positions_per_row))

    def _embed(
        self, tokens: Tensor, table: Tensor, layer: int, run: SequencePass, position: int = 0
    ) -> Tensor:
        """Embeddings `[t, M]` of this rank's shard of tokens `[B, L]`, whose rows start at `position`."""
        width, length = self.spec.model_dim, tokens.shape[1]
        x = functional.embedding(run.rows.shares.take(tokens.reshape(-1)), table) * math.sqrt(width)
        positions = sinusoids(length, width, start=position, device=x.device).to(x.dtype)
        x = x + run.rows.shares.take(positions.expand(tokens.shape[0], -1, -1).flatten(0, 1))
        return run.drop(x.to(self.compute_dtype), layer, Purpose.EMBEDDING_DROPOUT)

    def _pass(
        self,
        tokens: Tensor,
        visible: AttentionMask,
        context: BatchContext,
        rows_per_group: int,
        counts: BatchCounts | None = None,
        memory_mask: AttentionMask | None = None,
        position: int = 0,
    ) -> SequencePass:
        """Pass inputs for `tokens` `[B, L]` in groups of whole rows, the last padded with empty rows."""
        num_rows, length = tokens.shape
        num_groups = -(-num_rows // rows_per_group)
        total = num_groups * rows_per_group
        first = context.first_row * length
        ids = torch.arange(first, first + total * length, device=tokens.device)
        padding = functional.pad(tokens, (0, 0, 0, total - num_rows), value=PAD) == PAD
        in_groups = (num_groups, rows_per_group * length)
        token_context = TokenContext(
            ids.view(in_groups),
            padding.view(in_groups),
            context.step,
            context.seed,
            context.training,
            length,
            counts,
        )
        rows = PassRows(self._shares(tokens), visible, position + length, memory_mask=memory_mask)
        return SequencePass(token_context, rows, self.spec.dropout)

    def _shares(self, tokens: Tensor) -> SequenceShard:
        """Sequence sharding of tokens `[B, L]`."""
        num_rows, length = tokens.shape
        return SequenceShard(tokens.numel(), self.tensor_group, shape=(num_rows, length))


class DecodingState:
    """KV caches of a batch being decoded, one position at a time."""

    def __init__(self, memory: Tensor, memory_mask: AttentionMask, caches: list[LayerCache]) -> None:
        self.position = 0
        self.memory: Tensor | None = memory
        """Encoder output `[B, L, M]`; None once the caches have its keys and values."""
        self.memory_mask = memory_mask
        self.caches = caches

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows (int64 indices)."""
        self.memory = None if self.memory is None else self.memory.index_select(0, rows)
        self.memory_mask = self.memory_mask.of_rows(rows)
        for cache in self.caches:
            cache.take_rows(rows)


def _real_positions(tokens: Tensor) -> Tensor:
    """bool `[B, L]`, True at tokens.

    The first position is always True: softmax over an empty row would be 0/0.
    """
    is_first = torch.arange(tokens.shape[1], device=tokens.device) == 0
    return (tokens != PAD) | is_first
