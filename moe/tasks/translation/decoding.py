"""Translation of token rows: greedy, sampled or beam search."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe.data.tokenizer import BOS, EOS, PAD
from moe.spec.generation import GenerationSpec
from moe.tasks.decoding import ModelSteps, decode
from moe.tasks.translation.model import TranslationModel


def max_target_tokens(source_tokens: int) -> int:
    """Maximum target length for a source length (both with EOS), to bound rows that never end."""
    return 2 * source_tokens + 16


@torch.no_grad()
def translate(
    model: TranslationModel,
    source: Tensor,
    spec: GenerationSpec,
    max_tokens: Sequence[int] | None = None,
    *,
    text_numbers: Sequence[int] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """Target tokens of each row of `source` int64 `[B, L]`, without EOS; rows are independent.

    A row has at most `spec.max_tokens` and its own `max_tokens`, by default `max_target_tokens` of its source.
    `text_numbers` and `process_group` as in `sample_tokens`.
    """
    if max_tokens is None:
        max_tokens = [max_target_tokens(length) for length in (source != PAD).sum(1).tolist()]
    steps = ModelSteps(
        model, model.start(source, spec.max_tokens), torch.full_like(source[:, :1], BOS), excluded_tokens=(PAD, BOS)
    )
    return decode(steps, spec, {EOS}, max_tokens=max_tokens, text_numbers=text_numbers, process_group=process_group)
