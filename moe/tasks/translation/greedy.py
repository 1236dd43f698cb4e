"""Greedy decoding with KV caches, until every row has ended."""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import collective
from moe.tasks.translation.model import PAD, TranslationModel

BOS, EOS = 1, 2
Number = TypeVar("Number", int, Tensor)


def longest_of(source_tokens: Number) -> Number:
    """Maximum target length for a source length (both with EOS), to bound rows that never end."""
    return 2 * source_tokens + 16


@torch.no_grad()
def greedy_decode(
    model: TranslationModel, source: Tensor, max_tokens: int, together: dist.ProcessGroup | None = None
) -> Tensor:
    """Greedy translations int64 `[B, n]`, n <= `max_tokens`, of `source` `[B, L]`.

    Rows end with EOS, unless truncated at `max_tokens` or at `longest_of` their source, and are padded with 0; they
    are independent. `together` as in `one_by_one`.
    """
    num_rows, device = source.shape[0], source.device
    output_tokens = torch.full((num_rows, max_tokens), PAD, dtype=torch.int64, device=device)
    state = model.start_decoding(source, max_tokens)
    limit = longest_of((source != PAD).sum(1)).clamp(max=max_tokens)
    live = torch.arange(num_rows, device=device)  # rows that have not ended
    token = torch.full((num_rows,), BOS, dtype=torch.int64, device=device)
    longest = 0
    for position in range(max_tokens):
        logits = model.decode_step(token, state)
        logits[:, [PAD, BOS]] = -torch.inf
        token = logits.argmax(dim=-1)
        output_tokens[live, position] = token
        longest = position + 1
        going = (token != EOS) & (longest < limit[live])
        if _all_ended(going, together):
            break
        if int(going.sum()) < 0.75 * live.numel():  # compact only now and then: most rows end early
            rows = going.nonzero().squeeze(1)
            state.keep_rows(rows)
            live, token = live[rows], token[rows]
    return _cut_after_end(output_tokens[:, :longest], limit)


def _all_ended(going: Tensor, together: dist.ProcessGroup | None) -> bool:
    if together is None:
        return not bool(going.any())
    still = going.any().to(torch.int32)
    with collective("all-reduce of who is still decoding"):
        dist.all_reduce(still, op=dist.ReduceOp.MAX, group=together)
    return not bool(still)


def _cut_after_end(output_tokens: Tensor, limit: Tensor) -> Tensor:
    """Pad after each row's end: rows run on until the batch is compacted."""
    ended_before = (output_tokens == EOS).cumsum(1) - (output_tokens == EOS).to(torch.int64) > 0
    beyond = torch.arange(output_tokens.shape[1], device=output_tokens.device) >= limit[:, None]
    return output_tokens.masked_fill(ended_before | beyond, PAD)
