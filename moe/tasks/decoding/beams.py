"""Beam search with length normalization (arXiv 1609.08144, section 7)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moe.spec.generation import GenerationSpec
from moe.tasks.decoding.penalty import RepetitionPenalty
from moe.tasks.decoding.steps import DecodingSteps, any_rank, should_drop_rows


@dataclass
class _BeamRow:
    """Search state of one row."""

    max_tokens: int
    beams: list[list[int]]
    """Live beams, in the order of the model's rows."""
    score: float = -torch.inf
    text: list[int] = field(default_factory=list)
    """Best finished hypothesis."""
    has_ended: bool = False

    def take(self, score: float, text: list[int]) -> None:
        if score > self.score:
            self.score, self.text = score, text


@torch.no_grad()
def beam_search(
    steps: DecodingSteps,
    logits: Tensor,
    spec: GenerationSpec,
    end_ids: Collection[int],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    max_tokens: Sequence[int] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """Best-scoring text of each row found with `spec.num_beams` beams, without its end token.

    `logits` `[B, V]` are the first token's. Score: sum of token log-probabilities, including the end token, divided
    by ((5 + n) / 6)^α for n tokens. The repetition penalty applies to the log-probabilities, as in transformers.

    Of the best `num_beams` continuations of a row's beams, those that end become hypotheses; the best that do not end
    are the next beams. A row ends when no beam can beat its best hypothesis. At `max_tokens`, the spec's or the row's
    own, the best beam counts as it is. Rows are independent. `prompts` and `process_group` as in `sample_tokens`.
    """
    num_beams, vocabulary, device = spec.num_beams, logits.shape[-1], logits.device
    limits = [min(spec.max_tokens, limit) for limit in max_tokens or [spec.max_tokens] * logits.shape[0]]
    all_rows = [_BeamRow(limit, [[]] * num_beams) for limit in limits]
    rows, last = all_rows, torch.tensor(sorted(end_ids), dtype=torch.int64, device=device)
    steps.take_rows(torch.arange(len(rows), device=device).repeat_interleave(num_beams))
    logits, penalty = logits.repeat_interleave(num_beams, dim=0), None
    if spec.repetition_penalty not in (None, 1):
        beam_prompts = [prompt for prompt in prompts or [()] * len(rows) for _ in range(num_beams)]
        penalty = RepetitionPenalty(spec.repetition_penalty, beam_prompts, vocabulary, device)
    scores_RB = logits.new_full((len(rows), num_beams), -torch.inf, dtype=torch.float64)
    scores_RB[:, 0] = 0  # all beams start equal: keep one
    for length in range(1, spec.max_tokens + 1):
        logp = logits.log_softmax(-1, dtype=torch.float64)
        logp = logp if penalty is None else penalty.apply(logp)
        scores_RBV = scores_RB[..., None] + logp.view(len(rows), num_beams, vocabulary)
        best, best_index = scores_RBV.flatten(1).topk(num_beams)
        is_end = torch.isin(best_index % vocabulary, last)
        scores_RBV[..., last] = -torch.inf
        scores_RB, index_RB = scores_RBV.flatten(1).topk(num_beams)
        norm = _norm(length, spec)
        for row, *candidates in zip(rows, best.tolist(), best_index.tolist(), is_end.tolist(), strict=True):
            if row.has_ended:
                continue
            for score, place, is_final in zip(*candidates, strict=True):
                if is_final:
                    row.take(score / norm, row.beams[place // vocabulary])
        for row, score, places in zip(rows, scores_RB[:, :1].flatten().tolist(), index_RB.tolist(), strict=True):
            if row.has_ended:  # stays in the batch until few rows are left
                continue
            row.beams = [[*row.beams[place // vocabulary], place % vocabulary] for place in places]
            if length == row.max_tokens:
                row.take(score / norm, row.beams[0])
            # Log-probabilities only fall, and no length has a larger divisor than `max_tokens`.
            row.has_ended = length >= row.max_tokens or score / _norm(row.max_tokens, spec) <= row.score
        if length == spec.max_tokens or not any_rank(not all(row.has_ended for row in rows), device, process_group):
            break
        row_indices = torch.arange(len(rows), device=device)
        live = [place for place, row in enumerate(rows) if not row.has_ended]
        if should_drop_rows(len(live), len(rows)):
            row_indices = torch.tensor(live, dtype=torch.int64, device=device)
            rows = [rows[place] for place in live]
            scores_RB, index_RB = scores_RB[row_indices], index_RB[row_indices]
        beam_indices = (row_indices[:, None] * num_beams + index_RB // vocabulary).reshape(-1)
        tokens = (index_RB % vocabulary).reshape(-1)
        steps.take_rows(beam_indices)
        if penalty is not None:
            penalty.take_rows(beam_indices)
            penalty.append(tokens)
        logits = steps.next(tokens)
    return [row.text for row in all_rows]


def _norm(length: int, spec: GenerationSpec) -> float:
    return float(((5 + length) / 6) ** spec.length_penalty)
