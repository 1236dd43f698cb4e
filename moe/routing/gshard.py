"""GShard's top-2 gating (arXiv 2006.16668, Algorithm 1, and the authors' code, Lingvo's `Top2GatingOnLogits`)."""

import torch
from torch import Tensor

from moe.random import Purpose, fold, gumbel, uniform
from moe.routing.assignments import queue_choices
from moe.routing.balance import choice_counts
from moe.routing.router import Router, RoutingState, TokenContext
from moe.routing.routing import Routing
from moe.routing.selection import build_routing
from moe.spec.routers import GShardTop2Spec


class GShardTop2(Router[GShardTop2Spec]):
    """Top-2 router: the best expert and, if the second-expert policy accepts it, another one. Replayed choices are
    subject to the policy too.

    Training drops tokens whose expert's buffer is full; evaluation keeps both choices and draws no random numbers.
    """

    replays = True

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        spec, (_, group_tokens, num_experts) = self.spec, logits.shape
        probs_GSE = logits.softmax(dim=-1)
        real_GS = tokens.real(logits)
        key = fold(tokens.seed, tokens.step, layer)

        first_GS = probs_GSE.argmax(dim=-1)
        if num_experts == 1:
            expert = first_GS[..., None]
            gate, asks = torch.ones_like(expert, dtype=probs_GSE.dtype), real_GS[..., None]
            is_accepted = asks
        else:
            second_GS = self._second_choice(logits, probs_GSE, first_GS, tokens, key)
            expert = state.apply_replay(torch.stack((first_GS, second_GS), -1))
            first_GS = expert[..., 0]
            first_gate_GS, second_gate_GS = (probs_GSE.gather(-1, choice).squeeze(-1) for choice in expert.split(1, -1))
            if spec.normalize_gates == "before_drop":
                total_GS = first_gate_GS + second_gate_GS + 1e-9
                first_gate_GS, second_gate_GS = first_gate_GS / total_GS, second_gate_GS / total_GS
            accepted_GS = real_GS & self._accepts_second(second_gate_GS, tokens, key)
            gate = torch.stack((first_gate_GS, second_gate_GS), -1)
            is_accepted = torch.stack((real_GS, accepted_GS), -1)
            asks = torch.stack((real_GS, real_GS), -1) if spec.rejected_second_takes_slot else is_accepted

        capacity = spec.capacity(group_tokens, num_experts) if tokens.training else None
        queues = queue_choices(expert, asks, num_experts)
        is_kept = is_accepted & queues.admits(capacity)
        slots = (
            queue_choices(expert, is_kept, num_experts) if asks is not is_accepted else queues.within_capacity(capacity)
        )

        weight = torch.where(is_kept, gate, 0.0)
        if spec.normalize_gates == "after_drop" and num_experts > 1:
            total = weight.sum(-1, keepdim=True)
            weight = weight / torch.where(total > 0, total, 1.0)
        return build_routing(
            logits, probs_GSE, expert, weight, is_kept, queues, slots,
            is_accepted=is_accepted, real=real_GS, capacity=capacity,
            balance=self._auxiliary_loss(first_GS, probs_GSE, real_GS),
        )  # fmt: skip

    def _second_choice(
        self, logits: Tensor, probs_GSE: Tensor, first_GS: Tensor, tokens: TokenContext, key: int
    ) -> Tensor:
        """Second choice of each token: the best after the first, or one sampled by Gumbel noise."""
        if self.spec.second_expert == "sampling" and tokens.training:
            noise = gumbel(fold(key, Purpose.GUMBEL), tokens.keys(logits), logits.shape[-1])
            scores = logits.detach() + noise.to(logits.dtype)
        else:
            scores = probs_GSE.detach()
        return scores.scatter(-1, first_GS[..., None], -torch.inf).argmax(dim=-1)

    def _accepts_second(self, gate_GS: Tensor, tokens: TokenContext, key: int) -> Tensor:
        """bool `[G, S]`: policy `random` accepts a second choice with probability min(1, gate / threshold); other
        policies, and evaluation, accept all."""
        if self.spec.second_expert != "random" or not tokens.training:
            return torch.ones_like(gate_GS, dtype=torch.bool)
        draws = uniform(fold(key, Purpose.SECOND_EXPERT), tokens.keys(gate_GS))
        return draws < gate_GS.detach() / max(self.spec.second_expert_threshold, 1e-9)

    def _auxiliary_loss(self, first_GS: Tensor, probs_GSE: Tensor, real_GS: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, number of groups), from first choices before capacity: mean over groups and experts of density · mean
        probability, times E² (released code) or without that factor (paper, Algorithm 1 line 14)."""
        num_groups, group_tokens, num_experts = probs_GSE.shape
        positions = max(1, group_tokens)  # padding counts, as in the released code
        density_GE = choice_counts(first_GS[..., None], real_GS, num_experts).to(probs_GSE.dtype) / positions
        proxy_GE = torch.einsum("gse,gs->ge", probs_GSE, real_GS.to(probs_GSE.dtype)) / positions
        if self.spec.normalize_gates == "after_drop":  # the released code's other mode excludes padding from the means
            real_share = real_GS.to(probs_GSE.dtype).mean(1, keepdim=True) + 1e-6
            density_GE, proxy_GE = density_GE / real_share, proxy_GE / real_share
        scale = num_experts**2 if self.spec.aux_form == "e_squared" else 1
        loss = (density_GE * proxy_GE).sum() * (scale / max(1, num_groups * num_experts))
        return loss, probs_GSE.new_full((), num_groups)
