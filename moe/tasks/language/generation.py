"""Token generation by a language model: greedy, sampled or beam search."""

import collections.abc
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from moe.deprecation import renamed_arguments
from moe.experts import Experts
from moe.layers.linear import Linear
from moe.parallel import Layout, keep_buffers, local_parameters
from moe.spec.generation import GenerationSpec
from moe.tasks.decoding import ModelSteps, decode, sample_tokens
from moe.tasks.language.model import LanguageModel


def prefill(model: LanguageModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> ModelSteps:
    """Steps after the prompts, left-padded to the longest, with room for `max_tokens` more.

    Raises ValueError for an empty prompt or a token outside the vocabulary.
    """
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"prompts[{row}] must have at least one token; start it with the token that begins documents"
            )
        if not 0 <= min(prompt) <= max(prompt) < model.spec.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < model.spec.vocab_size)
            raise ValueError(
                f"prompts[{row}] (with token {wrong}) must have tokens below vocab_size "
                f"(={model.spec.vocab_size}); encode it with the model's tokenizer"
            )
    length, device = max(map(len, prompts), default=1), model.device
    rows = [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    tokens = torch.tensor(rows, dtype=torch.int64, device=device).view(len(prompts), length)
    padding = None
    if any(len(prompt) < length for prompt in prompts):
        begins = torch.tensor([length - len(prompt) for prompt in prompts], device=device)
        padding = torch.arange(length, device=device) < begins[:, None]
    return ModelSteps(model, model.start(len(prompts), length + max_tokens), tokens, padding)


@renamed_arguments(ends="end_ids", texts="text_numbers")
@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    spec: GenerationSpec,
    end_ids: Collection[int] = (),
    *,
    text_numbers: Sequence[int] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """Generate new tokens for each prompt, without the token of `end_ids` that ended it; at most `spec.max_tokens`.

    Handles no stop strings (see `LanguageGenerator`). Expert capacity is unlimited. Sampling is keyed by
    `text_numbers`, the prompts' global indices (default: indices here), so that prompts split over ranks give the same
    tokens as one process. `process_group` as in `sample_tokens`.

    Under `moe.routing.record_routing`, position p of this rank's prompt r is recorded at r * L + p, where L = longest
    prompt here + `spec.max_tokens`. Training on rows of L positions that begin with the prompts replays it; pad the
    recording with -1 to one row per position. Beam search cannot be recorded: it has several texts per prompt.

    Raises ValueError for an empty prompt, a token outside the vocabulary, or too few or many `text_numbers`.
    """
    _check_text_numbers(prompts, text_numbers)
    steps = prefill(model, prompts, spec.max_tokens)
    return decode(steps, spec, end_ids, prompts=prompts, text_numbers=text_numbers, process_group=process_group)


@torch.no_grad()
def stream_tokens(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    spec: GenerationSpec,
    end_ids: Collection[int] = (),
    *,
    text_numbers: Sequence[int] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> collections.abc.Generator[dict[int, int], Collection[int] | None, None]:
    """Like `generate`, one token at a time, without beams: see `sample_tokens`."""
    _check_text_numbers(prompts, text_numbers)
    steps = prefill(model, prompts, spec.max_tokens)
    yield from sample_tokens(
        steps, steps.logits, spec, end_ids, prompts=prompts, text_numbers=text_numbers, process_group=process_group
    )


def prepare_for_decoding(model: LanguageModel) -> None:
    """Prepare a model for faster inference; no training afterwards.

    Expert weights are cast to the compute dtype and laid out for few rows; other weights keep copies in that dtype.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            module.prepare_for_decoding(model.compute_dtype)
        elif isinstance(module, Linear):
            module.prepare_for_decoding()
    keep_buffers(local_parameters(model), Layout.single())


def _check_text_numbers(prompts: Sequence[Sequence[int]], text_numbers: Sequence[int] | None) -> None:
    if text_numbers is not None and len(text_numbers) != len(prompts):
        raise ValueError(
            f"text_numbers (={len(text_numbers)}) must be as many as prompts (={len(prompts)}); pass one per prompt"
        )
