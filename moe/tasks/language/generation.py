"""Texts that a language model makes, as tokens."""

import collections.abc
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe.experts import Experts
from moe.parallel import Layout, keep_buffers, local_parameters
from moe.spec.generation import GenerationSpec
from moe.tasks.decoding import beam_search, one_by_one
from moe.tasks.language.model import LanguageModel


class Growing:
    """Rows of tokens that a model goes on from, as `moe.tasks.decoding` takes them."""

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Takes in the prompts; rows that are shorter than others begin later. Raises ValueError for one without a
        token, or with one that the model does not have."""
        for row, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(
                    f"prompts[{row}] must have a token at least; begin it with that of a document"
                )
            if not 0 <= min(prompt) <= max(prompt) < model.spec.vocab_size:
                wrong = next(token for token in prompt if not 0 <= token < model.spec.vocab_size)
                raise ValueError(
                    f"prompts[{row}] (with token {wrong}) must have tokens below vocab_size "
                    f"(={model.spec.vocab_size}); encode it with the model's tokenizer"
                )
        length, device = max(map(len, prompts), default=1), model.embedding.weight.device
        rows = [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts]
        tokens = torch.tensor(rows, dtype=torch.int64, device=device).view(len(prompts), length)
        padding = None
        if any(len(prompt) < length for prompt in prompts):
            begins = torch.tensor([length - len(prompt) for prompt in prompts], device=device)
            padding = torch.arange(length, device=device) < begins[:, None]
        self._model, self._state = model, model.start(len(prompts), length + max_tokens)
        self.logits = model.extend(tokens, self._state, padding)
        """`[B, V]`, of each row's first new token."""

    def next(self, tokens: Tensor) -> Tensor:
        return self._model.extend(tokens[:, None], self._state)

    def take_rows(self, rows: Tensor) -> None:
        self._state.take_rows(rows)


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    spec: GenerationSpec,
    ends: Collection[int] = (),
    *,
    texts: Sequence[int] | None = None,
    together: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """New tokens of each of `prompts`, without the one of `ends` that ended it: as many as `spec.max_tokens` where none
    did. Stop strings are for who knows text (`LanguageGenerator`).

    Every expert has room for all its tokens. Draws are keyed by `texts`, the prompts' numbers when left out: a rank
    that has some of the prompts gives their numbers among all, and they are those of one process. Where a pass on one
    rank needs one on others (`Layout.in_step`), all ranks of the group `together` call it, each with prompts of its
    own, possibly none.

    `moe.routing.recorded` around it records position p of this rank's prompt r under r · L + p, with L = its longest
    prompt + `spec.max_tokens`: training on rows of L positions, which begin with the prompts, replays that, filled up
    with -1 to a row for each position. A search has several texts of a prompt, and cannot be recorded.

    Raises ValueError for a prompt without a token or with one that the model does not have, and for `texts` that are
    not as many as `prompts`.
    """
    new_tokens: list[list[int]] = [[] for _ in prompts]
    if spec.num_beams > 1:
        _check_texts(prompts, texts)
        rows = Growing(model, prompts, spec.max_tokens)
        return beam_search(rows, rows.logits, spec, ends, together=together)
    for tokens in going_on(model, prompts, spec, ends, texts=texts, together=together):
        for row, token in tokens.items():
            if token not in ends:
                new_tokens[row].append(token)
    return new_tokens


@torch.no_grad()
def going_on(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    spec: GenerationSpec,
    ends: Collection[int] = (),
    *,
    texts: Sequence[int] | None = None,
    together: dist.ProcessGroup | None = None,
) -> collections.abc.Generator[dict[int, int], Collection[int] | None, None]:
    """As `generate`, a token at a time, likeliest or drawn: see `one_by_one`."""
    _check_texts(prompts, texts)
    rows = Growing(model, prompts, spec.max_tokens)
    yield from one_by_one(rows, rows.logits, spec, ends, texts=texts, together=together)


def lay_out_for_texts(model: LanguageModel) -> None:
    """Lay a model out for texts alone, which are made faster then: experts' weights become as narrow as the arithmetic,
    and lie as few rows want them; narrow copies of the others are kept. It must not be trained any more."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.lay_out_for_few_rows(model.compute_dtype)
    keep_buffers(local_parameters(model), Layout.single())


def _check_texts(prompts: Sequence[Sequence[int]], texts: Sequence[int] | None) -> None:
    if texts is not None and len(texts) != len(prompts):
        raise ValueError(
            f"texts (={len(texts)} numbers) must be as many as prompts (={len(prompts)}); give one of each"
        )
