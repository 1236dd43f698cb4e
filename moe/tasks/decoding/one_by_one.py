"""Greedy and sampling decoding, one token per step."""

from collections.abc import Collection, Generator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe.spec.generation import GenerationSpec
from moe.tasks.decoding.choice import choose_tokens
from moe.tasks.decoding.steps import DecodingSteps, any_rank, is_sparse


@torch.no_grad()
def one_by_one(
    steps: DecodingSteps,
    logits: Tensor,
    spec: GenerationSpec,
    ends: Collection[int],
    *,
    max_tokens: Sequence[int] | None = None,
    texts: Sequence[int] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Generator[dict[int, int], Collection[int] | None, None]:
    """Yield the new token of each live row, by row number, at each position.

    `logits` `[B, V]` are the first token's. A token of `ends` is yielded and ends its row; so does the last of
    `spec.max_tokens`, or of the row's own `max_tokens`. The consumer may send the numbers of further rows to end.
    `texts` are the sampling keys (default: row numbers). If a forward pass needs other ranks (`Layout.in_step`), all
    ranks of `process_group` iterate, each with its own rows, possibly none, until all rows have ended.
    """
    numbers, device = list(range(logits.shape[0])), logits.device
    limits = max_tokens or [spec.max_tokens] * len(numbers)
    live, keys = set(numbers), torch.tensor(texts or numbers, dtype=torch.int64, device=device)
    for position in range(spec.max_tokens):
        tokens = choose_tokens(logits, spec, keys, position)
        new_tokens = {row: token for row, token in zip(numbers, tokens.tolist(), strict=True) if row in live}
        ended_rows = (yield new_tokens) or ()
        live -= {row for row, token in new_tokens.items() if token in ends or position + 1 >= limits[row]}
        live -= set(ended_rows)
        if position + 1 == spec.max_tokens or not any_rank(bool(live), device, process_group):
            return
        if is_sparse(len(live), len(numbers)):
            left = [place for place, row in enumerate(numbers) if row in live]
            live_places = torch.tensor(left, dtype=torch.int64, device=device)
            steps.take_rows(live_places)
            numbers, keys, tokens = [numbers[place] for place in left], keys[live_places], tokens[live_places]
        logits = steps.next(tokens)
