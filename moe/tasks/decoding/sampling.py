"""Decoding to the end: greedy and sampling, one token per step, or by beam search as the spec selects."""

from collections.abc import Collection, Generator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe.random import Purpose, fold, gumbel
from moe.spec.generation import GenerationSpec
from moe.tasks.decoding.beams import beam_search
from moe.tasks.decoding.penalty import RepetitionPenalty
from moe.tasks.decoding.steps import DecodingSteps, ModelSteps, any_rank, should_drop_rows


@torch.no_grad()
def sample_tokens(
    steps: DecodingSteps,
    logits: Tensor,
    spec: GenerationSpec,
    end_ids: Collection[int],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    max_tokens: Sequence[int] | None = None,
    text_numbers: Sequence[int] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Generator[dict[int, int], Collection[int] | None, None]:
    """Yield the new token of each live row, by row number, at each position.

    `logits` `[B, V]` are the first token's. A token of `end_ids` is yielded and ends its row; so does the last of
    `spec.max_tokens`, or of the row's own `max_tokens`. The consumer may send the numbers of further rows to end.
    `text_numbers` are the sampling keys (default: row numbers). The repetition penalty counts the tokens of `prompts`,
    if any, and new ones. If a forward pass needs other ranks
    (`Layout.lockstep_group`), all ranks of `process_group` iterate, each with its own rows, possibly none, until all
    rows have ended.
    """
    spec, numbers, device = spec.resolve(), list(range(logits.shape[0])), logits.device
    limits = max_tokens or [spec.max_tokens] * len(numbers)
    live, keys = set(numbers), torch.tensor(text_numbers or numbers, dtype=torch.int64, device=device)
    penalty = None
    if spec.repetition_penalty not in (None, 1):
        penalty = RepetitionPenalty(spec.repetition_penalty, prompts or [()] * len(numbers), logits.shape[-1], device)
    for position in range(spec.max_tokens):
        scores = logits if penalty is None else penalty.apply(logits)
        tokens = choose_tokens(scores, spec, keys, position)
        new_tokens = {row: token for row, token in zip(numbers, tokens.tolist(), strict=True) if row in live}
        ended_rows = (yield new_tokens) or ()
        live -= {row for row, token in new_tokens.items() if token in end_ids or position + 1 >= limits[row]}
        live -= set(ended_rows)
        if position + 1 == spec.max_tokens or not any_rank(bool(live), device, process_group):
            return
        if penalty is not None:
            penalty.append(tokens)
        if should_drop_rows(len(live), len(numbers)):
            live_list = [index for index, row in enumerate(numbers) if row in live]
            live_indices = torch.tensor(live_list, dtype=torch.int64, device=device)
            steps.take_rows(live_indices)
            if penalty is not None:
                penalty.take_rows(live_indices)
            numbers, keys, tokens = [numbers[index] for index in live_list], keys[live_indices], tokens[live_indices]
        logits = steps.next(tokens)


def choose_tokens(logits: Tensor, spec: GenerationSpec, text_numbers: Tensor, position: int) -> Tensor:
    """int64 `[B]`: next token of each row of `logits` `[B, V]`; ties go to the lower id.

    Sampling is keyed by seed, text number (`text_numbers` int64 `[B]`) and `position`: other rows and the layout do not
    matter.
    """
    if not spec.temperature:
        return logits.argmax(dim=-1)
    scores = logits.to(torch.float64)
    # Shift the maximum to 0, so that a tiny temperature does not overflow.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / spec.temperature
    scores = scores.masked_fill(~_eligible_tokens(scores, spec), -torch.inf)
    noise = gumbel(fold(spec.seed, position, Purpose.GENERATION), text_numbers, logits.shape[-1])
    return (scores + noise).argmax(dim=-1)


def _eligible_tokens(scores: Tensor, spec: GenerationSpec) -> Tensor:
    """bool `[B, V]`: tokens within top-k, top-p and min-p, by scores with maximum 0; always includes the most likely
    one."""
    is_probable = scores.exp() >= spec.min_p if spec.min_p else torch.ones_like(scores, dtype=torch.bool)
    if not spec.top_k and spec.top_p in (None, 1):
        return is_probable
    sorted_scores, index = scores.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device)
    is_eligible = places < (spec.top_k or scores.shape[-1])
    if spec.top_p is not None and spec.top_p < 1:
        probs = sorted_scores.masked_fill(~is_eligible, -torch.inf).softmax(dim=-1)
        is_eligible = is_eligible & (probs.cumsum(dim=-1) - probs < spec.top_p)
    is_eligible = is_eligible.expand_as(scores).contiguous()
    return is_probable & torch.zeros_like(is_eligible).scatter_(-1, index, is_eligible)


def decode(
    steps: ModelSteps,
    spec: GenerationSpec,
    end_ids: Collection[int],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    max_tokens: Sequence[int] | None = None,
    text_numbers: Sequence[int] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """New tokens of each row, without the token of `end_ids` that ended it; arguments as in `sample_tokens`."""
    if spec.num_beams > 1:
        return beam_search(
            steps,
            steps.logits,
            spec.resolve(),
            end_ids,
            prompts=prompts,
            max_tokens=max_tokens,
            process_group=process_group,
        )
    rows: list[list[int]] = [[] for _ in range(len(steps.logits))]
    decoding = sample_tokens(
        steps,
        steps.logits,
        spec,
        end_ids,
        prompts=prompts,
        max_tokens=max_tokens,
        text_numbers=text_numbers,
        process_group=process_group,
    )
    for new_tokens in decoding:
        for row, token in new_tokens.items():
            if token not in end_ids:
                rows[row].append(token)
    return rows
