"""Beam search with length normalisation (arXiv 1609.08144, section 7)."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moe.spec.generation import GenerationSpec
from moe.tasks.decoding.steps import Steps, any_rank


@dataclass
class _Best:
    """The best texts of one row that have ended, with their scores."""

    number: int
    found: list[tuple[float, list[int]]] = field(default_factory=list)

    def add(self, score: float, tokens: list[int]) -> None:
        self.found.append((score, tokens))
        self.found.sort(key=lambda each: -each[0])
        del self.found[self.number :]

    def beaten_by(self, score: float) -> bool:
        """Whether a text of this score would be among them."""
        return len(self.found) < self.number or score > self.found[-1][0]


@torch.no_grad()
def beam_search(
    steps: Steps,
    logits: Tensor,
    spec: GenerationSpec,
    ends: Collection[int],
    *,
    together: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """The text of each row that scores best of those that `spec.num_beams` beams find, without the token that ends it.

    `logits` `[B, V]` are those of the first token. A text scores the sum of its tokens' log-probabilities, its end
    among them, divided by ((5 + n) / 6)^α for n tokens. Beams go on until none can score better than what has ended.
    `together` as in `one_by_one`.
    """
    num_rows, num_beams, vocabulary = logits.shape[0], spec.num_beams, logits.shape[-1]
    device, last = logits.device, list(ends)
    best = [_Best(num_beams) for _ in range(num_rows)]
    texts: list[list[list[int]]] = [[[] for _ in range(num_beams)] for _ in range(num_rows)]
    steps.take_rows(torch.arange(num_rows, device=device).repeat_interleave(num_beams))
    logits = logits.repeat_interleave(num_beams, dim=0)
    scores_RB = logits.new_full((num_rows, num_beams), -torch.inf, dtype=torch.float64)
    scores_RB[:, 0] = 0  # beams begin alike: one of them stands for all
    for length in range(1, spec.max_tokens + 1):
        logp = logits.log_softmax(-1, dtype=torch.float64).view(num_rows, num_beams, vocabulary)
        every = scores_RB[..., None] + logp
        norm = _norm(length, spec)
        for row, ended in enumerate(every[..., last].flatten(1).tolist() if last else []):
            for place, score in enumerate(ended):
                if score > -torch.inf and best[row].beaten_by(score / norm):
                    best[row].add(score / norm, texts[row][place // len(last)])
        every[..., last] = -torch.inf
        scores_RB, index = every.flatten(1).topk(num_beams, dim=-1)
        beam, token = index // vocabulary, index % vocabulary
        texts = [
            [[*texts[row][b], t] for b, t in zip(beams, tokens, strict=True)]
            for row, (beams, tokens) in enumerate(zip(beam.tolist(), token.tolist(), strict=True))
        ]
        going = _going(scores_RB, best, spec)
        if length == spec.max_tokens or not any_rank(going, device, together):
            break
        first = torch.arange(num_rows, device=device)[:, None] * num_beams
        steps.take_rows((first + beam).reshape(-1))
        logits = steps.next(token.reshape(-1))
    for row, scores in enumerate(scores_RB.tolist()):  # what was cut short scores as it stands
        if scores and best[row].beaten_by(scores[0] / norm):
            best[row].add(scores[0] / norm, texts[row][0])
    return [each.found[0][1] for each in best]


def _norm(length: int, spec: GenerationSpec) -> float:
    return ((5 + length) / 6) ** spec.length_penalty


def _going(scores_RB: Tensor, best: list[_Best], spec: GenerationSpec) -> bool:
    """Whether any row has a beam that may still score better: log-probabilities only fall, lengths only grow."""
    longest = _norm(spec.max_tokens, spec)
    return any(each.beaten_by(row[0] / longest) for row, each in zip(scores_RB.tolist(), best, strict=True))
