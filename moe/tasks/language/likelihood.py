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
    device, length = model.device, len(rows[0].tokens)
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
    hidden_tM = model.hidden_states(tokens_BL.to(device), context)
    labels_t = model.share(labels_BL)
    places_p = (labels_t != IGNORE_INDEX).nonzero().squeeze(1)
    nats_p, is_likeliest_p = _of_labels(model, hidden_tM, places_p.to(device), labels_t[places_p].to(device))
    # Nats and misses of each row's tokens: of all ranks that have a share of them.
    scores_t2 = torch.zeros(len(labels_t), 2, dtype=torch.float64)
    scores_t2[places_p] = torch.stack((nats_p.double(), (~is_likeliest_p).double()), dim=1).cpu()
    scores_B2 = model.gather_tokens(tokens_BL, scores_t2.to(device)).view(len(rows), length, 2).sum(1)
    return [Likelihood(nats, not num_missed) for nats, num_missed in scores_B2.tolist()]


def _of_labels(model: LanguageModel, hidden_tM: Tensor, places_p: Tensor, labels_p: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of each label, float32 or wider; whether it is the argmax), in chunks of logits."""
    wide = torch.promote_types(hidden_tM.dtype, torch.float32)
    at_once = loss_tokens(accelerator(hidden_tM.device).kind, model.spec.vocab_size)
    nats, likeliest = [], []
    for places_C, labels_C in zip(places_p.split(at_once), labels_p.split(at_once), strict=True):
        logits_CV = model.project(hidden_tM.index_select(0, places_C))
        logp_CV = functional.log_softmax(logits_CV, dim=-1, dtype=wide)
        nats.append(logp_CV.gather(1, labels_C[:, None]).squeeze(1))
        likeliest.append(logits_CV.argmax(dim=-1) == labels_C)
    return torch.cat(nats), torch.cat(likeliest)
