"""Log-likelihood of continuations under a language model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from moe.parallel.accelerator import accelerator
from moe.plan.cost.layer_bytes import loss_tokens
from moe.spec.routers import ExpertChoiceSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.language.batches import IGNORE_INDEX
from moe.tasks.language.model import LanguageModel

_BATCH_POSITIONS = 8192

Pair = tuple[Sequence[int], Sequence[int]]
"""(context, continuation)."""


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of a continuation, in nats."""

    nats: float
    is_greedy: bool
    """Whether greedy decoding would produce it."""


@torch.no_grad()
def log_likelihoods(model: LanguageModel, pairs: Sequence[Pair], max_tokens: int) -> list[Likelihood]:
    """Log-likelihood of each continuation given its context, truncated on the left to `max_tokens`.

    Rows are batched with right padding; no row affects another, and expert capacity is unlimited. Under expert
    choice, rows are token groups, and only rows of equal length are batched. Sums are float64. Raises ValueError for
    an empty context or continuation, or a continuation longer than `max_tokens`.
    """
    rows = [_LikelihoodRow.from_pair(index, *pair, max_tokens) for index, pair in enumerate(pairs)]
    likelihoods: list[Likelihood | None] = [None] * len(rows)
    rows.sort(key=lambda row: len(row.tokens), reverse=True)
    moe = model.spec.moe
    by_length = moe is not None and isinstance(moe.routing, ExpertChoiceSpec)
    for _, alike in groupby(rows, key=lambda row: len(row.tokens) if by_length else 0):
        waiting = list(alike)
        while waiting:
            num_rows = max(1, _BATCH_POSITIONS // len(waiting[0].tokens))
            batch, waiting = waiting[:num_rows], waiting[num_rows:]
            for row, likelihood in zip(batch, _score_batch(model, batch), strict=True):
                likelihoods[row.number] = likelihood
    return [likelihood for likelihood in likelihoods if likelihood is not None]


def rolling_pairs(tokens: Sequence[int], begin: int, max_tokens: int) -> Iterator[Pair]:
    """Pairs whose continuations form a whole text after the token `begin`.

    Contexts hold as much preceding text as fits (`log_likelihoods` truncates the excess).
    """
    before = [begin, *tokens]
    for first in range(0, len(tokens), max_tokens):
        continuation = tokens[first : first + max_tokens]
        yield before[max(0, first + len(continuation) - max_tokens) : first + 1], continuation


@dataclass(frozen=True)
class _LikelihoodRow:
    number: int
    tokens: Sequence[int]
    continuation: Sequence[int]
    """Labels of the last positions."""

    @classmethod
    def from_pair(
        cls, number: int, context: Sequence[int], continuation: Sequence[int], max_tokens: int
    ) -> "_LikelihoodRow":
        if not context or not continuation:
            raise ValueError(
                f"pairs[{number}] must have at least one token in its context and one in its "
                "continuation; start a context with the token that begins documents"
            )
        if len(continuation) > max_tokens:
            raise ValueError(
                f"pairs[{number}] has a continuation of {len(continuation):,} tokens, more than "
                f"max_tokens (={max_tokens:,}); split it"
            )
        read = [*context, *continuation[:-1]][-max_tokens:]
        return cls(number, read, continuation)


def _score_batch(model: LanguageModel, rows: Sequence[_LikelihoodRow]) -> list[Likelihood]:
    """Log-likelihoods of one batch of rows, the longest first."""
    device, length = model.embedding.weight.device, len(rows[0].tokens)
    tokens_BL = torch.zeros(len(rows), length, dtype=torch.int64)
    labels_BL = torch.full((len(rows), length), IGNORE_INDEX, dtype=torch.int64)
    for index, row in enumerate(rows):
        end = len(row.tokens)
        tokens_BL[index, :end] = torch.tensor(row.tokens)
        labels_BL[index, end - len(row.continuation) : end] = torch.tensor(row.continuation)
    lengths_B = torch.tensor([len(row.tokens) for row in rows])
    documents_BL = None
    if int(lengths_B.min()) < length:
        documents_BL = torch.where(torch.arange(length) < lengths_B[:, None], 0, -1).to(device)
    context = BatchContext(training=False, rows_per_group=1, documents=documents_BL)
    hidden_TM = model.hidden_states(tokens_BL.to(device), context)
    labels_T = labels_BL.view(-1)
    places_P = (labels_T != IGNORE_INDEX).nonzero().squeeze(1)
    nats_P, is_likeliest_P = _of_labels(model, hidden_TM, places_P.to(device), labels_T[places_P].to(device))
    row_P = places_P // length
    nats_B = torch.zeros(len(rows), dtype=torch.float64).index_add_(0, row_P, nats_P.double().cpu())
    missed_B = torch.zeros(len(rows), dtype=torch.int64).index_add_(0, row_P, (~is_likeliest_P).long().cpu())
    return [
        Likelihood(nats, not num_missed) for nats, num_missed in zip(nats_B.tolist(), missed_B.tolist(), strict=True)
    ]


def _of_labels(model: LanguageModel, hidden_TM: Tensor, places_P: Tensor, labels_P: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of each label, float32 or wider; whether it is the argmax), in chunks of logits."""
    wide = torch.promote_types(hidden_TM.dtype, torch.float32)
    at_once = loss_tokens(accelerator(hidden_TM.device).kind, model.spec.vocab_size)
    nats, likeliest = [], []
    for places_C, labels_C in zip(places_P.split(at_once), labels_P.split(at_once), strict=True):
        logits_CV = model.project(hidden_TM.index_select(0, places_C))
        logp_CV = functional.log_softmax(logits_CV, dim=-1, dtype=wide)
        nats.append(logp_CV.gather(1, labels_C[:, None]).squeeze(1))
        likeliest.append(logits_CV.argmax(dim=-1) == labels_C)
    return torch.cat(nats), torch.cat(likeliest)
