"""Decoding to the end, by the algorithm that the spec selects: greedy, sampling or beam search."""

from collections.abc import Collection, Sequence

import torch.distributed as dist

from moe.spec.generation import GenerationSpec
from moe.tasks.decoding.beams import beam_search
from moe.tasks.decoding.model_steps import ModelSteps
from moe.tasks.decoding.one_by_one import one_by_one


def decode(
    steps: ModelSteps,
    spec: GenerationSpec,
    ends: Collection[int],
    *,
    max_tokens: Sequence[int] | None = None,
    texts: Sequence[int] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """New tokens of each row, without the token of `ends` that ended it; arguments as in `one_by_one`."""
    if spec.num_beams > 1:
        return beam_search(steps, steps.logits, spec, ends, max_tokens=max_tokens, process_group=process_group)
    rows: list[list[int]] = [[] for _ in range(len(steps.logits))]
    decoding = one_by_one(
        steps, steps.logits, spec, ends, max_tokens=max_tokens, texts=texts, process_group=process_group
    )
    for new_tokens in decoding:
        for row, token in new_tokens.items():
            if token not in ends:
                rows[row].append(token)
    return rows
